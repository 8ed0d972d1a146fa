"""The learning rate as a live setting: `perdure set JOB lr=...` scales the whole schedule.

The setting is the base rate, that of the first parameter group before its schedule. A change
moves the rates of all groups, and the rates that schedulers go back to, in proportion; so a
schedule goes on from where it is. Doing it twice does no more than once: what the rates are
measured against travels with the optimizer's state.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from perdure.worker.config import Config


def declare_rate(
    config: Config,
    optimizer: torch.optim.Optimizer,
    find: Callable[[], tuple[torch.optim.Optimizer | None, Any]],
) -> None:
    """Declare `lr`, unless the script has one of its own or there is no rate to change.

    `optimizer` has the rates to begin with; `find` returns the optimizer whose rates are to
    change, which may be made anew meanwhile or be still to come, and its schedule.
    """
    groups = optimizer.param_groups
    if "lr" in config or not groups or "lr" not in groups[0]:
        return
    for group in groups:
        group.setdefault("initial_lr", _number(group["lr"]))
    bases = [float(_number(group["initial_lr"])) for group in groups]
    if not bases[0] > 0:
        return
    shares = [base / bases[0] for base in bases]

    def change(value: float) -> None:
        target, scheduler = find()
        if target is None:
            return
        for index, (group, share) in enumerate(zip(target.param_groups, shares, strict=True)):
            scale_rate(group, value * share)
            for each in _find_schedulers(scheduler):
                if isinstance(getattr(each, "base_lrs", None), list):
                    each.base_lrs[index] = value * share

    config.declare(
        "lr", float, default=bases[0], min=0, on_change=change,
        note="Learning rate of the first parameter group, before its schedule.",
    )  # fmt: skip


def scale_rate(group: dict[str, Any], base: float) -> None:
    """Make `base` the group's rate before its schedule, and move the rate of now with it."""
    before = float(_number(group.setdefault("initial_lr", _number(group["lr"]))))
    if before == base:
        return
    rate = _number(group["lr"]) * (base / before) if before else base
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
    group["initial_lr"] = base


def _find_schedulers(scheduler: Any) -> Iterator[Any]:
    if scheduler is not None:
        yield scheduler
        for each in getattr(scheduler, "_schedulers", ()):
            yield from _find_schedulers(each)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
