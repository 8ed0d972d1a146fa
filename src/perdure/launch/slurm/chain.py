"""A job as a chain of runs under one Slurm job id: what each run leaves, and what follows it."""

from typing import Literal

import msgspec

RUNS = "runs.jsonl"
"""In a job's folder: a line for each run that ended."""
STUCK_RUNS = 3
"""So many runs in a row that ended at the walltime without a later checkpoint end the chain."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the chain, as it ended."""

    job: str
    restart: int
    state: str
    """perdure's own word: done, stopped, failed, or lost where nobody wrote it."""
    code: int
    checkpoint: int
    """Step of the newest checkpoint; -1 for none."""
    warned: bool
    ended_by: str = ""
    """`TERM` where Slurm ended it."""
    started_s: float = 0.0
    ended_s: float = 0.0


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """What the script's program is told: `chain.json` beside the job's document."""

    requeue_max: int
    cpus: int
    gres: str


def decide(
    run: Run, before: list[Run], requeue_max: int
) -> tuple[Literal["leave", "requeue", "give up"], str]:
    """Return what follows a run, and why.

    >>> decide(Run(job="1", restart=0, state="stopped", code=0, checkpoint=40, warned=True), [], 9)
    ('requeue', 'the walltime is near; goes on from step 40')
    """
    if run.state == "done":
        return "leave", "done"
    if run.state == "failed" or (run.code and run.state != "stopped"):
        return "leave", f"failed with exit code {run.code}"
    if run.ended_by == "TERM":
        return "leave", "ended by Slurm, which puts it back itself where it is to go on"
    if not run.warned:
        return "leave", f"{run.state} without a warning"
    if run.restart >= requeue_max:
        return "give up", f"put back {run.restart} times; slurm.requeue_max"
    newest = [*before, run][-STUCK_RUNS:]
    stuck = all(r.warned and r.checkpoint <= newest[0].checkpoint for r in newest)
    if len(newest) == STUCK_RUNS and stuck:
        return "give up", (
            f"{STUCK_RUNS} runs ended at their walltime without a checkpoint after step "
            f"{run.checkpoint}: a longer slurm.time_limit"
        )
    where = f"step {run.checkpoint}" if run.checkpoint >= 0 else "the beginning"
    return "requeue", f"the walltime is near; goes on from {where}"
