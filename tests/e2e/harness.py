"""Runs the real command with a state directory of its own, and checks that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import PATIENCE_S

SCRIPTS = Path(__file__).resolve().parent / "scripts"


class Job:
    """One `perdure run` under test. It waits `timeout_s` for each fact."""

    def __init__(self, home: Path, name: str, *options: str, timeout_s: float = PATIENCE_S) -> None:
        self.home, self.name, self.timeout_s = home, name, timeout_s
        self.output = home / f"{name}.out"
        self.env = dict(os.environ, PERDURE_HOME=str(home / "state"), COLUMNS="120")
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure", "run", "--name", name, *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=home,
            )

    @property
    def folder(self) -> Path:
        """The job's own directory."""
        return self.home / "state" / "jobs" / self.name

    def text(self) -> str:
        """Return what the command has printed so far."""
        return self.output.read_text(errors="replace")

    def state(self) -> dict[str, Any]:
        """Return the newest snapshot; empty before there is one."""
        try:
            document: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        except (OSError, ValueError):
            return {}
        return document

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition()` is true; fail with the job's output after `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            ended = self.process.poll() is not None  # What has ended made its last facts before.
            if condition():
                return
            assert not ended, f"ended before {what}:\n{self.text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.text()[-4000:]}"
            time.sleep(0.05)

    def wait_step(self, step: int) -> None:
        """Wait until `step` steps are committed."""
        self.wait_until(lambda: self.state().get("step", -1) >= step, f"step {step}")

    def wait_state(self, state: str) -> None:
        """Wait until the job is in `state`."""
        self.wait_until(lambda: self.state().get("state") == state, f"state {state}")

    def wait(self) -> int:
        """Return the exit code; fail after `timeout_s`."""
        try:
            return self.process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.text()[-4000:]}") from None

    def pid_of(self, part: str) -> int:
        """Return the pid of a part by its title, such as `rank` or `perdure keeper`."""
        return self.find(part)[0].pid

    def find(self, part: str) -> list[psutil.Process]:
        """Return the living processes of the job whose command line has `part` in it."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE and part in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self, part: str) -> int:
        """SIGKILL the first process of `part`; return its pid."""
        pid = self.pid_of(part)
        os.kill(pid, signal.SIGKILL)
        return pid

    def cli(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run another perdure command against the same state."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *args],
            env=self.env, cwd=self.home, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{args}: {done.stdout}{done.stderr}"
        return done

    def report(self) -> dict[str, Any]:
        """Return `perdure report --json`."""
        document: dict[str, Any] = json.loads(self.cli("report", self.name, "--json").stdout)
        return document

    def leftovers(self) -> list[str]:
        """Return processes anywhere on the machine that still belong to this job."""
        left = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("PERDURE_HOME") == self.env["PERDURE_HOME"]
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            except psutil.Error:
                continue
        return left

    def end(self) -> None:
        """Stop whatever still runs (after a failed test)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                for process in psutil.Process(self.process.pid).children(recursive=True):
                    process.kill()
                self.process.kill()
                self.process.wait()


def read_trail(folder: Path) -> dict[tuple[int, int], list[tuple[str, list[int]]]]:
    """Return, for each (rank, step), (loss as hex, samples) of every time it was run."""
    runs: dict[tuple[int, int], list[tuple[str, list[int]]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut short by a kill, so not committed
            runs.setdefault((row["rank"], row["step"]), []).append((row["loss"], row["indices"]))
    return runs
