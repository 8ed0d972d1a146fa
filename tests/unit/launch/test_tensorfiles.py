"""Files of tensors looked into without torch: what is cut, hollow or a lie is named (P1)."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from perdure.files.tensorfiles import list_missing_files, read_safetensors
from perdure.launch.results.pulling import look_into
from perdure.launch.ssh.results import hash_file
from perdure.model.platforms.launching import PulledFile, PullManifest

TWO = {
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [12, 20]},
}


def write(path: Path, header: Any, data: bytes = b"\0" * 20, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_a_whole_file_tells_its_tensors(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, **TWO}
    assert read_safetensors(write(tmp_path / "m.safetensors", header)) == {"a", "b"}
    assert read_safetensors(write(tmp_path / "empty.safetensors", {}, b"")) == set()


def test_what_the_format_s_own_library_writes_is_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    path = tmp_path / "m.safetensors"
    library.save_file({"x": torch.ones(3, 4), "y": torch.zeros(0), "z": torch.tensor(1)}, path)
    assert read_safetensors(path) == {"x", "y", "z"}


@pytest.mark.parametrize(
    ("header", "data", "length", "word"),
    [
        (TWO, b"\0" * 19, None, "end at byte"),
        (TWO, b"\0" * 21, None, "end at byte"),
        (TWO, b"", 1 << 63, "a header of"),
        (b"{", b"", None, "a header of"),
        (b"[[", b"", None, "its header"),
        (b'{"a": {"dtype": "F32"}}', b"", None, "its header"),
        (b'{"\xff": 1}', b"", None, "its header"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None, "its header"),
        (TWO | {"b": TWO["b"] | {"data_offsets": [13, 21]}}, b"\0" * 21, None, "begins at 13"),
        (TWO | {"b": TWO["b"] | {"data_offsets": [4, 12]}}, b"\0" * 12, None, "begins at"),
        (TWO | {"b": TWO["b"] | {"shape": [2]}}, b"\0" * 20, None, "is not its shape"),
        (TWO | {"b": TWO["b"] | {"shape": [-1, -1]}}, b"\0" * 20, None, "has the shape"),
        (TWO | {"b": TWO["b"] | {"data_offsets": [12, -4]}}, b"\0" * 20, None, "begins at"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, header: Any, data: bytes, length: int | None, word: str
) -> None:
    path = write(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(ValueError, match=word):
        read_safetensors(path)


def test_an_index_names_what_is_missing_and_nothing_elsewhere(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    write(tmp_path / "model-1.safetensors", TWO)
    shards = {"a": "model-1.safetensors", "c": "model-1.safetensors", "d": "model-2.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
    assert list_missing_files(index) == [
        "tensor 'c' is not in model-1.safetensors",
        "model-2.safetensors with 1 tensors is missing",
    ]
    for shard in ("../x.safetensors", "/etc/passwd", "", "..", 7):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(ValueError, match="no file beside it"):
            list_missing_files(index)
    for text in ("[]", "{}", '{"weight_map": []}', "{" * 100_000):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"."):
            list_missing_files(index)


def make_manifest(folder: Path) -> PullManifest:
    files = tuple(
        PulledFile(str(path.relative_to(folder)), *hash_file(str(path)))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    return PullManifest(job="gpt", host="box", roots={}, pulled_s=1.0, files=files)


def test_a_folder_as_hugging_face_writes_it_is_understood_or_named(tmp_path: Path) -> None:
    """P1: .safetensors were not loaded, and what was not understood was not said."""
    torch = pytest.importorskip("torch")

    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    write(folder / "model-1.safetensors", TWO)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model-1.safetensors")}))
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}}, folder / "optimizer.bin")
    torch.save({"args": Path("of/the/person's"), "w": torch.ones(1)}, folder / "training_args.bin")
    (folder / "other.bin").write_bytes(b"words")
    (folder / "weights.npz").write_bytes(b"words")
    torn = tmp_path / "out.torn" / "checkpoint-11"
    torn.mkdir(parents=True)
    (torn / "model.safetensors").write_bytes(b"cut")
    (torn / "optimizer.pt").write_bytes(b"cut")
    (torn / ".metadata").write_bytes(b"cut")
    found = look_into(tmp_path, make_manifest(tmp_path), allow_pickle=False)
    assert found.problems == (), "what perdure has moved there is no damage of the pull"
    assert (found.loaded, found.tensors) == (2, 3)
    words = " ".join(found.unknown)
    assert "training_args.bin (names pathlib" in words
    assert "other.bin (.bin)" in words
    assert "weights.npz (.npz)" in words
    assert "out.torn/checkpoint-11/model.safetensors (torn on the box" in words

    (folder / "model-1.safetensors").write_bytes(b"cut")
    (folder / "config.json").write_text("{")
    found = look_into(tmp_path, make_manifest(tmp_path), allow_pickle=False)
    assert sorted(Path(text.split(" ")[0].rstrip(":")).name for text in found.problems) == [
        "config.json", "model-1.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
