"""Short jobs with their faults, one for each depth in which a job can run."""

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from campaign import find_parts, leftovers

from perdure.failpoints import FOLDER, SWITCH

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS, OWN = ROOT / "tests" / "e2e" / "scripts", ROOT / "bench" / "scripts"
STEPS = 45
KILL_AT = STEPS // 3
NAME = "job"
PAUSE_AT, PAUSE_S = 10, 30.0
CLOCK_STEPS = ((5, 3600.0), (KILL_AT - 2, -86_400.0), (KILL_AT + 5, 0.5), (KILL_AT + 15, 86_400.0))
"""Step -> how many seconds the wall clock is ahead from then on."""
SNAPSHOTS = "snapshot/every=take(15)"
"""A short job has none otherwise."""
LOUD = ("--pace-s", "0.5", "--print-kb", "400")
LEAVE_S = 15.0
"""Given to what a killed supervisor has left."""
RUNS_MAX = 3


@dataclass(frozen=True)
class Depth:
    """One way to run a job."""

    name: str
    script: Path
    options: tuple[str, ...]
    args: tuple[str, ...] = ()
    config: str = ""
    """More of the job file, from its section `checkpoint` on."""
    killed: str = "controller"
    """Which part is killed besides a rank."""

    def command(self, trail: Path, spec: Path) -> list[str]:
        """Return the command line, whose script leaves its trail in `trail`."""
        home = str(spec.parent)
        options = [word.replace("HOME", home) for word in self.options]
        words = ["--trail", str(trail), "--steps", str(STEPS), "--pace-s", "0.05", *self.args]
        if self.name == "torchft":
            words = [str(3 * STEPS), str(trail)]  # Who was killed comes back meanwhile.
        spec.write_text(
            f'script = "{self.script}"\nargs = {json.dumps(words)}\n[restart]\nmax_restarts = 10\n'
            f"[checkpoint]\nevery_steps = 10\n{self.config.replace('HOME', home)}"
        )
        return [sys.executable, "-m", "perdure", "run", "--name", NAME, *options, "-c",
                str(spec)]  # fmt: skip


DEPTHS = (
    Depth("cold", OWN / "counting.py", ("-n", "2", "--cold")),
    Depth("loud", OWN / "counting.py", ("-n", "2", "--cold"), LOUD),
    Depth("supervised", OWN / "plain_exact.py", ("-n", "2")),
    Depth("resumable", SCRIPTS / "train_exact.py", ("-n", "2")),
    Depth("orphaned", SCRIPTS / "train_exact.py", ("-n", "2"), killed="supervisor"),
    Depth("elastic", SCRIPTS / "elastic.py", ("-n", "3"), ("--exact",)),
    Depth("torchft", SCRIPTS / "torchft_groups.py", ("-n", "1", "--torchft", "--replicas", "2")),
    Depth("remote", SCRIPTS / "train_exact.py", ("-n", "2"), config='url = "local://HOME/far"\n'),
)
"""`cold` is a program without torch, `loud` one that prints so much that its logs are cut; `remote`
has its checkpoints at a URL; of an `orphaned` job the supervisor is killed, and the next run goes
on."""


