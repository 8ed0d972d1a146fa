"""What a run's samples and updates are made of: compared between members, and at a resume."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from perdure.model.codec import encode
from perdure.plan.elastic.commit import FRESH, MemberProgress, Progress

TrainingPlan = dict[str, Any]
"""Item -> value. `parameters` and `modules` are tables of names and descriptions."""

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
_OF_MEMBERS = {
    "steps": "the number of steps",
    "optimizer": "the optimizer",
    "scheduler": "the scheduler",
    "loss": "the loss",
    "after_update": "after_update",
}
"""What members have in common, and a resume may change."""
_LETTERS = 200
"""Letters of a description that are shown."""
_SHOWN = 3
"""Parameters that are named one by one."""


def digest_plan(plan: TrainingPlan) -> str:
    """Return what two plans have in common only if they are alike."""
    return blake2b(encode(dict(sorted(plan.items()))), digest_size=8).hexdigest()


def describe_changes(
    before: TrainingPlan,
    now: TrainingPlan,
    template: str = "{0} was {1}, is {2}",
    *,
    members: bool = False,
) -> str:
    """Return what differs, by `template` of (item, before, now); empty if nothing does.

    For `members` it is also what a resume may change.
    """
    items = _NAMES | _OF_MEMBERS if members else _NAMES
    pairs = [
        (items[key], before[key], now[key])
        for key in sorted(before.keys() & now.keys() & items.keys())
        if before[key] != now[key]
    ]
    left = []
    for kind in ("parameter", "module") if members else ("parameter",):
        old, new = before.get(f"{kind}s", {}), now.get(f"{kind}s", {})
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        if members and not names and list(old) != list(new):
            at = next(at for at, pair in enumerate(zip(old, new, strict=True)) if len({*pair}) > 1)
            pairs.append((f"{kind} number {at}", list(old)[at], list(new)[at]))
        pairs += [
            (f"{kind} {n}", old.get(n, "absent"), new.get(n, "absent")) for n in names[:_SHOWN]
        ]
        if len(names) > _SHOWN:
            left.append(f"so do {len(names) - _SHOWN} more {kind}s")
    return "; ".join([*(template.format(*map(_shorten, pair)) for pair in pairs), *left])


def _shorten(text: Any) -> str:
    """Return the beginning of `text`: a module may describe itself by its whole table."""
    return str(text) if len(str(text)) <= _LETTERS else f"{str(text)[:_LETTERS]} ..."


def find_strangers(progress: Mapping[int, MemberProgress | Progress]) -> tuple[int, list[int]]:
    """Return the member whose plan counts, and the members that have another one.

    The plan of the first member that has the state counts. If no member has it, that of the
    first member counts.
    """
    known = min(progress, key=lambda member: (progress[member].applied == FRESH, member))
    plan = progress[known].plan
    return known, [member for member in sorted(progress) if progress[member].plan != plan]
