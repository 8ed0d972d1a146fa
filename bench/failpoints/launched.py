"""A job that is launched to a box behind a real sshd, pulled and verified, with its faults."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from failpoints.jobs import NAME, ROOT, SCRIPTS, STEPS, Depth, Run
from perdure.failpoints import FOLDER, SWITCH
from perdure.launch.ssh import box

SSH = Depth("ssh", SCRIPTS / "train_exact.py", ())
"""A job that is launched and pulled; no rank is killed."""
OF_IT = ("launch/", "box/", "pull/", "supervise/", "results/")
"""Points that only such a job passes; those of its ranks and parts others pass as well."""


class Launch(Run):
    """A job on a box behind a real sshd: launched, waited for, pulled and verified.

    The faults happen in the commands here, and in what they send to the box. A command that fails
    or is killed is given again without them, and has to succeed then.
    """

    COMMANDS = (
        ("launch", "job.toml", "--on", "box"),
        ("pull", NAME, "pulled"),
        ("verify", "pulled"),
    )

    def __init__(self, depth: Depth, terms: str, *, kill: bool = True) -> None:
        """Make the home, the project, and a box."""
        super().__init__(depth, terms, kill=False)
        from tests.e2e.box import make_boxes

        told = {SWITCH: terms, FOLDER: str(self.folder), "PYTHONPATH": str(ROOT / "src")}
        self._boxes = make_boxes(self.home, **told)
        self.laptop = next(self._boxes)()
        project = self.laptop.folder / "project"
        (project / "trail").mkdir(parents=True)
        shutil.copy(depth.script, project / "train.py")
        (project / "of_windows.sh").write_bytes(b"#!/bin/sh\r\necho one\r\n")
        (self.laptop.folder / "job.toml").write_text(
            f'name = "{NAME}"\nscript = "train.py"\nnproc = 2\n'
            f'args = ["--trail", "trail", "--steps", "{STEPS}"]\n[checkpoint]\nevery_steps = 10\n'
            '[launch]\nproject = "project"\noutputs = ["trail"]\n'
        )
        self.job = self.laptop.folder / "pulled" / "job"
        self.trail = self.laptop.folder / "pulled" / "outputs" / "trail"
        self._env = self.laptop.env

    def run(self, limit_s: float) -> list[str]:
        """Give all commands; return what is wrong."""
        try:
            wrong = [self._give(command, limit_s) for command in self.COMMANDS]
            there = self.laptop.box.home / "perdure" / NAME / "launch"
            starts = json.loads((there / "start.json").read_text())["attempt"]
            on_box = ("supervise/", "perdure run")  # It ends there, and is launched again.
            lost = sum(any(word in line for word in on_box) for line in self.read("fired"))
            wrong += [f"the job was started {starts} times"] * (starts > 1 + lost)
            return [line for line in wrong if line]
        finally:
            with contextlib.suppress(StopIteration):
                next(self._boxes)

    def _give(self, command: tuple[str, ...], limit_s: float) -> str:
        """Give one command, again where it did not succeed; return what is wrong.

        Of two faults the second one may wait for the second try: on the box both stay switched.
        """
        for terms in (self.terms, "", ""):
            done = self._say(command, terms, limit_s)
            if done.returncode == 0:
                break
        if command[0] == "launch" and self._ask_state() != "not-started":
            self._wait_ended(limit_s)  # The second one is refused where the first has started it.
            return ""
        if done.returncode == 0:
            return ""
        return f"{command[0]}: {done.returncode}: {done.stderr.strip()[-300:]}"

    def _say(
        self, command: tuple[str, ...], terms: str, limit_s: float
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *command],
            env=self._env | {SWITCH: terms, FOLDER: str(self.folder)},
            cwd=self.laptop.folder, capture_output=True, text=True, timeout=limit_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        with open(self.home / "out", "a") as out:
            print(command, done.returncode, done.stdout, done.stderr, file=out)
        return done

    def _ask_state(self) -> str:
        there = self.laptop.box.home / "perdure" / NAME / "launch"
        return str(box.read_job_state(str(there))["state"])

    def _wait_ended(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self._ask_state() in ("running", "orphaned") and time.monotonic() < deadline:
            time.sleep(0.2)

    def report(self) -> dict[str, Any]:
        """Return `perdure report --json`, which is asked on the box."""
        found = self.laptop.box.home / "perdure" / "state"
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "report", NAME, "--json"],
            env=os.environ | {"PERDURE_HOME": str(found)},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def read(self, name: str) -> list[str]:
        """Return the lines of `hits` or `fired`, but of what other jobs pass as well."""
        lines = super().read(name)
        documents = (f"{NAME}.json", "PULL_")
        return [
            line
            for line in lines
            if line.startswith(OF_IT) or line.split("\t")[1].startswith(documents)
        ]
