"""Which faults a drill makes, to whom, and how far between two checkpoints: from a seed alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from perdure.model.job import JobSpec

SPIN_ACTION_S = 5.0
"""`detect.hang_action_s` of a drill where the job file has none."""

FAULTS = {
    "crash": "SIGKILL of a rank",
    "stop": "SIGSTOP of a rank, which nobody continues",
    "hang": "a rank's training thread spins without progress",
    "slow": "a rank's forward passes take longer for a while",
    "node": "SIGKILL of all processes of a node, which stays away for a while",
    "torn": "the newest checkpoint is cut in half, and a rank is killed",
    "disk": "no space left for checkpoints for a while, by a failpoint",
    "controller": "SIGKILL of the controller",
    "bus": "SIGKILL of nats-server",
}
"""In the order in which they are made."""
NEEDS_STEPS = ("torn", "disk")
"""Those that are about checkpoints of perdure's own."""
_WITHIN = ("hang", "slow")
"""Those that a rank's own Python makes."""


class Act(NamedTuple):
    """One fault that is to be made."""

    fault: str
    rank: int
    """The rank that is harmed, where it is one."""
    node: int
    """The node that is harmed, where it is one; else that of the rank."""
    where: float
    """How far into the time until it has to have happened, 0 to 1."""


class DrillWish(NamedTuple):
    """A request for a drill."""

    spec: JobSpec
    """The user's, with absolute paths."""
    project: Path
    """The folder that is copied."""
    home: str
    acts: Sequence[Act]
    left_out: Mapping[str, str]
    seed: int
    budget_s: float
    environ: Mapping[str, str]
    writable: Sequence[str] = ()
    """Folders outside in which the script may write."""
    confined: bool = True
    changed: Mapping[str, str] = {}
    """Other texts for files of the copy, by their path in the project."""


def plan_acts(
    names: Sequence[str], seed: int, nodes: int, nproc: int, *, python: bool = True
) -> tuple[list[Act], dict[str, str]]:
    """Return the faults of `names` that such a world can have, and why it cannot have the others.

    Without `python` a rank is a program of its own. What is drawn for a fault does not depend on
    which others there are.
    """
    acts, left_out = [], {}
    for name in (name for name in FAULTS if name in names):
        draw = Random(f"{seed} {name}")
        rank, node, where = draw.randrange(nodes * nproc), draw.randrange(nodes), draw.random()
        if name == "node" and nodes < 2:
            left_out[name] = "the job has one node, and none to lose: --nodes 2 emulates another"
        elif name == "slow" and nodes * nproc < 2:
            left_out[name] = "one rank has no peers that it could be compared with"
        elif name in _WITHIN and not python:
            left_out[name] = "a program of its own is not harmed from within (no_python)"
        else:
            acts.append(Act(name, rank, node if name == "node" else rank // nproc, where))
    return acts, left_out


def keep_first(
    acts: Sequence[Act], left_out: Mapping[str, str], hosts: Sequence[str], nodes: int
) -> tuple[list[Act], dict[str, str]]:
    """Return the faults of a job on boxes, of which the first stays: it has controller and bus."""
    kept, left = [], dict(left_out)
    asked = "node" in left or any(act.fault == "node" for act in acts)
    if asked and len(hosts) < 2:
        left["node"] = f"the job is on {hosts[0]} alone, and without that box there is no job"
    elif nodes < 2 and "node" in left:
        left["node"] = f"all ranks are on {hosts[0]}, and without that box there is no job"
    for act in acts:
        if act.fault == "node" and len(hosts) < 2:
            continue
        kept.append(act._replace(node=1 + act.node % (nodes - 1)) if act.fault == "node" else act)
    return kept, left


def choose_lead(where: float, steps_per_s: float) -> int:
    """Return how many steps after its checkpoint a fault is made: 0.5 to 2.5 s, and 3 at least."""
    pace = max(steps_per_s, 0.0)
    return max(3, round(0.5 * pace)) + int(where * max(4.0, min(2.0 * pace, 400.0)))
