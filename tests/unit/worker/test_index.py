"""D1: the index of a checkpoint from elsewhere is read as data, however it asks for code."""

import hashlib
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import PATIENCE_S

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.distributed.checkpoint import filesystem, metadata, planner, storage  # noqa: E402

from perdure.model.platforms.launching import PULL_MANIFEST, PulledFile, PullManifest  # noqa: E402
from perdure.worker.checkpoint.index import read_index, read_plain  # noqa: E402

_DCP = b"torch.distributed.checkpoint."
_COMMAND = b"touch harmed"


def _word(text: bytes) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text


def _name(module: bytes, name: bytes) -> bytes:
    """Return STACK_GLOBAL of protocol 4."""
    return _word(module) + _word(name) + b"\x93"


class _Calls:
    def __reduce__(self) -> Any:
        import os

        return (os.system, (_COMMAND.decode(),))


_CALL = _word(_COMMAND) + b"\x85R."
_META = _name(_DCP + b"metadata", b"Metadata")
EXPLOITS: dict[str, bytes] = {
    "reduce": pickle.dumps(_Calls()),
    "reduce of protocol 0": pickle.dumps(_Calls(), protocol=0),
    "dotted name": b"\x80\x04" + _name(_DCP + b"filesystem", b"os.system") + _CALL,
    "dotted from a class": b"\x80\x04" + _name(
        _DCP + b"metadata", b"Metadata.__init__.__globals__") + b".",
    "module as a name": b"\x80\x04" + _name(_DCP + b"filesystem", b"os") + b".",
    "GLOBAL, dotted": b"\x80\x04c" + _DCP + b"filesystem\nos.system\n" + _CALL,
    "GLOBAL of a tensor's module": b"\x80\x04ctorch.distributed.tensor._utils\nos.system\n" + _CALL,
    "GLOBAL": b"cos\nsystem\n(V" + _COMMAND + b"\ntR.",
    "INST": b"(V" + _COMMAND + b"\nios\nsystem\n.",
    "OBJ": b"\x80\x02(cos\nsystem\nV" + _COMMAND + b"\no.",
    "function of the package": b"\x80\x04" + _name(_DCP + b"state_dict_loader", b"load") + b")R.",
    "class of the package": b"\x80\x04" + _name(_DCP + b"filesystem", b"FileSystem") + b")R.",
    "function of torch": b"\x80\x04" + _name(b"torch", b"load") + _word(b"x") + b"\x85R.",
    "getattr": b"\x80\x04" + _name(b"builtins", b"getattr") + b".",
    "NEWOBJ_EX": b"\x80\x04" + _META + b")}\x92.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02Vx\nQ.",
    "BUILD alters a class": b"\x80\x04" + _META + b"N}" + _word(b"__init__")
    + _name(b"builtins", b"set") + b"s\x86b.",
    "BUILD with __setstate__": b"\x80\x04" + _META + b")\x81N}" + _word(b"__setstate__")
    + _name(b"builtins", b"set") + b"s\x86bK\x01b.",
    "BUILD of a member": b"\x80\x04" + _name(_DCP + b"metadata", b"_MEM_FORMAT_ENCODING")
    + b"K\x00\x85R}" + _word(b"_value_") + b"K\x05sb.",
    "REDUCE on a class that is not callable so": b"\x80\x04" + _META + b"K\x07\x85R.",
    "cut off": pickle.dumps(metadata.Metadata({}, None, {}))[:-20],
    "no index": pickle.dumps([1, 2]),
    "file of another folder": pickle.dumps(metadata.Metadata({}, None, {
        metadata.MetadataIndex("w"): filesystem._StorageInfo("../../secret", 0, 10)})),
    "absolute file": pickle.dumps(metadata.Metadata({}, None, {
        metadata.MetadataIndex("w"): filesystem._StorageInfo("/dev/zero", 0, 10)})),
    "place that is no place": pickle.dumps(metadata.Metadata({}, None, {
        metadata.MetadataIndex("w"): metadata.StorageMeta()})),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPLOITS)
