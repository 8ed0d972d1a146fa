"""T8, T16: others' work on the machine is told of as such; nobody is blamed, nothing is done."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS, Job

# Serial: it measures what others use of the machine, and fills it itself.
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.long]

QUIET_S = 10.0
"""How long the job learns what is usual."""
TOLD_S = 120.0
QUIET = 0.15
"""Share of the cores that others may use for the machine to be called quiet."""


def entries(job: Job, kind: str) -> list[dict[str, Any]]:
    """Return the journal's events of a kind."""
    with contextlib.suppress(OSError):
        lines = (job.folder / "journal.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines if f'"{kind}"' in line and line.endswith("}")]
        return [entry["body"] for entry in found if entry["body"]["type"] == kind]
    return []


def is_told(job: Job) -> bool:
    """Return whether a verdict of `HostBusy` stands."""
    told = [e for e in entries(job, "VerdictReached") if e["verdict"]["kind"] == "HostBusy"]
    over = [e for e in entries(job, "VerdictWithdrawn") if e["verdict"]["kind"] == "HostBusy"]
    return len(told) > len(over)


def read_cores(job: Job) -> tuple[float, float, float]:
    """Return the time, the CPU seconds of all, and those of the job's processes, since boot."""
    times, own_s = psutil.cpu_times(), 0.0
    root = psutil.Process(job.process.pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            own = process.cpu_times()
            own_s += own.user + own.system
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return time.monotonic(), busy_s, own_s


def find_others(job: Job, since: tuple[float, float, float]) -> float:
    """Return the share of the cores that others than the job have used since then."""
    at_s, busy_s, own_s = (now - then for now, then in zip(read_cores(job), since, strict=True))
    return (busy_s - own_s) / at_s / (os.cpu_count() or 1)


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Have so many processes compute for ever that are none of the job's."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in started:
            hog.kill()
        for hog in started:
            hog.wait()


def wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return done


def test_a_machine_that_others_fill_is_told_of_and_nothing_is_done(
    start: Start, tmp_path: Path
) -> None:
    """Where others use the machine before, the job may know no usual pace, and that is skipped.

    What may never be is asked for in any case.
    """
    (tmp_path / "trail").mkdir()
    script = [str(SCRIPTS / "train_computing.py"), str(tmp_path / "trail")]
    job = start("busy", "-n", "1", "--nodes", "2", "--spares", "1", *script)
    job.wait_until(lambda: entries(job, "ProgressNoted"), "progress")
    before = 1.0
    for _ in range(3):
        if before > QUIET:
            since = read_cores(job)
            time.sleep(QUIET_S)
            before = find_others(job, since)
    with hogs(2 * (os.cpu_count() or 1)):
        told = wait(lambda: is_told(job), TOLD_S)
    since = read_cores(job)
    over = wait(lambda: not is_told(job), TOLD_S)
    after = find_others(job, since)
    (tmp_path / "trail" / "hurry").touch()
    assert job.wait() == 0

    verdicts = json.loads(job.cli("diagnose", "busy", "--json").stdout)["verdicts"]
    assert [v for v in verdicts if v["actionable"]] == []
    assert {e["generation"] for e in entries(job, "RanksStarted")} == {0}
    assert job.report()["recoveries"] == []
    for share, when, right in ((before, "before the hogs", told), (after, "after them", over)):
        if share > QUIET and not right:
            pytest.skip(f"others used {share:.0%} of the cores {when}")
    assert told, "no HostBusy"
    assert over, "HostBusy was not withdrawn"
    (reason,) = {v["reason"].partition(":")[0] for v in verdicts if v["kind"] == "HostBusy"}
    assert reason == "all 2 nodes are busy with others' work"
