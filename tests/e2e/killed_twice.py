"""A job of two ranks in which each of them is killed once, and what its own trail says of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.harness import SCRIPTS, Job

SCRIPT = str(SCRIPTS / "train_paced.py")
RANKS = 2
STEPS = 60


def read_trails(folder: Path) -> list[list[tuple[int, float]]]:
    """Return (step, seconds) of every step that each rank has run."""
    trails = []
    for path in folder.glob("*.txt"):
        rows = [row.split() for row in path.read_text().splitlines()]
        trails.append([(int(row[0]), float(row[1])) for row in rows if len(row) == 2])
    return trails


def train_killed_twice(
    start: Callable[..., Job], folder: Path
) -> tuple[dict[str, Any], float, float]:
    """Return the report, the seconds of committed steps, and those of steps that were repeated."""
    trail, spec = folder / "trail", folder / "job.toml"
    trail.mkdir()
    args = f'["--trail", "{trail}", "--steps", "{STEPS}"]'
    spec.write_text(f'script = "{SCRIPT}"\nargs = {args}\n[checkpoint]\nevery_steps = 10\n')
    job = start("killed", "-n", str(RANKS), "-c", str(spec))
    for generation, (at_step, rank) in enumerate(((24, 1), (47, 0))):
        # By the script's own trail: pictures of a busy machine come late.
        job.wait_until(
            lambda s=at_step: any(row[0] >= s for rows in read_trails(trail) for row in rows),
            f"step {at_step}",
        )
        job.kill(f"perdure rank killed g{generation} r{rank}")
        job.wait_until(lambda g=generation: job.find(f"rank killed g{g + 1}"), "restart")
    assert job.wait() == 0, job.text()
    trails = read_trails(trail)
    committed_s = sum(sum(dict(rows).values()) for rows in trails)  # The last time counts.
    again_s = sum(seconds for rows in trails for _, seconds in rows) - committed_s
    return job.report(), committed_s, again_s
