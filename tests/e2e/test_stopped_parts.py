"""SIGSTOP to parts of perdure itself: they live, answer nothing, and nobody may wait for them."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from perdure.model.verdicts import Verdict
from perdure.service.jobfiles import read_mirror
from perdure.service.jobfolders import paths_of
from perdure.telemetry.verdicts import list_verdicts
from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]


@pytest.fixture
def pause() -> Iterator[Callable[[int], None]]:
    """Return a function that stops a process; it goes on after the test, should it still live."""
    pids: list[int] = []

    def stop(pid: int) -> None:
        pids.append(pid)
        os.kill(pid, signal.SIGSTOP)

    yield stop
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def launch(start: Start, home: Path, *lines: str) -> Job:
    """Start the exact script at 5 steps a second, with checkpoints only where one is asked for."""
    (home / "trail").mkdir()
    spec = home / "job.toml"
    args = ["--trail", str(home / "trail"), "--steps", "100000", "--pace-s", "0.2"]
    text = [f'script = "{SCRIPTS / "train_exact.py"}"', f"args = {json.dumps(args)}", *lines]
    spec.write_text("\n".join(text) + "\n[checkpoint]\nevery_steps = 100000\n")
    job = start("job", "-n", "2", "-c", str(spec))
    job.wait_step(10)
    return job


def finish(job: Job, step: int) -> None:
    """See it train beyond `step`, and stop it."""
    job.wait_step(step + 10)
    job.cli("stop", "job")
    assert job.wait() == 0, job.text()


def verdicts(job: Job, kind: str) -> list[Verdict]:
    """Return what `perdure diagnose` would say, without the time that a command takes to start."""
    entries = list(read_mirror(paths_of(str(job.home / "state"), job.name)) or ())
    return [verdict for verdict in list_verdicts(entries) if verdict.kind == kind]


def find_step(job: Job) -> int:
    """Return the last step that rank 0 has made, by its own trail."""
    lines = (job.home / "trail" / "rank-0.jsonl").read_text().splitlines(keepends=True)
    return int(json.loads([line for line in lines if line.endswith("\n")][-1])["step"])


def test_a_stopped_keeper_is_named_and_replaced(
    start: Start, tmp_path: Path, pause: Callable[[int], None]
) -> None:
    job = launch(start, tmp_path, "[detect]", "quiet_action_s = 8")
    pid, paused = job.pid_of("perdure keeper"), find_step(job)
    pause(pid)
    job.wait_until(lambda: verdicts(job, "Unresponsive"), "a verdict on the keeper")
    before = find_step(job)
    job.wait_until(lambda: job.state()["restarts"] == 1, "another generation")
    finish(job, job.state()["step"])
    (verdict,) = verdicts(job, "Unresponsive")
    assert verdict.culprit.node == 0
    assert (verdict.evidence["pid"], verdict.evidence["proc_state"]) == (pid, "T")
    assert "stopped (state T)" in verdict.reason
    report = job.report()
    (recovery,) = report["recoveries"]
    assert recovery["rung"] == "restart"
    assert recovery["at_step"] > before + 1, "its ranks trained on meanwhile"
    resumed = recovery["at_step"] - recovery["lost_steps"]
    assert paused <= resumed < recovery["at_step"], "no checkpoint was taken at the verdict"
    assert any("stopped (state T)" in v.reason for v in verdicts(job, "Crash"))


@pytest.mark.long
def test_a_rank_that_dies_under_a_stopped_keeper_is_not_waited_for(
    start: Start, tmp_path: Path, pause: Callable[[int], None]
) -> None:
    # Silence alone would have the keeper replaced only after the test's own time.
    job = launch(start, tmp_path, "[detect]", "quiet_action_s = 1000")
    pause(job.pid_of("perdure keeper"))
    os.kill(job.pid_of("perdure rank"), signal.SIGKILL)
    job.wait_until(lambda: job.state()["restarts"] == 1, "another generation")
    finish(job, job.state()["step"])


def test_each_stopped_part_is_replaced_and_training_goes_on(
    start: Start, tmp_path: Path, pause: Callable[[int], None]
) -> None:
    """All but a keeper that goes on in time: it is named, and the verdict is withdrawn."""
    job = launch(start, tmp_path)
    keeper = job.pid_of("perdure keeper")
    pause(keeper)
    job.wait_until(lambda: verdicts(job, "Unresponsive"), "a verdict on the keeper")
    os.kill(keeper, signal.SIGCONT)
    job.wait_until(
        lambda: "withdrawn" in verdicts(job, "Unresponsive")[0].evidence, "its withdrawal"
    )
    journal = job.folder / "journal.jsonl"

    def wait_replaced(title: str, old: int, lost: int) -> None:
        said = rf"\(pid {old}\) died: stopped \(state T\) for \d+ s"
        job.wait_until(lambda: re.search(said, job.text()), "word of it")
        job.wait_until(lambda: [p for p in job.find(title) if p.pid != old], f"a new {title}")
        job.wait_until(lambda: journal.read_text().count('"ControllerLost"') == lost, "its entry")
        job.wait_step(job.state()["step"] + 10)

    for lost, title in enumerate(("perdure agent", "perdure controller", "nats-server"), 1):
        old = job.pid_of(title)
        pause(old)
        wait_replaced(title, old, lost)
    assert job.state()["restarts"] == 0
    finish(job, job.state()["step"])
    report = job.report()
    assert [row["rung"] for row in report["recoveries"]] == ["none"] * 3
    assert all("stopped (state T)" in row["cause"] for row in report["recoveries"])
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.02, report["ledger"]
