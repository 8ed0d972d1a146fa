"""What is missed: simulated faults under the noise of the healthy workloads, one fault a run.

A fault is found where a verdict names the right culprit in time: what costs twice the step and more
within `max(3 s, 20 steps)`, 1.5 times within 10 s, 1.2 times within a minute, and none sooner than
`STEPS_MIN` steps, since nobody could tell. Steps are those that are taken with the fault. A factor
of a slow rank is of all of its work, spent in the stage that is slow; that of a slow link is of the
whole step.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .judge import BEGIN_S, START_S, Job, Outcome, Told
from .results import show_rate
from .training import Fault, Load, Shape, World
from .workloads import (
    COMM_SHARE,
    PARTS,
    STEPS_S,
    TUNED,
    WORKLOADS,
    Steps,
    find_stage_width,
    make_steps,
)

Row = dict[str, Any]
STAGES = ("slow data", "slow forward", "slow backward")
SLOW = ("slow rank", *STAGES, "slow link", "slow host", "busy host")
HANGS = ("sleep", "spin", "stop")
KINDS = (*SLOW, *HANGS)
FACTORS = (1.2, 1.5, 2.0, 3.0, 4.0)
SIZES = (2, 3, 4, 5, 8, 9, 16, 64)
STEPS_MIN = 5
LEARNED_S = 120.0
"""How long a job trains before a fault that is not there from the first step on."""
WAITED_S, MILD_WAITED_S = 60.0, 600.0
"""For how much longer than in time one is waited for: of twice the step and more, or of less."""
CALM = ("evaluation", "saving", "compiles", "pauses", "storage", "heartbeats", "all of it")
"""Words of workloads whose own silences would hide the fault."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault and the job that it is in."""

    workload: str
    shape: Shape
    kind: str
    factor: float
    rank: int
    peer: int
    first: bool
    """It is there from the first step on."""

    @property
    def limit_s(self) -> float:
        """Return within which time it is to be found."""
        hangs = self.kind in HANGS
        step_s = self.shape.step_s * (1.0 if hangs else self.factor)
        if hangs or self.factor >= 2.0:
            return max(3.0, 20.0 * step_s)
        return max(10.0 if self.factor >= 1.5 else 60.0, STEPS_MIN * step_s)

    @property
    def waited_s(self) -> float:
        """Return for how long after it the job goes on."""
        mild = self.kind not in HANGS and self.factor < 2.0
        return self.limit_s + (MILD_WAITED_S if mild else WAITED_S)


def list_noises(*, final: bool) -> list[str]:
    """Return the workloads under whose noise faults are made."""
    names = list(WORKLOADS) if final else list(TUNED)
    return [name for name in names if not any(word in name for word in CALM)]


