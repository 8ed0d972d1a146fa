"""What a run's samples and updates are made of: compared between members, and at a resume."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from perdure.model.codec import encode
from perdure.plan.elastic.commit import FRESH, MemberProgress, Progress

TrainingPlan = dict[str, Any]
"""Item -> value. `parameters` is a table of names and descriptions."""

_NAMES = {
    "length": "the length of the dataset",
    "seed": "the seed",
    "shuffle": "shuffle",
    "batch": "the number of samples in a step",
    "global_batch": "the global batch",
    "micro_batch": "the micro-batch",
    "micro_batches": "the number of micro-batches in a step",
    "exact": "exact",
    "clip_norm": "clip_norm",
}
_SHOWN = 3
"""Parameters that are named one by one."""


def digest_plan(plan: TrainingPlan) -> str:
    """Return what two plans have in common only if they are alike."""
    return blake2b(encode(dict(sorted(plan.items()))), digest_size=8).hexdigest()


def describe_changes(
    before: TrainingPlan, now: TrainingPlan, template: str = "{0} was {1}, is {2}"
) -> str:
    """Return what differs, by `template` of (item, before, now); empty if nothing does."""
    pairs = [
        (_NAMES[key], before[key], now[key])
        for key in sorted(before.keys() & now.keys() & _NAMES.keys())
        if before[key] != now[key]
    ]
    old, new = before.get("parameters", {}), now.get("parameters", {})
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    pairs += [
        (f"parameter {n}", old.get(n, "absent"), new.get(n, "absent")) for n in names[:_SHOWN]
    ]
    said = [template.format(*pair) for pair in pairs]
    if len(names) > _SHOWN:
        said.append(f"so do {len(names) - _SHOWN} more parameters")
    return "; ".join(said)


def find_strangers(progress: Mapping[int, MemberProgress | Progress]) -> tuple[int, list[int]]:
    """Return the member whose plan counts, and the members that have another one.

    The plan of the first member that has the state counts. If no member has it, that of the
    first member counts.
    """
    known = min(progress, key=lambda member: (progress[member].applied == FRESH, member))
    plan = progress[known].plan
    return known, [member for member in sorted(progress) if progress[member].plan != plan]
