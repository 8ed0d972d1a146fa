"""A project that is sent in a ConfigMap: what is in it, and what unpacking makes of it."""

import os
import tarfile
from pathlib import Path

import pytest

from perdure.launch.kubernetes.project import pack, unpack

EXCLUDE = (".git", "*.pyc")


def test_what_is_excluded_stays_and_what_is_sent_replaces_what_was_there(tmp_path: Path) -> None:
    project, there = tmp_path / "project", tmp_path / "volume" / "project"
    for name, text in {"train.py": "new", "lib/a.py": "a", "lib/a.pyc": "x", ".git/HEAD": "x",
                       "run.sh": "#!/bin/sh\r\ntrue\r\n"}.items():  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_bytes(text.encode())
    (project / "link.py").symlink_to("train.py")
    there.mkdir(parents=True)
    (there / "train.py").write_text("old")
    (there / "result.json").write_text("{}")
    packed = pack(project, EXCLUDE)
    unpack(packed, there)
    found = {str(p.relative_to(there)) for p in there.rglob("*") if not p.is_dir()}
    assert found == {"train.py", "lib/a.py", "link.py", "run.sh", "result.json"}
    assert (there / "link.py").read_text() == "new"
    assert (there / "run.sh").read_bytes() == b"#!/bin/sh\ntrue\n"
    assert os.access(there / "run.sh", os.X_OK)
    assert [path.name for path in there.parent.iterdir()] == ["project"]  # No half of it is left.


def test_the_same_files_are_packed_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    before = pack(tmp_path, ())
    os.utime(tmp_path / "a.py", (1, 1))
    assert pack(tmp_path, ()) == before


def test_a_project_is_unpacked_by_a_python_that_knows_no_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12 has Python 3.11.2; `filter` came with 3.11.4."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.py").write_text("a")

    def extract(self: tarfile.TarFile, path: Path) -> None:
        for name in self.getnames():
            self.extract(name, path, filter="data")

    monkeypatch.delattr(tarfile, "data_filter")
    monkeypatch.setattr(tarfile.TarFile, "extractall", extract)
    unpack(pack(tmp_path / "project", ()), tmp_path / "there")
    assert (tmp_path / "there" / "a.py").read_text() == "a"