def draw_case(number: int, seed: str, *, final: bool, names: Sequence[str] = ()) -> Case:
    """Return fault `number`: kinds and factors in turn, all else by chance.

    `names` are the workloads in which it may be; without any, those of `list_noises`.
    """
    chance = random.Random(f"{seed} fault {number}")
    kind = KINDS[number % len(KINDS)]
    ranks = chance.choice(SIZES)
    step_s = chance.choice([s for s in STEPS_S if ranks <= 9 or s >= 0.3])
    nproc = chance.choice([n for n in (1, 2, 4, 8) if ranks % n == 0 and ranks // n >= 2])
    shape = Shape(
        ranks, nproc, step_s, declared=chance.random() < 0.5,
        links=kind == "slow link" or chance.random() < 0.5,
        cpu_share=0.6, cores=max(4, 2 * nproc),
    )  # fmt: skip
    workload = chance.choice(names or list_noises(final=final))
    rank = chance.randrange(ranks)
    peer, width = (rank + 1) % ranks, find_stage_width(ranks)
    if workload.startswith("pipeline"):
        # Only the first stage loads data, and each sends to the next.
        rank %= width if kind == "slow data" else ranks - width if kind == "slow link" else ranks
        peer = rank + width if kind == "slow link" else (rank + 1) % ranks
    factor = FACTORS[number // len(KINDS) % len(FACTORS)]
    first = kind in SLOW and chance.random() < 0.5
    return Case(workload, shape, kind, factor, rank, peer, first)


def make_fault(case: Case) -> Fault | None:
    """Return what the world breaks; a busy host is others' load instead."""
    at_s = BEGIN_S + (0.0 if case.first else LEARNED_S)
    factor = case.factor
    if case.kind in STAGES:
        factor = 1.0 + (case.factor - 1.0) / PARTS[STAGES.index(case.kind)]
    elif case.kind == "slow link":
        factor = 1.0 + (case.factor - 1.0) / COMM_SHARE
    elif case.kind == "busy host":
        return None
    return Fault(case.kind, at_s, case.rank, case.peer, factor)


def run_fault(
    number: int, seed: str, *, final: bool = False, names: Sequence[str] = ()
) -> tuple[Case, Outcome, Row]:
    """Return a fault, what was said, and the row of it."""
    case = draw_case(number, seed, final=final, names=names)
    home = case.rank // case.shape.nproc
    begun_s = BEGIN_S + (START_S if case.first else LEARNED_S)

    def make(world: World, chance: random.Random) -> Steps:
        if case.kind == "busy host":
            world.loads.append(Load(home, begun_s, float("inf"), case.factor))
        return make_steps(case.workload, world, chance)

    job = Job(case.workload, case.shape, f"{seed} fault {number}", make_fault(case), make=make)
    outcome = job.run(begun_s - BEGIN_S + case.waited_s)
    begun_s += 0.6 if case.first else 0.0  # Stores, and the start of the ranks.
    return case, outcome, fold(case, outcome, begun_s)


def fold(case: Case, outcome: Outcome, begun_s: float) -> Row:
    """Return when the fault was found, and what was said wrongly."""
    after = [told for told in outcome.told if told.at_s >= begun_s]
    right = [told for told in after if is_right(case, told)]
    found_s = right[0].at_s - begun_s if right else None
    wrong = [told for told in outcome.told if told not in right and not told.right]
    return {
        "fault": case.kind, "factor": case.factor, "workload": case.workload,
        "ranks": case.shape.ranks, "nproc": case.shape.nproc, "step_s": case.shape.step_s,
        "first": case.first, "limit_s": case.limit_s,
        "found_s": None if found_s is None else round(found_s, 2),
        "in_time": found_s is not None and found_s <= case.limit_s,
        "stood_s": [stood_s(told) for told in right[:8]],
        "right_at_s": [round(told.at_s - begun_s, 1) for told in right[:8]],
        "wrong": [f"{told.kind} {told.culprit}" for told in wrong[:8]],
        "said": [[t.kind, round(t.confidence, 2), t in right] for t in (*right, *wrong)],
        "acted": [action.kind for action in outcome.actions],
        "simulated_s": round(outcome.simulated_s, 1), "wall_s": round(outcome.wall_s, 2),
    }  # fmt: skip


def stood_s(told: Told) -> float | None:
    """Return for how long it stood; None where nothing has withdrawn it."""
    return round(told.withdrawn_s - told.at_s, 1) if told.withdrawn_s else None


def is_right(case: Case, told: Told) -> bool:
    """Return whether a verdict has the right culprit, and a kind that fits."""
    home = case.rank // case.shape.nproc
    there = told.rank == case.rank or (told.node == home and case.shape.nproc == 1)
    if case.kind == "slow link":
        return told.kind in ("CommSlow", "CommHang") and told.link == (case.rank, case.peer)
    if case.kind in ("slow host", "busy host"):
        mine = told.rank is not None and told.rank // case.shape.nproc == home
        kinds = ("Straggler", "HostBusy") if case.kind == "busy host" else ("Straggler",)
        return told.kind in kinds and (mine or told.node == home)
    if case.kind in HANGS:
        return told.kind in ("ComputeHang", "CommHang") and there
    return told.kind == "Straggler" and (there or (told.node == home and told.rank is None))


def render_calibration(rows: list[Row], healthy: list[Row]) -> str:
    """Return how often verdicts were right where something was broken, and said where nothing was.

    By their confidence, and by their kind.
    """
    lines = ["", "| tree | confidence | right |", "|---|---|---|"]
    kinds = ["", "| tree | verdict | right | said of healthy jobs, an hour (95 %) |"]
    kinds.append("|---|---|---|---|")
    for tree in sorted({row["tree"] for row in rows}):
        said = [one for row in rows if row["tree"] == tree for one in row["said"]]
        for least in sorted({int(10 * sure) / 10 for _, sure, _ in said}):
            mine = [right for _, sure, right in said if least <= sure < least + 0.1]
            lines.append(f"| {tree[:8]} | {least:.1f} to {least + 0.1:.1f} | {_show_share(mine)} |")
        calm = [row for row in healthy if row["tree"] == tree]
        hours = sum(row["simulated_s"] for row in calm) / 3600.0
        false = Counter(
            told["kind"] for row in calm for told in row["told"] if not told["right"]
        )  # Those that name a rank which is alone, too.
        for kind in sorted({kind for kind, _, _ in said} | set(false)):
            mine = [right for name, _, right in said if name == kind]
            share = _show_share(mine) if mine else ""
            kinds.append(f"| {tree[:8]} | {kind} | {share} | {show_rate(false[kind], hours)} |")
    return "\n".join([*lines, *kinds])


def _show_share(right: list[bool]) -> str:
    return f"{sum(right)} of {len(right)} ({sum(right) / len(right):.0%})"


def render_faults(rows: list[Row]) -> str:
    """Return the table of what was found, by kind and factor."""
    lines = [
        "| fault | tree | factor | in time | later | never | pinned wrongly | median s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted(
        {(r["fault"], r["tree"], 0.0 if r["fault"] in HANGS else r["factor"]) for r in rows}
    )
    for kind, tree, factor in keys:
        mine = [
            r for r in rows
            if r["fault"] == kind and r["tree"] == tree and (not factor or r["factor"] == factor)
        ]  # fmt: skip
        found = sorted(r["found_s"] for r in mine if r["found_s"] is not None)
        in_time = sum(r["in_time"] for r in mine)
        wrong = sum(bool(r["wrong"]) and r["found_s"] is None for r in mine)
        median = f"{found[len(found) // 2]:.1f}" if found else ""
        words = f"{factor:g}x" if factor else ""
        lines.append(
            f"| {kind} | {tree[:8]} | {words} | {in_time} of {len(mine)} | {len(found) - in_time} "
            f"| {len(mine) - len(found)} | {wrong} | {median} |"
        )
    return "\n".join(lines)
