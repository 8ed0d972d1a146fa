"""Replicas that are left out for ever, and what is said to those of them that live and ask.

Most are dead, or about to be. Of a group that others have started nobody here can end the process
where its manager is not reached; it is told after a while, so that who looks at its terminal learns
what is to be done, and one without patience ends by itself.
"""

from dataclasses import dataclass, field

from perdure.control.lighthouse.outputs import Refused

_KEPT = 1000
REFUSED_AFTER_S = 5.0
"""Longer than it takes to have a manager end its process."""


@dataclass(slots=True)
class Evicted:
    """Names, and the requests that are refused in a moment."""

    _why: dict[str, str] = field(default_factory=dict)
    """Replica id -> why; who was evicted or has asked last comes last."""
    _due: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Token of a request -> when it is refused, and in which words; the oldest first."""

    def __contains__(self, name: str) -> bool:
        """Return whether the replica `name` is left out for ever."""
        return name in self._why

    def add(self, name: str, why: str) -> None:
        """Leave `name` out for ever; of very many the first ones are forgotten."""
        self._why[name] = why
        if len(self._why) > _KEPT:
            del self._why[next(iter(self._why))]

    def refuse(self, now: float, token: int, name: str) -> None:
        """Have the request of `name`, which is evicted, refused in a moment."""
        why = self._why[name] = self._why.pop(name)
        words = (
            f"{name} is left out for ever: {why}. End its process; its group can be started again, "
            "and trains unless it is held until `perdure node restore`"
        )
        self._due[token] = now + REFUSED_AFTER_S, words

    def refuse_silent(self, now: float, token: int, name: str) -> None:
        """Have the request of `name` refused, of which nothing was heard for so long."""
        self._due[token] = now, f"{name} was silent for too long: it may ask again"

    def hang_up(self, token: int) -> None:
        """Forget a request: nobody waits for its answer."""
        self._due.pop(token, None)

    def next_deadline(self) -> float | None:
        """Return when `take_due` is wanted."""
        return min((due_s for due_s, _ in self._due.values()), default=None)

    def take_due(self, now: float) -> list[Refused]:
        """Return the refusals that are due."""
        due = [token for token, (due_s, _) in self._due.items() if due_s <= now]
        return [Refused(token, self._due.pop(token)[1]) for token in due]
