"""The verdict on a resumed job: proved, expected, or not exact. One fold decides."""

from dataclasses import dataclass, field

from perdure.model.events import CheckpointRestored, MetricsLogged, ResumeCompared
from perdure.model.report import Exactness

STEPS_KEPT = 10_000
"""Newest losses that are kept. After a resume, steps before these are not compared."""


@dataclass(slots=True)
class ExactFold:
    """What ranks said at resumes, and what a comparison of losses found."""

    resumable: bool = False
    why: str = ""
    """The first reason why the job is not exact; empty if none is known."""
    compared: str = ""

    def take(self, event: CheckpointRestored | ResumeCompared) -> None:
        """Take what a rank or the controller says about a resume."""
        self.resumable = True
        match event:
            case CheckpointRestored(why_not_exact=why, step=step, path=path):
                self.why = self.why or (f"resumed at step {step}: {why}" if why and path else why)
            case ResumeCompared(differs=differs) if differs:
                self.why = self.why or differs
            case ResumeCompared():
                self.compared = (
                    f"the loss of step {event.step} is the same to the last bit as before the "
                    f"resume at step {event.resumed}"
                )

    def judge(self) -> Exactness | None:
        """Return the verdict; None if the script declares no steps."""
        if not self.resumable:
            return None
        if self.why:
            return Exactness("not", self.why)
        if self.compared:
            return Exactness("proved", self.compared)
        return Exactness("expected", "no resume was compared yet")


@dataclass(slots=True)
class LossComparison:
    """Compares the losses of steps that are made again with those from before the resume.

    The newest step of a life may be half logged, so it is left out.
    """

    _generation: int = -1
    _before: dict[int, tuple[str, float]] = field(default_factory=dict)
    _now: dict[int, tuple[str, float]] = field(default_factory=dict)

    def take(self, event: MetricsLogged) -> tuple[int, str] | None:
        """Return a step that was compared, and how it differs (empty if it does not)."""
        if event.generation < self._generation:
            return None
        if event.generation > self._generation:
            self._generation, newest = event.generation, max(self._now, default=0)
            self._before |= {step: one for step, one in self._now.items() if step < newest}
            self._now = {}
        for step, values in event.rows:
            if name := find_loss(values):
                self._now[step] = name, values[name]
        newest, found = max(self._now, default=0), None
        for step in sorted(self._before.keys() & self._now.keys() - {newest}):
            (name, old), (same, new) = self._before.pop(step), self._now[step]
            if name == same and (found is None or not found[1]):
                why = f"the {name} of step {step} was {old!r} before the resume, and is {new!r}"
                found = step, why if old.hex() != new.hex() else ""
        for kept in (self._before, self._now):
            for step in sorted(kept)[:-STEPS_KEPT]:
                del kept[step]
        return found


def find_loss(values: dict[str, float]) -> str:
    """Return which of the logged values is a loss; empty if none is."""
    return min((name for name in values if "loss" in name), default="")
