"""`--observe` on real processes, beside `test_slow_nodes` where the script is a plain one."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.exact import Start
from tests.e2e.harness import Job
from tests.e2e.test_elastic_inplace import begin, pid_of
from tests.e2e.test_torchft import Training

pytestmark = [pytest.mark.torch, pytest.mark.serial, pytest.mark.slow, pytest.mark.long]


def would(job: Job) -> list[tuple[str, str]]:
    """Return what was not done, and to whom."""
    return [(row["would"], row["culprit"]) for row in job.state()["withheld"]]


def test_torchft_goes_on_by_itself_and_the_report_says_what_would_have_been_done(
    start: Start, tmp_path: Path
) -> None:
    """A group is stopped and another killed: nothing but torchft's own recovery follows."""
    training = Training(start, tmp_path, "--observe", "--env", "PG_TIMEOUT_S=2")
    job = training.job
    training.wait_trusted()
    survivor, stopped, killed = (training.pid(group) for group in range(3))
    at_s = time.time()
    os.kill(stopped, signal.SIGSTOP)
    of_stop = [("left the group out of the quorum", "group 1"), ("restarted the group", "group 1")]
    job.wait_until(lambda: would(job) == of_stop, "what is not done about the stop")
    os.kill(killed, signal.SIGKILL)
    of_death = ("restarted the group", "group 2, rank 2")
    job.wait_until(lambda: would(job) == [*of_stop, of_death], "and about the death")
    training.wait_members(1, at_s, 0)  # torchft's own time-outs have passed.
    os.kill(stopped, signal.SIGCONT)
    training.wait_members(2, at_s, 0, 1)
    assert [training.pid(group) for group in range(3)] == [survivor, stopped, killed]
    said = job.cli("status", "ft").stdout
    assert "Observed only: nothing was ever acted upon." in said
    assert ", 0 restarts, depth torchft" in said
    assert "would have restarted the group" in job.cli("diagnose", "ft").stdout
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    report = job.report()
    assert [row["would"] for row in report["withheld"]] == [w for w, _ in [*of_stop, of_death]]
    assert not [row for row in report["recoveries"] if row["rung"] == "restart"]
    assert (job.folder / "journal.jsonl").read_text().count('"type":"RanksStarted"') == 3


def test_an_elastic_world_that_is_only_observed_is_not_formed_again(
    start: Start, tmp_path: Path
) -> None:
    """A member is stopped: it is told of. One dies, and with it the job, as under torchrun."""
    job = begin(start, tmp_path / "trail", "--observe", steps=100_000)
    stopped = pid_of(job, 1)
    os.kill(stopped, signal.SIGSTOP)
    job.wait_until(lambda: would(job), "what is not done about the stop")
    os.kill(stopped, signal.SIGCONT)
    step = job.state()["step"]
    job.wait_until(lambda: job.state()["step"] > step + 20, "steps after it")
    assert "would have restarted the world" in job.cli("status", "el").stdout
    os.kill(pid_of(job, 2), signal.SIGKILL)
    assert job.wait() == 128 + signal.SIGKILL
    report = job.report()
    assert [row["cause"] for row in report["withheld"]][-1] == "Crash"
    assert {row["rung"] for row in report["recoveries"]} <= {"give up", "none"}
