"""The disk of a job's servers is full for a while: once there is room, it is decided again."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disks import small_disk
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


def test_a_part_that_cannot_be_started_again_ends_no_job(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """The file system refuses its log, as one that has become read-only does: ranks train on."""
    (tmp_path / "loop.py").write_text(
        "import itertools, time\nfor n in itertools.count():\n"
        "    print(n, flush=True)\n    time.sleep(0.05)\n"
    )
    job = start("refused", "-n", "1", "--cold", "loop.py")
    job.wait_state("running")
    log, out = job.folder / "logs" / "controller.log", job.folder / "logs/ranks/g0/rank-0.out"
    log.rename(log.with_suffix(".before"))
    log.mkdir()
    job.kill("perdure controller")
    job.wait_until(lambda: "tried again until it can be" in job.text(), "the refusal")
    size = out.stat().st_size
    job.wait_until(lambda: out.stat().st_size > size + 50, "steps without a controller")
    log.rmdir()
    job.wait_until(lambda: "controller" in job.text() and "started again" in job.text(), "another")
    job.cli("stop", "refused", "--now")
    job.wait()


@pytest.mark.slow
@pytest.mark.long
def test_a_file_system_that_becomes_read_only_ends_no_job(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """As ext4 becomes after an error of its disk: the server that ends by it is waited for."""
    (tmp_path / "state").mkdir()
    image, folder = tmp_path / "image", str(tmp_path / "state")
    image.write_bytes(b"")
    os.truncate(image, 400 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), folder], capture_output=True)
    if made.returncode or mounted.returncode:
        pytest.skip("no file system of its own can be mounted here")
    try:
        (tmp_path / "beat.py").write_text(
            "import time\nwhile True:\n"
            "    open('beat', 'w').write(str(time.time()))\n    time.sleep(0.1)\n"
        )
        job = start("readonly", "-n", "1", "--cold", "beat.py")
        job.wait_state("running")
        subprocess.run(["mount", "-o", "remount,abort", folder], check=True)
        job.cli("pause", "readonly", "--timeout-s", "1", check=False)  # Something to be journaled.
        job.wait_until(lambda: "Read-only file system: tried again" in job.text(), "the refusal")
        refused_s = time.time()
        beat = tmp_path / "beat"
        job.wait_until(lambda: beat.stat().st_mtime > refused_s + 5.0, "training")
        for _ in range(2):
            job.process.terminate()
            time.sleep(0.5)
        assert job.wait() == 128 + 15, job.text()
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    """Write until not a byte more fits."""
    for size in (1 << 20, 1 << 10):
        with contextlib.suppress(OSError), open(disk / f"fill-{size}", "wb", buffering=0) as file:
            while True:
                file.write(bytes(size))
    assert os.statvfs(disk).f_bavail == 0


def make_room(disk: Path) -> None:
    for path in disk.glob("fill-*"):
        path.unlink()


BEAT = """
import itertools, os, time
beat = open(os.path.join(os.environ["BEATS"], "beat-" + os.environ["RANK"]), "a")
for n in itertools.count():
    print(os.environ["PERDURE_GENERATION"], file=beat, flush=True)
    time.sleep(0.05)
"""


def start_beating(start: Callable[..., Job], folder: Path, *words: str) -> Job:
    """Start two ranks that note their generation again and again, and wait until both do."""
    (folder / "loop.py").write_text(f"import os\nos.environ['BEATS'] = {str(folder)!r}\n{BEAT}")
    job = start("full", "-n", "2", "--cold", *words, "loop.py")
    job.wait_until(lambda: read_generations(folder) == {"0"}, "ranks")
    return job


def read_generations(folder: Path) -> set[str]:
    """Return what the two ranks have noted last."""
    beats = [folder / f"beat-{rank}" for rank in range(2)]
    return {(beat.read_text().split() or [""])[-1] if beat.exists() else "" for beat in beats}


def test_ranks_that_find_no_room_to_start_wait_for_it(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """The disk of logs has no inode left while a rank dies: one restart, once there is one."""
    logs = tmp_path / "logs"
    with small_disk(logs, "1m,nr_inodes=40"):
        job = start_beating(start, tmp_path, "--log-dir", str(logs))
        with contextlib.suppress(OSError):
            for number in range(100):
                (logs / f"fill-{number}").touch()
        job.kill("perdure rank")
        job.wait_until(lambda: "waits to start its ranks" in job.text(), "the refusal")
        assert f"No space left on device: {logs}" in job.text()
        job.wait_until(lambda: job.state().get("waits"), "the refusal in the snapshot")
        assert "waits to start its ranks" in job.cli("status", "full").stdout
        job.wait_until(lambda: not job.find("perdure rank full g0"), "the end of all ranks")
        make_room(logs)
        job.wait_until(lambda: read_generations(tmp_path) == {"1"}, "the next world")
        job.wait_until(lambda: "the wait is over" in job.text(), "a word that it is over")
        assert job.state()["restarts"] == 1
        job.cli("stop", "full", "--now")
        job.wait()


@pytest.mark.long
def test_a_full_state_directory_holds_up_no_restart(
    disk: Path, start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start_beating(start, tmp_path)
    fill(disk)
    job.kill("perdure rank")
    job.wait_until(lambda: read_generations(tmp_path) == {"1"}, "the next world")
    make_room(disk)
    job.cli("stop", "full", "--now")
    job.wait()
