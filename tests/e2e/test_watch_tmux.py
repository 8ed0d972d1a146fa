"""`perdure watch` in tmux, 80 by 24, beside a job that trains: what is seen, and done by keys."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

TMUX = shutil.which("tmux") or ""
pytestmark = [pytest.mark.torch, pytest.mark.skipif(not TMUX, reason="no tmux")]


class Tmux:
    """A terminal of 80 by 24 with a command in it, on a server of its own."""

    def __init__(self, folder: Path, env: dict[str, str], command: str) -> None:
        self.socket = str(folder / "tmux")  # A socket's path has 107 bytes at most.
        left_out = ("TMUX", "NO_COLOR", "COLUMNS", "LINES")
        self.env = {k: v for k, v in env.items() if k not in left_out}
        self.ask("new-session", "-d", "-x", "80", "-y", "24", command)

    def ask(self, *words: str, check: bool = True) -> str:
        argv = [TMUX, "-S", self.socket, "-f", os.devnull, *words]
        done = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    @property
    def text(self) -> str:
        """What is on the screen."""
        return self.ask("capture-pane", "-p")

    def wait(self, *words: str, seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not all(word in self.text for word in words):
            assert time.monotonic() < deadline, f"no {words}:\n{self.text}"
            time.sleep(0.1)

    def press(self, *keys: str) -> None:
        self.ask("send-keys", *keys)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    script = str(SCRIPTS / "train_settings.py")
    running = Job(
        tmp_path, "seen", "-n", "2", script, "--steps", "100000", "--pace-s", "0.15",
        "--trail", str(tmp_path),
    )  # fmt: skip
    yield running
    running.end()


@pytest.fixture
def screen(job: Job) -> Iterator[Tmux]:
    """`perdure watch` without a name, gone into the job."""
    job.wait_step(5)
    command = f"{sys.executable} -m perdure watch; echo left with $?; cat"
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    shown = Tmux(folder, job.env, f"sh -c '{command}'")
    try:
        shown.wait("seen", "running", "1 job")
        shown.press("Enter")
        shown.wait("seen running", "goodput", "2 ranks", "1 Ranks")
        yield shown
    finally:
        shown.ask("kill-server", check=False)
        shutil.rmtree(folder)


def test_a_rank_is_killed_by_a_key_and_the_incident_shows(job: Job, screen: Tmux) -> None:
    screen.press("Down", "K")
    screen.wait("Kill rank 1?", "crash (SIGKILL); what was made since ")
    screen.press("y")
    screen.wait("rank 1: signal 9 (SIGKILL); restart, ", "generation 1")
    screen.press("4")
    screen.wait("decided: restart", "Crash of rank 1")
    screen.press("q")
    screen.wait("left with 0")
    assert job.report()["recoveries"][0]["culprit"] == "rank 1"


@pytest.mark.long
@pytest.mark.slow
def test_a_job_is_paused_resumed_and_a_rank_of_it_looked_into(screen: Tmux) -> None:
    screen.press("p")
    screen.wait("all ranks stand still before one step")
    screen.press("y")
    screen.wait("seen paused", "r resume")
    screen.press("r")
    screen.wait("all ranks train on")
    screen.press("Enter")
    screen.wait("seen running")
    screen.press("1", "Down", "Enter")
    screen.wait("rank 1 of seen: running")
    screen.press("t")
    screen.wait("Process ", "MainThread")
    screen.press("Escape")
    screen.wait("1 Ranks")
    screen.press("q")
    screen.wait("left with 0")