class Run:
    """One job with its faults, in a home of its own."""

    def __init__(self, depth: Depth, terms: str, *, kill: bool = True) -> None:
        """Make the home; nothing is started.

        `terms` are those of failpoints, `pause PART` or `clock`.
        """
        self.depth, self.terms = depth, terms
        self._deeds: list[tuple[int, Callable[[int], bool]]] = []
        """Step -> what is done then, with the supervisor's pid; it returns whether it was."""
        if kill:
            self._deeds = [(KILL_AT, self._kill_rank), (KILL_AT + 10, self._kill_part)]
        verb, _, part = terms.partition(" ")
        self.paused = part if verb == "pause" else ""
        """Part that is stopped for a while."""
        if verb == "pause":
            self.terms, self._deeds = "", [(PAUSE_AT, partial(self._pause, part))]
        if verb == "clock":
            self.terms = ""
            self._deeds += [(at, partial(self._step_clock, s)) for at, s in CLOCK_STEPS]
            self._deeds.sort(key=lambda deed: deed[0])
        self.home = Path(tempfile.mkdtemp(prefix="perdure-fp-"))
        self.trail, self.folder = self.home / "trail", self.home / "points"
        for folder in (self.trail, self.folder, self.home / "shared", self.home / "far"):
            folder.mkdir()
        self.job = self.home / "state" / "jobs" / NAME
        self._env = os.environ | {"PERDURE_HOME": str(self.home / "state"), "STEP_PAUSE_S": "0.05"}
        self._shift, self.shifted = self.home / "shift", verb == "clock"
        if self.shifted:
            self._step_clock(0.0, 0)
            self._env |= {"LD_PRELOAD": build_clock(self.home), "SHIFTED_CLOCK": str(self._shift)}
        self.code = 0
        self.runs = 1
        """Each begins with generation 0."""

    def start(self, terms: str) -> "subprocess.Popen[bytes]":
        """Start the job with `terms` switched."""
        env = self._env | {SWITCH: terms, FOLDER: str(self.folder)}
        command = self.depth.command(self.trail, self.home / "job.toml")
        with open(self.home / "out", "ab") as out:
            return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=self.home)

    def run(self, limit_s: float) -> list[str]:
        """Run the job to its end, again where its supervisor was killed; return what is wrong.

        It is killed by a fault, and once more by the deed of its depth.
        """
        wrong = self._wait(self.start(self.terms), limit_s)
        while self.runs < RUNS_MAX and (self.code == -signal.SIGKILL or self._is_refused()):
            if not self._lost_guard():
                wrong += self._wait_gone()
            self.runs += 1
            wrong += self._wait(self.start(""), limit_s)
        return wrong

    def _lost_guard(self) -> bool:
        """Return whether nobody was there to end what the supervisor left: the next run does."""
        fired = (line.split("\t") for line in self.read("fired"))
        return any(name.startswith("guard/") and fault == "crash" for name, _, fault, *_ in fired)

    def _is_refused(self) -> bool:
        """Return whether the supervisor said in a line that it cannot start, as it had to."""
        said = (self.home / "out").read_text(errors="replace")
        refused = self.code == 3 and "perdure: error: " in said and "Traceback" not in said
        return refused and any("error" in line for line in self.read("fired"))

    def _wait(self, process: "subprocess.Popen[bytes]", limit_s: float) -> list[str]:
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            while self._deeds and self.find_step() >= self._deeds[0][0]:
                if not self._deeds[0][1](process.pid):
                    break
                self._deeds.pop(0)
            time.sleep(0.1)
        if process.poll() is not None:
            self.code = process.returncode
            return []
        self._look(process.pid)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        self.code = process.wait()
        self._wait_gone()
        return [f"no end in {limit_s:.0f} s at step {self.find_step()}"]

    def _look(self, pid: int) -> None:
        """Keep the stacks of what hangs."""
        with open(self.home / "stacks", "w") as out:
            for one in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
                    print(one.pid, one.status(), one.cmdline()[:3], file=out, flush=True)
                    if "python" in one.exe():
                        words = [str(Path(sys.executable).parent / "py-spy"), "dump", "-n", "-p"]
                        subprocess.run([*words, str(one.pid)], stdout=out, stderr=out, timeout=20)

    def _kill_rank(self, pid: int) -> bool:
        for one in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if re.match(rf"perdure rank {NAME} g\d+ r1:", one.cmdline()[0]):
                    one.send_signal(signal.SIGKILL)
                    for staging in self.job.glob("staging-*"):  # As where its machine went too.
                        shutil.rmtree(staging, ignore_errors=True)
                    return True
        return False

    def _kill_part(self, pid: int) -> bool:
        supervisor = self.depth.killed == "supervisor"
        found = [psutil.Process(pid)] if supervisor else find_parts(pid).get(self.depth.killed, [])
        for one in found[:1]:
            one.send_signal(signal.SIGKILL)
        return bool(found)

    def _pause(self, part: str, pid: int) -> bool:
        """Stop one part, or all that there is, for `PAUSE_S`."""
        parts = find_parts(pid)
        if part in ("supervisor", "all"):
            parts["supervisor"] = [psutil.Process(pid)]
        stopped = [one for name, found in parts.items() if part in (name, "all") for one in found]
        for one in stopped:
            with contextlib.suppress(psutil.Error):
                one.suspend()
        time.sleep(PAUSE_S)
        for one in stopped:
            with contextlib.suppress(psutil.Error):
                one.resume()
        return bool(stopped)

    def _step_clock(self, ahead_s: float, pid: int) -> bool:
        """Have the wall clock of all processes of the job be so far ahead from now on."""
        with open(self._shift, "r+b" if self._shift.exists() else "wb") as file:
            file.write(struct.pack("d", ahead_s))
        return True

    def _wait_gone(self) -> list[str]:
        deadline = time.monotonic() + LEAVE_S
        while (left := leftovers(self.home)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for line in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        return [f"left: {line}" for line in left]

    def find_step(self) -> int:
        """Return the newest step of any rank; -1 before there is one."""
        steps = [rows[-1]["step"] for rows in self.read_trail().values() if rows]
        return max(steps, default=-1)

    def read_trail(self) -> dict[str, list[dict[str, Any]]]:
        """Return what each rank, or group, has written."""
        return read_trail(self.trail)

    def read(self, name: str) -> list[str]:
        """Return the lines of `hits` or `fired`."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def list_days(self) -> set[str]:
        """Return the days that the parts' logs are of, those of earlier runs among them."""
        logs = (path.read_text(errors="replace") for path in self.job.glob("**/logs/*.log"))
        return {day for text in logs for day in re.findall(r"^(\d{4}-\d\d-\d\d) ", text, re.M)}

    def report(self) -> dict[str, Any]:
        """Return `perdure report --json`."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "report", NAME, "--json"],
            env=self._env, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        document: dict[str, Any] = json.loads(done.stdout)
        return document


def build_clock(folder: Path) -> str:
    """Return the library by which a wall clock is another."""
    library = folder / "shifted_clock.so"
    source = ROOT / "bench" / "scripts" / "shifted_clock.c"
    words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-lm"]
    subprocess.run(words, check=True, timeout=60)
    return str(library)


def read_trail(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank, or group, has written; what a kill has cut short is left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        rows = found[path.stem] = []
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return found
