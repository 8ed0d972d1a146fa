"""Why a job on a box is gone, or stands still, asked over ssh: real kills, a real kernel's word."""

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.worker.system.cgroups import Place, list_parent_cgroups
from tests.e2e.box import Laptop, make_boxes, needs_sshd, read_json
from tests.e2e.harness import SCRIPTS
from tests.waiting import wait_until

pytestmark = [pytest.mark.serial, needs_sshd, pytest.mark.timeout(400)]
LIMIT_MIB = 1024
SLEEPER = """\
name = "sleeper"
script = "sleep"
args = ["600"]
no_python = true
[launch]
project = "project"
"""
STALLED = """\
name = "stalled"
script = "train_exact.py"
args = ["--trail", "trail", "--steps", "100000", "--pace-s", "0.1"]
nproc = 2
[detect]
hang_action_s = 10
[policy]
comm_hang = "report"
compute_hang = "report"
[launch]
project = "project"
"""
GREEDY = """\
import os, sys, time
taken = []
while os.path.exists(f"/proc/{sys.argv[1]}"):
    taken.append(b"x" * (4 << 20))
    time.sleep(0.002)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Laptop]]:
    """Return a function that makes a laptop with a box of its own."""
    yield from make_boxes(tmp_path)


@pytest.fixture
def limited() -> Iterator[Place]:
    """Return a memory cgroup with a limit, empty and removed afterwards."""
    parents = list_parent_cgroups()
    if not parents:
        pytest.skip("no memory cgroup that this process may make a child of")
    place = Place(os.path.join(parents[0].path, f"test-box-{os.getpid()}"), parents[0].version)
    os.mkdir(place.path)
    try:
        Path(place.file("limit")).write_text(str(LIMIT_MIB << 20))
        with contextlib.suppress(OSError):
            Path(place.file("swap_limit")).write_text(str(LIMIT_MIB << 20))
        yield place
    finally:
        empty = Path(place.path, "cgroup.procs")  # The box is gone by then, but for its zombies.
        wait_until(lambda: not empty.read_text(), "empty cgroup")
        os.rmdir(place.path)


def write_job(laptop: Laptop, text: str) -> Path:
    """Write the job of `text`; return its folder on the box."""
    (laptop.folder / "project" / "trail").mkdir(parents=True)
    script = laptop.folder / "project" / "train_exact.py"
    script.write_text((SCRIPTS / "train_exact.py").read_text())
    (laptop.folder / "job.toml").write_text(text)
    return laptop.box.home / "perdure" / text.split('"')[1]


def start(laptop: Laptop, folder: Path) -> dict[str, Any]:
    """Launch it; return what its supervisor has written down."""
    laptop.cli("launch", "job.toml", "--on", "box")
    return read_json(folder / "launch" / "start.json")


def test_a_box_out_of_memory_is_told_from_a_kill(
    limited: Place, make: Callable[..., Laptop]
) -> None:
    laptop = make()
    assert laptop.box.server is not None
    Path(limited.path, "cgroup.procs").write_text(str(laptop.box.server.pid))
    folder = write_job(laptop, SLEEPER)
    started = start(laptop, folder)
    Path(f"/proc/{started['child']}/oom_score_adj").write_text("1000")  # Of all there, the first.
    greedy = shlex.join([sys.executable, "-c", GREEDY, str(started["child"])])
    laptop.ssh(f"{greedy} || true")  # It may be the next.
    told = laptop.cli("attach", "sleeper", code=137).stderr
    assert "with signal 9; out of memory: the kernel killed" in told
    told = laptop.cli("diagnose", "sleeper").stdout
    assert "is gone: out of memory" in told, told
    vanished = laptop.ask("diagnose", "sleeper")["vanished"]
    assert vanished["cause"] == "out of memory", vanished

    started = start(laptop, folder)
    for pid in (started["pid"], started["child"]):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "box: killed" in laptop.cli("status", "sleeper").stderr, "its death")
    vanished = laptop.ask("diagnose", "sleeper")["vanished"]
    assert vanished["cause"] == "killed", vanished  # What the run before lacked is not its cause.


def test_an_xid_since_the_start_speaks_for_the_gpu(make: Callable[..., Laptop]) -> None:
    """The kernel's log is real; the driver's line is written into it here, as its own would be."""
    laptop = make()
    folder = write_job(laptop, SLEEPER)

    def log_xid(number: int) -> None:
        try:
            with open("/dev/kmsg", "w") as log:
                log.write(f"NVRM: Xid (PCI:0000:{os.getpid() % 256:02x}:00): {number}, a test's\n")
        except OSError as error:
            pytest.skip(f"the kernel's log cannot be written here: {error}")

    log_xid(13)
    started = start(laptop, folder)
    log_xid(79)
    for pid in (started["pid"], started["child"]):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "box: killed" in laptop.cli("status", "sleeper").stderr, "its death")
    vanished = laptop.ask("diagnose", "sleeper")["vanished"]
    assert vanished["cause"] == "killed", vanished
    assert "): 79, a test's" in vanished["evidence"]["xid"][-1], vanished
    assert "Xid" in laptop.cli("diagnose", "sleeper").stdout


def test_a_rank_that_stands_still_is_alive_and_stalled(make: Callable[..., Laptop]) -> None:
    laptop = make()
    write_job(laptop, STALLED)
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.wait_step("stalled", 10)
    assert laptop.ask("diagnose", "stalled")["fate"]["state"] == "running"
    pid = next(r["pid"] for r in laptop.ask("status", "stalled")["ranks"] if r["rank"] == 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: laptop.ask("diagnose", "stalled")["fate"]["state"] == "stalled", "a stall"
        )
        told = laptop.cli("diagnose", "stalled")
        assert "stalled is stalled: it lives, and has shown nothing" in told.stdout
        assert "box: running" in told.stderr, "nobody calls it dead"
        hangs = [v for v in laptop.ask("diagnose", "stalled")["verdicts"] if "Hang" in v["kind"]]
        assert [v["culprit"].get("rank") for v in hangs] == [1], json.dumps(hangs)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: laptop.ask("diagnose", "stalled")["fate"]["state"] == "running", "it going on"
    )
    laptop.cli("stop", "stalled")
    laptop.cli("attach", "stalled")
    assert laptop.ask("diagnose", "stalled")["fate"]["state"] == "finished"
