"""A job of the demo: started, watched and harmed through perdure's public commands.

All acts share a state directory, `.demo`, so that every command can be tried afterwards. What the
ranks print goes to a file; the demo itself tells each incident in one line.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo"
PERDURE = [sys.executable, "-m", "perdure"]
TOLD_S = 60.0
"""How long an incident may take until the report has it whole; on a quiet machine 3 s."""


def say(text: str) -> None:
    """Print one line of the demo at once."""
    print(text, flush=True)


class DemoJob:
    """One job of the demo, from its start to its end."""

    def __init__(self, name: str, *words: str) -> None:
        """Start `perdure run` with `words`; its output goes to `.demo/NAME.txt`."""
        self.name, self.folder = name, HOME / "jobs" / name
        self.output = HOME / f"{name}.txt"
        self.told = 0
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(
                [*PERDURE, "run", *words], stdout=out, stderr=subprocess.STDOUT
            )

    def ask(self, *words: str) -> dict[str, Any]:
        """Return what a command answers as JSON; an empty object where it cannot."""
        asked = [*PERDURE, *words, "--json"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    @property
    def runs(self) -> bool:
        """Whether the job has not ended."""
        return self.process.poll() is None

    def step(self) -> int:
        """Return the committed step as its snapshot on disk has it; -1 before there is one."""
        try:
            return int(json.loads((self.folder / "state.json").read_text())["step"])
        except (OSError, ValueError, KeyError):
            return -1

    def wait_for_step(self, step: int) -> bool:
        """Return True once `step` is committed, False if the run ended before."""
        while self.runs:
            if self.step() >= step:
                return True
            time.sleep(0.05)
        return False

    def inject(self, *words: str) -> None:
        """Harm the job, as `perdure inject` does."""
        subprocess.run(
            [*PERDURE, "inject", self.name, *words],
            check=False, timeout=60, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def tell_next(self, *, look: str) -> None:
        """Wait until the report has an incident that was not told yet, and tell it in one line.

        `look` is the command that shows more of it.
        """
        deadline = time.monotonic() + TOLD_S
        while time.monotonic() < deadline:
            over = not self.runs  # Asked before the report is: it has everything then.
            if self._tell_new(look) or over:
                return
            time.sleep(0.3)
        say(f"  … the machine is busy: the story comes later, perdure {look}")

    def _tell_new(self, look: str) -> bool:
        rows = self.ask("report", self.name).get("recoveries", [])
        new = rows[self.told :]
        self.told = len(rows)
        for row in new:
            if row["rung"] != "join":
                say(f"  ▲ {tell(row)} · perdure {look}")
        return any(row["rung"] != "join" for row in new)

    def end(self) -> int:
        """Wait for the job's end and tell what it came to; return its exit code."""
        try:
            code = self.process.wait(240)
        except KeyboardInterrupt:
            code = self.process.wait()
        report = self.ask("report", self.name)
        seconds, steps = report.get("wall_s", 0.0), report.get("steps_committed", 0)
        say(
            f"  ■ {report.get('state', 'ended')} after {seconds:.0f} s, {steps} steps; "
            f"goodput {report.get('goodput', 0.0):.0%} · perdure report {self.name}"
        )
        if code:
            say(f"  the job ended with exit code {code}; its output: {self.output}")
        return code

    def kill(self) -> None:
        """End what still runs."""
        if self.runs:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def tell(row: dict[str, Any]) -> str:
    """Return an incident of `perdure report --json` in one line, up to what it cost."""
    cause = str(row["cause"]).replace("signal 9 (SIGKILL)", "SIGKILL")
    at = f" at step {row['at_step']}" if row["at_step"] >= 0 else ""
    words = [f"{row['culprit']} {cause}{at}"]
    if row["rung"] == "none":
        return " · ".join([*words, "training did not stop"])
    if row["detect_s"] >= 0.1:
        words.append(f"found in {row['detect_s']:.2f} s")
    words.append(f"back in {row['total_s']:.2f} s")
    if row["rung"] != "restart":
        words.append("nobody was restarted")
    if row["lost_microbatches"] is not None:
        words.append(f"{row['lost_microbatches']} micro-batches redone")
    elif row["lost_steps"] is not None:
        words.append(f"{row['lost_steps']} steps lost")
    return " · ".join(words)


def set_up() -> None:
    """Work in the repository, with an empty `.demo` for state."""
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    os.environ["PERDURE_HOME"] = str(HOME)
    os.chdir(ROOT)
