"""The disk of a job's servers is full for a while: once there is room, it is decided again."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The job's state on a disk of its own, of 96 MB."""
    folder = tmp_path / "state"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.serial
def test_three_servers_whose_disk_was_full_keep_the_journal_again(
    disk: Path, start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(3600)\n")
    job = start("full", "-n", "1", "--nodes", "3", "--replicate", "3", "--cold", "sleep.py")
    job.wait_state("running")
    with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    assert os.statvfs(disk).f_bavail == 0
    job.cli("pause", "full", check=False)  # Something to be journaled.
    job.wait_until(lambda: "controller" in job.text() and "died" in job.text(), "a lost controller")
    os.unlink(disk / "fill")
    freed_s = time.time()
    job.wait_until(lambda: job.state().get("at_s", 0.0) > freed_s + 5.0, "decisions")
    job.cli("stop", "full", "--now")
    job.wait()
