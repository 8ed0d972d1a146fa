"""A disk that is soon full, or dead, for tests of those who use it."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "64k") -> Iterator[Path]:
    """Mount a disk of `size`, where this user may."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def dead_disk(folder: Path) -> Iterator[None]:
    """Cover `folder` by a FUSE whose server has died: each call is answered with ENOTCONN."""
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE here")
    options = f"fd={server},rootmode=40755,user_id=0,group_id=0".encode()
    refused = ctypes.CDLL(None).mount(b"dead", os.fsencode(folder), b"fuse", 0, options)
    os.close(server)
    if refused:
        pytest.skip("mounting a FUSE needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
