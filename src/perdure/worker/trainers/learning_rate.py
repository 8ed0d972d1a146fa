"""The learning rate of a trainer as a live setting: `perdure set JOB lr=...`.

What is set is the rate that the schedule started from. All groups, and all that the schedulers
have derived from it, change in proportion, so the shape of the schedule stays. An end that a
scheduler holds as an absolute number (`eta_min`) stays what it is.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from perdure.worker.config import Config

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "_last_lr")


class LearningRate:
    """The base rate of `optimizers`, of which the first one's first group speaks for all."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> None:
        """Read the rate they have now; nothing is restored yet."""
        self._optimizers, self._schedulers = optimizers, schedulers
        group = optimizers[0].param_groups[0]
        self._value = float(group.get("initial_lr", group["lr"]))

    def declare(self, config: Config) -> None:
        """Make it a setting named `lr`, unless the rate is 0, which has no proportion."""
        if self._value > 0:
            note = "Learning rate that the schedule starts from."
            config.declare(
                "lr", float, default=self._value, min=0, note=note, check=_check, on_change=self.set
            )

    def set(self, value: float) -> None:
        """Scale everything so that the schedule starts from `value`."""
        if value == self._value:
            return
        ratio = value / self._value
        self._value = value
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name in _OF_GROUPS:
                    if name in group:
                        group[name] *= ratio
        for scheduler in self._schedulers:
            _scale(scheduler, ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the rate that groups and schedulers are scaled to."""
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rate of a checkpoint, whose groups and schedulers have it already."""
        self._value = state["value"]


def _check(value: float) -> str:
    return "" if value > 0 else "lr must be above 0"


def _scale(scheduler: Any, ratio: float) -> None:
    """Scale a scheduler, and those inside it (SequentialLR, ChainedScheduler, a wrapper)."""
    for name in _OF_SCHEDULERS:
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):
            setattr(scheduler, name, [rate * ratio for rate in rates])
    for inner in (getattr(scheduler, "scheduler", None), *getattr(scheduler, "_schedulers", ())):
        if inner is not None:
            _scale(inner, ratio)
