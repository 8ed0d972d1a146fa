"""T10: standard output that nobody reads stops neither the job nor its supervisor."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.service.jobfiles import Parts, load_parts
from perdure.service.jobfolders import paths_of
from tests.e2e.harness import SCRIPTS
from tests.waiting import PATIENCE_S

FAMILY = str(SCRIPTS / "quiet_family.py")


class Unread:
    """`perdure run` whose terminal or pipe has `reader` as its other end, which nobody reads."""

    def __init__(self, home: Path, stdout: int, reader: int, *options: str) -> None:
        self.home, self.reader, self.stdout = home, reader, stdout
        self.paths = paths_of(str(home / "state"), "unread")
        self.env = dict(os.environ, PERDURE_HOME=str(home / "state"))
        command = (sys.executable, "-m", "perdure", "run", "--name", "unread", "--cold", *options)
        self.process = subprocess.Popen(command, stdout=stdout, stderr=stdout, env=self.env)

    def parts(self) -> Parts:
        found = load_parts(self.paths)
        assert found is not None
        return found

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, what
            assert time.monotonic() < deadline, what
            time.sleep(0.02)

    def is_full(self) -> bool:
        """Return whether whoever writes more now has to wait."""
        return not select.select([], [self.stdout], [], 0)[1]

    def printed(self) -> int:
        files = Path(self.paths.logs, "ranks").glob("g*/rank-*.out")
        return sum(path.stat().st_size for path in files)

    def cli(self, *args: str) -> str:
        done = subprocess.run(
            (sys.executable, "-m", "perdure", *args),
            env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        return done.stdout

    def check(self) -> None:
        """Kill the controller, which must come back; then end the job, which must end."""
        self.until(lambda: self.printed() > 400_000, "enough to fill any pipe")
        self.until(self.is_full, "a full pipe, or a stopped terminal")
        first = self.parts().controller
        os.kill(first, signal.SIGKILL)
        self.until(lambda: self.parts().controller not in (0, first), "another controller")
        self.process.send_signal(signal.SIGTERM)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_S)
        assert "stopped" in self.cli("status")
        assert "JobEnded" in self.cli("events", "unread")


@pytest.fixture
def started() -> Iterator[list[Unread]]:
    found: list[Unread] = []
    yield found
    for one in found:
        os.close(one.stdout)
        os.close(one.reader)
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_a_full_pipe_stops_nothing(tmp_path: Path, started: list[Unread]) -> None:
    """T10: a killed controller was not started again, and SIGTERM was ignored."""
    reader, stdout = os.pipe()
    run = Unread(tmp_path, stdout, reader, FAMILY, "500000")
    started.append(run)
    run.check()


@pytest.mark.long
def test_a_stopped_terminal_stops_nothing(tmp_path: Path, started: list[Unread]) -> None:
    """T10: the same after Ctrl-S, with the status line that Rich redraws."""
    reader, stdout = pty.openpty()
    os.write(reader, b"\x13")
    run = Unread(tmp_path, stdout, reader, FAMILY, "500000")
    started.append(run)
    run.check()


@pytest.mark.long
def test_a_job_outlives_the_terminal_that_it_was_started_in(
    tmp_path: Path, started: list[Unread]
) -> None:
    """What is written to it then (EIO) ends nobody, and SIGHUP says only that nobody looks."""
    reader, stdout = pty.openpty()
    run = Unread(tmp_path, stdout, os.dup(reader), FAMILY, "10")
    started.append(run)
    run.until(lambda: run.printed() > 0, "ranks")
    os.close(reader)
    os.close(run.reader)
    run.reader = os.open(os.devnull, os.O_RDONLY)
    first = run.parts().controller
    os.kill(first, signal.SIGKILL)
    run.until(lambda: run.parts().controller not in (0, first), "another controller")
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGHUP)
    second = run.parts().controller
    os.kill(second, signal.SIGKILL)  # It is seen after the signals.
    run.until(lambda: run.parts().controller not in (0, first, second), "a third controller")
    run.cli("stop", "unread", "--now")
    run.process.wait(PATIENCE_S)
    assert "stopped" in run.cli("status")
