"""A file is replaced whole or not at all, and nothing is left beside it."""

import errno
import os
import stat
from pathlib import Path

import pytest

from perdure.files import replace_file, sync_path


@pytest.mark.parametrize("synced", [False, True])
def test_what_was_there_is_replaced_and_nothing_is_left(tmp_path: Path, synced: bool) -> None:
    path = tmp_path / "document"
    for data in (b"the first, which is longer", b"the second"):
        replace_file(path, data, synced=synced)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["document"]


def test_a_mode_is_taken_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "open", b"", mode=0o644)
        replace_file(tmp_path / "usual", b"")
        replace_file(tmp_path / "secret", b"", mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"open": 0o644, "usual": 0o640, "secret": 0o600}


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(tmp_path / "folder", b"data")
    with pytest.raises(OSError, match="No such file"):
        replace_file(tmp_path / "missing" / "document", b"data")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_file_system_that_syncs_no_directories_refuses_nothing() -> None:
    """As CIFS did, and FUSE may: no checkpoint was ever published there. /proc is one of them."""
    sync_path("/proc/self")
    with pytest.raises(OSError, match="Invalid argument") as caught:
        sync_path("/proc/self/status")
    assert caught.value.errno == errno.EINVAL
