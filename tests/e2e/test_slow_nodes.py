"""T6: a node twice as slow gives its place to the spare one; observed, it is only told of."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.model.job import DetectConfig
from perdure.worker.native.build import BuildError, build
from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

DEFAULT_S = DetectConfig().slow_action_s
HABIT = 100
"""Collectives of a rank before anything is done to it."""


def launch(start: Start, home: Path, name: str, *options: str) -> Job:
    """Start a plain script on two nodes of a rank each, and a spare node, all on this machine."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"the compiled recorder cannot be built here: {error}")
    (home / name).mkdir()
    script = [str(SCRIPTS / "train_plain.py"), str(home / name)]
    job = start(name, "--cold", "-n", "1", "--nodes", "2", "--spares", "1", *options, *script)
    # A rank that is slow from its first steps may have more to do: its own pace comes first.
    job.wait_until(lambda: count_collectives(job) >= HABIT, "progress at its own pace")
    return job


def count_collectives(job: Job) -> int:
    return max((e["body"].get("collectives", 0) for e in entries(job, "ProgressNoted")), default=0)


def perdure(job: Job, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "perdure", *words],
        env=job.env, cwd=job.home, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    ).stdout  # fmt: skip


def entries(job: Job, kind: str) -> list[dict[str, Any]]:
    """Return the journal's events of a kind."""
    try:
        lines = (job.folder / "journal.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = [json.loads(line) for line in lines if f'"{kind}"' in line and line.endswith("}")]
    return [entry for entry in found if entry["body"]["type"] == kind]


def told(job: Job, kind: str, least: int = 1) -> bool:
    return len(entries(job, kind)) >= least


def write_settings(folder: Path, slow_action_s: float) -> tuple[str, str]:
    """Return the options of a job in which a slowness is acted upon after so long."""
    path = folder / "settings.toml"
    path.write_text(f"[detect]\nslow_action_s = {slow_action_s}\n")
    return "-c", str(path)


@pytest.mark.parametrize("soon", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_node_twice_as_slow_is_replaced_within_minutes(
    start: Start, tmp_path: Path, soon: bool
) -> None:
    """By default; and sooner, where the job file says so."""
    job = launch(start, tmp_path, "slow", *(write_settings(tmp_path, 3.0) if soon else ()))
    perdure(job, "inject", "slow", "slow-forward", "--rank", "1", "--arg", "factor=2.2")
    job.wait_until(lambda: job.state().get("generation") == 1, "the next world")
    job.wait_until(lambda: told(job, "GenerationStepping", least=2), "steps of the next world")
    verdicts = [entry["body"]["verdict"] for entry in entries(job, "VerdictReached")]
    (acted,) = (v for v in verdicts if v["actionable"])
    assert (acted["kind"], acted["evidence"]["stage"]) == ("Straggler", "forward"), acted
    acted_s = acted["evidence"]["acted_after_s"]
    assert (3.0 <= acted_s < DEFAULT_S) if soon else (acted_s >= DEFAULT_S)
    started = [e["body"]["node"] for e in entries(job, "RanksStarted")]
    assert sorted(started) == [0, 0, 1, 2], "node 2 stands in for node 1"
    assert "stands in for node 1" in perdure(job, "events", "slow")
    assert "% of every step" in perdure(job, "diagnose", "slow")
    (tmp_path / "slow" / "hurry").touch()
    assert job.wait() == 0


@pytest.mark.long
def test_what_is_only_observed_is_told_of_and_left_alone(start: Start, tmp_path: Path) -> None:
    """A slow rank, a stopped one and a killed one: nothing is done, and the report says what."""
    job = launch(start, tmp_path, "seen", "--observe", *write_settings(tmp_path, 3.0))
    perdure(job, "inject", "seen", "slow-forward", "--rank", "1", "--arg", "factor=2.2")
    job.wait_until(lambda: told(job, "ActionWithheld"), "what is not done about the slow rank")
    perdure(job, "inject", "seen", "heal", "--rank", "1")
    pids = {rank["rank"]: rank["pid"] for rank in job.state()["ranks"]}
    os.kill(pids[0], signal.SIGSTOP)
    job.wait_until(lambda: told(job, "ActionWithheld", least=2), "what is not done about the stop")
    os.kill(pids[0], signal.SIGCONT)
    job.wait_until(lambda: told(job, "VerdictWithdrawn"), "progress again")
    assert job.state()["generation"] == 0
    assert job.state()["state"] == "running"
    assert "would have restarted the world" in perdure(job, "status", "seen")
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL
    report = json.loads(perdure(job, "report", "seen", "--json"))
    assert report["observed"]
    assert [row["cause"] for row in report["withheld"]][-1] == "Crash"
    assert {row["would"] for row in report["withheld"]} == {"restarted the world"}
    assert "Observed only: nothing was ever acted upon." in perdure(job, "report", "seen")
    assert "nothing was done: would have restarted the world" in perdure(job, "diagnose", "seen")
    assert {e["body"]["generation"] for e in entries(job, "RanksStarted")} == {0}
