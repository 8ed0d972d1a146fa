"""Live configuration and pauses as a screen shows them: what is in force at a step."""

from dataclasses import dataclass, field
from typing import Any

from perdure.model.events import (
    AnyEvent,
    BoundaryReached,
    JobPaused,
    JobResumed,
    KeysDeclared,
    RanksAgreed,
    SettingsChanged,
)
from perdure.model.steering import Change, KeySpec, is_kept_elsewhere

_CHANGES_MAX = 100


@dataclass(slots=True)
class SteeringFold:
    """Folds a journal; bounded, however often something is changed."""

    keys: tuple[KeySpec, ...] = ()
    """Declared by the newest script."""
    num_steps: int = 0
    """So many steps its loop is to make; 0: it does not say."""
    generation: int = -1
    base: dict[str, Any] = field(default_factory=dict)
    since: int = -1
    """Committed steps when `base` was in force."""
    epoch: int = 0
    """The newest that `base` knows of."""
    changes: list[Change] = field(default_factory=list)
    paused: str = ""
    """Id of the pause that was agreed upon."""
    reached: int = -1
    """The last step of an agreement that a rank of this generation has come to: heartbeats may
    not have said so yet."""

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        match event:
            case KeysDeclared() if event.generation >= self.generation:
                self.generation, self.keys = event.generation, event.keys
                self.num_steps = event.num_steps
                self.since, self.reached = event.step, -1
                self.base |= {spec.name: spec.default for spec in event.keys} | event.values
                self.epoch = event.epoch
            case SettingsChanged() if event.change.epoch not in {c.epoch for c in self.changes}:
                self.changes.append(event.change)
                self.changes.sort(key=lambda change: (change.step, change.epoch))
                while len(self.changes) > _CHANGES_MAX:
                    self.base |= self.changes.pop(0).values
            case BoundaryReached(error=""):
                self.reached = max(self.reached, event.step)
            case RanksAgreed(reached=True):
                self.reached = max(self.reached, *event.steps)
            case JobPaused():
                self.paused = event.id
            case JobResumed() if event.id == self.paused:
                self.paused = ""

    def settings_at(self, step: int) -> tuple[dict[str, object], int]:
        """Return the values in force at `step`, and the epoch of the newest of them."""
        values, epoch = dict(self.base), self.epoch
        step = max(step, self.reached)
        for change in self.changes:
            if self.since < change.step <= step:
                epoch = max(epoch, change.epoch)
                values |= change.values
            values |= {k: v for k, v in change.values.items() if is_kept_elsewhere(k)}
        return values, epoch

    def list_coming(self, step: int) -> tuple[Change, ...]:
        """Return the changes that are agreed for steps yet to come, the next one first."""
        return tuple(
            change for change in self.changes if change.step > max(step, self.since, self.reached)
        )
