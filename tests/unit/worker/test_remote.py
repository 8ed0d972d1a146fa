"""Checkpoints at a URL: what did not arrive whole is not named as the latest."""

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from perdure.model.checkpoints import FileEntry, Manifest
from perdure.model.errors import PlatformError
from perdure.worker.checkpoint.files import Remote


def test_what_arrived_shorter_is_not_tagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalFileSystem.put_file

    def put_half(self: LocalFileSystem, source: str, target: str, **words: Any) -> None:
        put(self, source, target, **words)
        if target.endswith("data.pt"):
            Path(target).write_bytes(Path(target).read_bytes()[:5])

    local = tmp_path / "staging" / "step-00000100"
    local.mkdir(parents=True)
    (local / "data.pt").write_bytes(b"ten bytes.")
    (local / "manifest.json").write_text("{}")
    entry = FileEntry(path="data.pt", bytes=10, xxh3_128="")
    remote = Remote(f"local://{tmp_path}/there")
    monkeypatch.setattr(LocalFileSystem, "put_file", put_half)
    with pytest.raises(PlatformError, match="has 5 bytes, not 10"):
        remote.upload(local, Manifest(step=100, world_size=1, files=(entry,)))
    assert [path.name for path in (tmp_path / "there").rglob("*") if path.is_file()] == ["data.pt"]
