"""`perdure status` names what dead supervisors have left, and ends it when asked (T15)."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.cli.app import run_command
from perdure.service.jobfiles import JobLock
from perdure.service.jobfolders import paths_of


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    def start(job: str, **marks: str) -> subprocess.Popen[bytes]:
        env = dict(os.environ, PERDURE_JOB=job, **marks)
        started.append(subprocess.Popen(["sleep", "1000"], env=env, start_new_session=True))
        words = Path(f"/proc/{started[-1].pid}/cmdline")
        wait_until(words.read_bytes, "command line: in the midst of its exec it has none")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ps(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert run_command(["status", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)["left_behind"]


def test_what_nobody_watches_over_is_named_and_ended(
    begin: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    orphan = begin("left", PERDURE_RUN_PID=str(ended.pid))
    (row,) = ps(capsys)
    assert (row["job"], row["pid"], row["supervisor"]) == ("left", orphan.pid, ended.pid)
    assert row["command"] == "sleep 1000"
    assert not row["ended"]
    assert run_command(["status"]) == 0
    assert f"pid {orphan.pid}, lives" in capsys.readouterr().out
    assert ps(capsys, "--clean")[0]["ended"]
    assert orphan.wait(PATIENCE_S) == -9
    assert ps(capsys) == []


def test_what_is_watched_over_is_neither_named_nor_ended(
    begin: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    joined = begin("joined", PERDURE_RUN_PID=str(os.getpid()))
    rank = begin("joined")  # A rank does not know its supervisor; the agent beside it does.
    running = begin("running")
    elsewhere = begin("left", PERDURE_HOME="/elsewhere")
    lock = JobLock(paths_of(str(tmp_path), "running"))
    assert ps(capsys, "--clean") == []
    lock.release()
    assert [row["pid"] for row in ps(capsys)] == [running.pid]
    assert all(process.poll() is None for process in (joined, rank, elsewhere))


def test_a_pid_that_was_given_away_again_is_no_supervisor(
    begin: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever is younger than what it is said to have started has not started it."""
    orphan = begin("left")
    young = begin("left", PERDURE_RUN_PID=str(orphan.pid))
    assert ps(capsys) == []  # `orphan` is older than `young`.
    old = begin("old")
    again = begin("other", PERDURE_RUN_PID="not a number")
    assert {row["pid"] for row in ps(capsys)} == {old.pid, again.pid}
    assert young.poll() is None
