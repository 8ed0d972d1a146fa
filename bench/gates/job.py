"""Gates of a whole job: its ledger, the report of a hang, and its end."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.gates.gate import Gate
from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.killed_twice import train_killed_twice
from tests.waiting import wait_until

STALL_STEP = 125
"""As in stall.py."""


@contextlib.contextmanager
def jobs() -> Iterator[tuple[Callable[..., Job], Path]]:
    """Yield a function that starts a job, and the folder for its files."""
    started: list[Job] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def start(name: str, *options: str) -> Job:
            started.append(Job(Path(folder), name, *options))
            return started[-1]

        try:
            yield start, Path(folder)
        finally:
            for job in started:
                job.end()


def measure_unattributed() -> float:
    """Return the share of a job's time that no account of the ledger explains; two kills."""
    with jobs() as (start, folder):
        report, _, _ = train_killed_twice(start, folder)
        return abs(report["ledger"]["unattributed"]["fraction"])


def measure_useful_error() -> float:
    """Return how far the ledger's useful time is from the script's own, as a share of that."""
    with jobs() as (start, folder):
        report, committed_s, _ = train_killed_twice(start, folder)
        return abs(report["ledger"]["useful"]["s"] - committed_s) / committed_s


def measure_hang_confirm() -> float:
    """Return the seconds from the last sign of a rank that blocks in a read to its verdict."""
    with jobs() as (start, _):
        words = [str(SCRIPTS / "stall.py"), "read", "--for-s", "86400", "--declare"]
        job = start("hang", "-n", "2", *words)

        def find() -> list[dict[str, Any]]:
            document = json.loads(job.cli("diagnose", "hang", "--json").stdout)
            hangs = [v for v in document["verdicts"] if v["kind"].endswith("Hang")]
            return [v for v in hangs if v["step"] == STALL_STEP and v["culprit"]["rank"] == 1]

        job.wait_step(STALL_STEP - 1)
        job.wait_until(find, "a verdict")
        verdict = find()[0]
        job.cli("stop", "hang", "--now", check=False)
        return float(verdict["confirmed_s"] - verdict["first_seen_s"])


def measure_left_behind() -> float:
    """Return the seconds until all processes are gone after the supervisor's death by SIGKILL."""
    with jobs() as (start, _):
        job = start("left", "-n", "2", "--cold", str(SCRIPTS / "quiet_family.py"))
        job.wait_until(lambda: "[rank 1] up" in job.text(), "ranks")
        began_s = time.monotonic()
        os.kill(job.process.pid, signal.SIGKILL)
        wait_until(lambda: not job.leftovers(), "end of its parts")
        return time.monotonic() - began_s


GATES = (
    Gate("ledger-unattributed", "of all time", 0.005, measure_unattributed, pairs=3),
    Gate("ledger-useful-error", "of useful time", 0.02, measure_useful_error, pairs=3),
    Gate("hang-confirm", "s", 3.0, measure_hang_confirm, pairs=3),
    Gate("left-behind", "s", 1.0, measure_left_behind, pairs=5),
)
