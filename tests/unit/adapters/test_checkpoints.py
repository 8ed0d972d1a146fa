from pathlib import Path

import pytest
import xxhash

from perdure.adapters.checkpoints import verify_all
from perdure.model.checkpoints import MANIFEST, FileEntry, Manifest
from perdure.model.codec import encode


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000010"
    folder.mkdir()
    data = bytes(range(256)) * 10
    (folder / "a.bin").write_bytes(data)
    entry = FileEntry("a.bin", len(data), xxhash.xxh3_128(data).hexdigest())
    manifest = Manifest(step=10, world_size=1, files=(entry,))
    (folder / MANIFEST).write_bytes(encode(manifest))
    return folder


def problems(folder: Path) -> str:
    (result,) = verify_all(str(folder))
    assert result.ok == (not result.problems)
    return "; ".join(result.problems)


def test_whole_checkpoint_is_whole(checkpoint: Path) -> None:
    assert problems(checkpoint) == ""
    assert [r.step for r in verify_all(str(checkpoint.parent))] == [10]


def test_truncated(checkpoint: Path) -> None:
    (checkpoint / "a.bin").write_bytes(b"short")
    assert problems(checkpoint) == "a.bin has 5 bytes instead of 2560"


def test_one_bit(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "a.bin").read_bytes())
    data[1000] ^= 1
    (checkpoint / "a.bin").write_bytes(data)
    assert problems(checkpoint) == "a.bin does not match its hash"


def test_missing_unexpected_and_empty(checkpoint: Path) -> None:
    (checkpoint / "a.bin").unlink()
    (checkpoint / "b.bin").write_bytes(b"")
    assert problems(checkpoint) == "a.bin is missing; b.bin is not in the roster"
    (checkpoint / "b.bin").unlink()
    (checkpoint / MANIFEST).write_bytes(encode(Manifest(step=10, world_size=1, files=())))
    assert problems(checkpoint) == "the roster is empty"
    (checkpoint / MANIFEST).unlink()
    assert problems(checkpoint) == "no manifest"
