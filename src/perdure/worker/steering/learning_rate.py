"""The learning rate as a live setting: `perdure set JOB lr=...` scales the whole schedule.

The setting is the base rate, that of the first parameter group before its schedule. A change
moves the rates of all groups, and the rates that schedulers go back to, in proportion; so a
schedule goes on from where it is. Doing it twice does no more than once: what the rates are
measured against (`initial_lr`) travels with the optimizer's state. An end that a scheduler holds as
an absolute number (`eta_min`) stays what it is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from perdure.worker.steering.config import Check, Config

_OF_GROUPS = ("lr", "max_lr", "min_lr")


def declare_rate(
    config: Config,
    optimizers: Sequence[Optimizer],
    find: Callable[[], tuple[Sequence[Optimizer | None], Sequence[Any]]],
    check: Check | None = None,
) -> None:
    """Declare `lr`, unless there is no rate to change, or it is 0, which has no proportion.

    `optimizers` have the rates to begin with; `find` returns those whose rates are to change,
    which may be made anew meanwhile or be still to come, and their schedules.
    """
    groups = _list_groups(optimizers)
    if not groups or "lr" not in groups[0]:
        return
    bases = [_base_of(group) for group in groups]
    if not bases[0] > 0:
        return
    shares = [base / bases[0] for base in bases]

    def change(value: float) -> None:
        targets, schedulers = find()
        groups = _list_groups(targets)
        if not groups:
            return
        before = _base_of(groups[0])
        for group, share in zip(groups, shares, strict=True):
            _scale_group(group, value * share)
        for scheduler in schedulers:
            for each in _list_schedulers(scheduler):
                _follow_groups(each, value / before if before else 1.0)

    config.declare(
        "lr", float, default=bases[0], min=0, check=check, on_change=change,
        note="Learning rate of the first parameter group, before its schedule.",
    )  # fmt: skip


def refuse_zero(value: float) -> str:
    """Return why a rate cannot be set for a schedule that multiplies the rates of before."""
    return "" if value > 0 else "lr must be above 0"


def _list_groups(optimizers: Iterable[Optimizer | None]) -> list[dict[str, Any]]:
    return [group for one in optimizers if one is not None for group in one.param_groups]


def _base_of(group: dict[str, Any]) -> float:
    """Return the group's rate before its schedule."""
    return float(_number(group.setdefault("initial_lr", _number(group["lr"]))))


def _scale_group(group: dict[str, Any], base: float) -> None:
    """Make `base` the group's rate before its schedule, and move the rates of now with it."""
    before = _base_of(group)
    if before == base:
        return
    for name in [name for name in _OF_GROUPS if name in group]:
        rate = _number(group[name]) * (base / before) if before else base
        if isinstance(group[name], Tensor):
            group[name].fill_(rate)
        else:
            group[name] = rate
    group["initial_lr"] = base


def _follow_groups(scheduler: Any, ratio: float) -> None:
    """Have what a scheduler has derived from its groups' rates move with them, by `ratio`."""
    for name, key in (("base_lrs", "initial_lr"), ("_last_lr", "lr")):
        if isinstance(getattr(scheduler, name, None), list):
            setattr(scheduler, name, [group[key] for group in scheduler.optimizer.param_groups])
    if isinstance(getattr(scheduler, "max_lrs", None), list):
        scheduler.max_lrs = [rate * ratio for rate in scheduler.max_lrs]


def _list_schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and those inside it (SequentialLR, ChainedScheduler, a wrapper)."""
    if scheduler is not None:
        yield scheduler
        for each in (getattr(scheduler, "scheduler", None), *getattr(scheduler, "_schedulers", ())):
            yield from _list_schedulers(each)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
