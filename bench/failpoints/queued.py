"""A queue of three items with its faults: one after another, and one that fails at first."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from campaign import leftovers

from failpoints.checks import OURS, TRACEBACK
from failpoints.jobs import OWN, Depth, Run
from perdure.failpoints import FOLDER, SWITCH

QUEUE = Depth("queue", OWN / "queued_item.py", ())
ITEMS = {"one": 1, "two": 1, "three": 2}
"""Item -> how many attempts it takes. `two` runs after `one`, and the first of `three` fails."""


class Queue(Run):
    """A queue that is filled and run; a command that fails or is killed is given again."""

    def __init__(self, depth: Depth, terms: str, *, kill: bool = True) -> None:
        """Make the home and the queue's file."""
        super().__init__(depth, terms, kill=False)
        rows = ["[defaults]\nbackoff_s = 0.2\nretries = 4\n"]  # A fault may take an attempt.
        for name, times in ITEMS.items():
            words = [sys.executable, str(depth.script), str(self.trail), name, str(times)]
            after = 'after = ["one"]\n' if name == "two" else ""
            rows.append(f'[[item]]\nname = "{name}"\ncommand = {json.dumps(words)}\n{after}')
        (self.home / "queue.toml").write_text("".join(rows))

    def run(self, limit_s: float) -> list[str]:
        """Fill the queue and run it; return what is wrong."""
        wrong = [
            self._give(command, limit_s)
            for command in (("add", "queue.toml"), ("run", "--slots", "2"))
        ]
        self.code = 0
        return [line for line in wrong if line] + self._wait_gone()

    def _give(self, command: tuple[str, ...], limit_s: float) -> str:
        """Give one command, and once more without faults where it was killed or refused."""
        done = self._say(command, self.terms, limit_s)
        if done.returncode in (-signal.SIGKILL, 3) and "Traceback" not in done.stderr:
            done = self._say(command, "", limit_s)
        if done.returncode == 0:
            return ""
        return f"queue {command[0]}: {done.returncode}: {done.stderr.strip()[-300:]}"

    def _say(
        self, command: tuple[str, ...], terms: str, limit_s: float
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "queue", *command],
            env=self._env | {SWITCH: terms, FOLDER: str(self.folder)},
            cwd=self.home, capture_output=True, text=True, timeout=limit_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        with open(self.home / "out", "a") as out:
            print(command, done.returncode, done.stdout, done.stderr, file=out)
        return done

    def check(self) -> list[str]:
        """Return what is wrong with a queue that has ended, a line each."""
        wrong = [f"left: {line}" for line in leftovers(self.home)]
        wrong += [
            f"{name} is not done" for name in ITEMS if not (self.trail / f"{name}.done").exists()
        ]
        fired = [line.split("\t") for line in self.read("fired")]
        again = sum(
            fault == "crash" or (fault == "error" and about != "ending.json")
            for _, about, fault, *_ in fired
        )
        for name, times in ITEMS.items():
            rows = self._read_item(name)
            attempts = [row["attempt"] for row in rows if row["what"] == "begin"]
            if len(attempts) != len(set(attempts)):
                wrong.append(f"{name}: an attempt was started twice: {attempts}")
            if not times <= len(attempts) <= times + again:
                wrong.append(f"{name}: attempts {attempts}, and {times} were needed")
            lives = 0
            for row in rows:
                lives += 1 if row["what"] == "begin" else -1
                if lives > 1:
                    wrong.append(f"{name}: two attempts at once")
        said = [*self.home.glob("state/queues/default/attempts/*/*/output.log"), self.home / "out"]
        for path in said:
            found = TRACEBACK.findall(path.read_text(errors="replace"))
            if any(OURS.search(text) for text in found):
                wrong.append(f"a traceback in {path.relative_to(self.home)}")
        return wrong

    def _read_item(self, name: str) -> list[dict[str, Any]]:
        path = Path(self.trail, f"{name}.jsonl")
        with contextlib.suppress(OSError):
            return [json.loads(line) for line in path.read_text().splitlines()]
        return []
