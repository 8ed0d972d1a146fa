"""G19: `perdure run` of an elastic script of three nodes: a kill, a stop, who comes in, a drain.

Passes where those that nothing happens to go on as the processes that they are, a new process takes
the place of each that is lost, who is drained leaves, and every loss has the bits that it has in a
run of one process alone (`exact=True`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.jobs import Jobs, find_script, open_jobs
from tests.gpu.kit import Trial

ALONE_S = 90.0
SCRIPT = "elastic.py"


def run(trial: Trial) -> None:
    with open_jobs(trial, 80.0) as jobs:
        world = World(jobs, 3)
        world.lose(1, signal.SIGKILL)
        world.lose(2, signal.SIGSTOP)
        began_s = time.monotonic()
        drained = json.loads(world.job.cli("node", "drain", "el", "2", "--json").stdout)
        trial.check(drained["ok"], f"the drain: {drained}")
        world.job.wait_until(lambda: len(world.members()) == 2, "a world without the node")
        trial.took(time.monotonic() - began_s)
        world.finish()
        rungs = [row["rung"] for row in world.job.report()["recoveries"]]
        trial.note(rungs=rungs)
        trial.check(rungs.count("join") == 2, f"the recoveries are {rungs}")


class World:
    """An elastic job with a rank on each node, of which the first one is never harmed."""

    def __init__(self, jobs: Jobs, nodes: int, *depth: str) -> None:
        """Start it, and wait until it trains."""
        self.jobs, self.trial, self.depth = jobs, jobs.trial, depth
        self.trail = jobs.home / "trail"
        words = [*self.say(self.trail, 100_000), "--pace-s", str(jobs.trial.choose(0.1, 0.2))]
        self.job = jobs.start("el", "-n", "1", "--nodes", str(nodes), find_script(SCRIPT), *words)
        self.job.wait_until(lambda: len(read(self.trail, 0)) >= 3, "steps")
        jobs.check_held()

    def say(self, trail: Path, steps: int) -> list[str]:
        """Return the script's words."""
        words = ["--trail", str(trail), "--device", self.trial.device, "--steps", str(steps)]
        return [*words, "--exact", *self.depth]

    def members(self) -> list[int]:
        """Return who has made the newest step."""
        members: list[int] = read(self.trail, 0)[-1]["world"]
        return members

    def lose(self, rank: int, harm: signal.Signals) -> None:
        """Harm a rank's first process, and wait until another one trains in its place."""
        size, pid = len(self.members()), read(self.trail, rank)[-1]["pid"]
        began_s = time.monotonic()
        os.kill(pid, harm)
        self.job.wait_until(
            lambda: rank not in self.members() and len(self.members()) == size,
            f"a world with another process in the place of rank {rank}",
        )
        self.trial.took(time.monotonic() - began_s)
        self.job.wait_until(lambda: read(self.trail, rank)[-1]["pid"] != pid, "a step of it")

    def finish(self) -> None:
        """Stop the job, and compare what it has made with a run of one process."""
        self.job.cli("stop", "el")
        self.jobs.check_end(self.job)
        trial, rows = self.trial, read(self.trail, 0)
        steps = list(dict.fromkeys(row["step"] for row in rows))
        trial.check(steps == list(range(len(steps))), f"the steps are {steps}")
        trial.check(len({row["pid"] for row in rows}) == 1, "who was not harmed was replaced")
        alone = self.jobs.home / "alone"
        done = subprocess.run(
            [sys.executable, find_script(SCRIPT), *self.say(alone, len(steps))],
            cwd=self.jobs.home, capture_output=True, text=True, timeout=ALONE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        right = {row["step"]: row["losses"] for row in read(alone, 0)}
        assert len(right) == len(steps), "the undisturbed run is not whole"
        wrong = sorted({row["step"] for row in rows if row["losses"] != right[row["step"]]})
        trial.note(steps=len(steps), epochs=rows[-1]["epoch"])
        trial.check(not wrong, f"other bits than one process's at the steps {wrong}")


def read(trail: Path, rank: int) -> list[dict[str, Any]]:
    """Return what the processes in a rank's place have committed."""
    path = trail / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
