"""`perdure set` and `drain` of an elastic job, while a rank and the controller are killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.test_elastic_inplace import pid_of, read
from tests.waiting import PATIENCE_S

IN_STEPS = (
    "useful", "steady_overhead", "checkpoint", "reconfiguration.detect", "reconfiguration.decide",
    "reconfiguration.abort", "reconfiguration.communicator",
)  # fmt: skip


def ask(job: Job, *words: str) -> "subprocess.Popen[str]":
    """Give a command, and do not wait for its answer."""
    return subprocess.Popen(
        [sys.executable, "-m", "perdure", *words, "--json"],
        stdout=subprocess.PIPE, text=True, env=job.env, cwd=job.home,
    )  # fmt: skip


def answer_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, _ = process.communicate(timeout=PATIENCE_S)
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.mark.slow
def test_a_change_and_a_drain_hold_whoever_dies(start: Callable[..., Job], tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    job = start(
        "el", "-n", "1", "--cold", "--nodes", "2", str(SCRIPTS / "elastic.py"),
        "--trail", str(trail), "--steps", "100000", "--pace-s", "0.2",
    )  # fmt: skip
    job.wait_step(5)
    change, victim = ask(job, "set", "el", "lr=0.002"), pid_of(job, 1)
    os.kill(victim, signal.SIGKILL)
    changed = answer_of(change)
    assert changed["ok"], changed
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0, 3], "a new member")
    drain = ask(job, "node", "drain", "el", "1")
    job.kill("perdure controller")
    drained = answer_of(drain)
    assert drained["ok"], drained
    assert drained["moves"] == [{"node": 1, "to": None, "ranks": [3]}]
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0], "a world without the node")
    job.cli("stop", "el")
    assert job.wait() == 0, job.text()[-3000:]

    rows = {slot: read(trail, slot) for slot in range(2)}
    agreed: dict[int, set[str]] = {}
    for row in (row for mine in rows.values() for row in mine):
        agreed.setdefault(row["step"], set()).add(row["hash"])
    assert sorted(agreed) == list(range(len(agreed)))
    assert all(len(hashes) == 1 for hashes in agreed.values())  # With one learning rate, too.
    assert rows[1][-1]["step"] == drained["step"] - 1

    report = job.report()
    assert report["steps_committed"] == len(agreed)
    assert report["ledger"]["unattributed"]["s"] <= 0.005 * report["slot_s"]
    spans: dict[int, list[float]] = {}
    for row in (row for mine in rows.values() for row in mine):
        spans.setdefault(row["pid"], []).append(row["at"])
    seen_s = sum(max(at) - min(at) for at in spans.values())  # From a rank's first commit on.
    told_s = sum(report["ledger"][name]["s"] for name in IN_STEPS)
    longest_s = max(b - a for at in spans.values() for a, b in pairwise(at))
    assert abs(told_s - seen_s) <= 0.02 * seen_s + 2 * longest_s * len(spans)