def test_d1_an_index_runs_no_code_and_alters_no_class(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {one: dict(vars(one)) for one in (metadata.Metadata, metadata.MetadataIndex)}
    (tmp_path / ".metadata").write_bytes(EXPLOITS[what])
    with pytest.raises(pickle.UnpicklingError):
        read_index(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]
    assert before == {one: dict(vars(one)) for one in before}
    assert metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


def test_d1_perdure_verify_says_which_checkpoints_are_hostile_and_runs_none(tmp_path: Path) -> None:
    pulled = tmp_path / "pulled"
    files = []
    for number, data in enumerate(EXPLOITS.values()):
        path = pulled / "job" / str(number) / ".metadata"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        name, digest = str(path.relative_to(pulled)), hashlib.sha256(data).hexdigest()
        files.append(PulledFile(path=name, bytes=len(data), sha256=digest))
    torch.save({"w": _Calls()}, pulled / "job" / "zip.pt")  # A pickle within a zip.
    data = (pulled / "job" / "zip.pt").read_bytes()
    files.append(PulledFile("job/zip.pt", len(data), hashlib.sha256(data).hexdigest()))
    manifest = PullManifest(
        job="j", host="h", roots={"job": "/j"}, pulled_s=time.time(), files=tuple(files)
    )
    (pulled / PULL_MANIFEST).write_bytes(msgspec.json.encode(manifest))
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "verify", str(pulled), "--json"],
        capture_output=True, timeout=PATIENCE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    told = msgspec.json.decode(done.stdout)
    assert told["loaded"] == 0
    assert len(told["problems"]) == len(EXPLOITS)
    (foreign,) = told["unknown"]  # Not opened; what it names is said.
    assert "job/zip.pt (names posix.system" in foreign
    assert [path.name for path in tmp_path.iterdir()] == ["pulled"]


def test_d1_what_torch_writes_is_read_in_every_protocol() -> None:
    size = torch.Size([2, 3])
    properties = metadata.TensorProperties(dtype=torch.bfloat16, layout=torch.sparse_coo)
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 0]), size)
    place = metadata.MetadataIndex("w", torch.Size([0, 0]), 0)
    index = metadata.Metadata(
        {"w": metadata.TensorStorageMetadata(properties, size, [chunk]),
         "n": metadata.BytesStorageMetadata()},
        {"w": ("model", 0, "w")},
        {place: filesystem._StorageInfo("__0_0.distcp", 0, 10)},
        metadata.StorageMeta(checkpoint_id=Path("/x"), modules=["m"]),
    )  # fmt: skip
    item = planner.WriteItem(
        place, planner.WriteItemType.SHARD, None,
        planner.TensorWriteData(chunk, properties, size),
    )  # fmt: skip
    plan = planner.SavePlan([item], filesystem._StoragePrefix("__0_"))
    result = storage.WriteResult(place, 10, filesystem._StorageInfo("__0_0.distcp", 0, 10))
    for written in (index, plan, [result], {1, 2}, torch.device("cpu")):
        for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
            assert read_plain(pickle.dumps(written, protocol)) == written


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_d1_an_index_of_torchs_own_checkpoint_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7,
             "dtypes": [torch.ones(2, dtype=torch.bfloat16)], "name": "x"}  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    index = read_index(tmp_path)
    assert "model.weight" in index.state_dict_metadata
    assert len(index.storage_data) == len(index.state_dict_metadata)


def test_d1_no_bytes_whatsoever_lead_anywhere_else() -> None:
    """Streams cut, mixed and flipped: what comes out are an index's types, or an error."""
    import random

    draw = random.Random(1)
    parts = [data for data in EXPLOITS.values() if data]

    def make() -> bytes:
        data = draw.choice(parts)[: draw.randrange(1, 200)] + draw.choice(parts)
        return bytes(x if draw.random() > 0.02 else draw.randrange(256) for x in data)

    for _ in range(1500):
        try:
            read_plain(make())
        except pickle.UnpicklingError:
            continue


def test_d1_an_index_that_is_no_file_blocks_nobody(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(pickle.UnpicklingError, match="no regular file"):
        read_index(tmp_path)


_PAIR = b"2\x86"
"""DUP and TUPLE2: the pair of a value with itself."""
_INDEX = _name(_DCP + b"metadata", b"MetadataIndex") + b")\x81}" + _word(b"fqn")
NESTED = b"K\x01" + 60 * _PAIR
BOMBS: dict[str, bytes] = {
    "key": b"\x80\x04}" + NESTED + b"K\x02s.",
    "keys": b"\x80\x04}(" + NESTED + b"K\x02u.",
    "keys of DICT": b"\x80\x04(" + NESTED + b"K\x02d.",
    "member": b"\x80\x04\x8f(" + NESTED + b"\x90.",
    "frozenset": b"\x80\x04(" + NESTED + b"\x91.",
    "argument": b"\x80\x04" + _name(b"builtins", b"set") + b"](" + NESTED + b"e\x85R.",
    "layout": b"\x80\x04" + _name(b"torch.serialization", b"_get_layout") + NESTED + b"\x85R.",
    "field of a key": b"\x80\x04}" + _INDEX + NESTED + b"sbK\x02s.",
    "what is altered": b"\x80\x04" + NESTED + b"}b.",
    "what it is filled with": b"\x80\x04" + _META + b")\x81" + NESTED + b"b.",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_an_index_of_values_nested_without_end_is_refused_at_once(bomb: bytes) -> None:
    """D1: pairs nested sixty deep, of one value, were hashed or printed for ever."""
    with pytest.raises(pickle.UnpicklingError, match=r"without end|alters tuple|with tuple"):
        read_plain(bomb)
