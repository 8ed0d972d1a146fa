"""Steps of a loop that belongs to a library, and calls back; what it does between them."""

import functools
import time
from collections.abc import Iterable
from typing import Any

from perdure.model.errors import ConfigError
from perdure.worker.busy import declare_busy
from perdure.worker.loop import StepLoop

FIRST_S = 3600.0
"""At most so long is the first evaluation, or save, of which nothing is known."""
LEAST_S = 600.0
LONGER = 10.0
"""Later ones are at most so many times as long as the longest so far, and `LEAST_S` at least."""


class BusyCalls:
    """Declares calls of a library's methods as busy phases, by how long they took so far."""

    def __init__(self) -> None:
        """Know of none."""
        self._longest_s: dict[str, float] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Make each call of `owner.method` a busy phase called `name`."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            with declare_busy(name, at_most_s=self.compute_limit_s(name)):
                began_s = time.monotonic()
                result = original(*args, **options)
                self._note(name, time.monotonic() - began_s)
                return result

        setattr(owner, method, call)

    def compute_limit_s(self, name: str) -> float:
        """Return how long the next phase of this name may take at most, in seconds."""
        longest_s = self._longest_s.get(name)
        return FIRST_S if longest_s is None else min(FIRST_S * 24, max(LEAST_S, LONGER * longest_s))

    def _note(self, name: str, took_s: float) -> None:
        self._longest_s[name] = max(self._longest_s.get(name, 0.0), took_s)


class DrivenSteps:
    """The steps of `loop`, taken one by one."""

    def __init__(self, loop: StepLoop) -> None:
        """Touch nothing yet."""
        self.loop = loop
        """Where steps are restored and, after an exception, abandoned."""
        self.inside = False
        """Whether a step is under way."""
        self.stopping = False
        """Whether all ranks have agreed to stop."""

    def read_newest(self, name: str) -> Any:
        """Return the state of object `name` in the newest usable checkpoint; None without one.

        Raises:
            ConfigError: the checkpoint holds no such object.
        """
        step, objects = self.loop.read_newest()
        if step and name not in objects:
            raise ConfigError(
                f"the checkpoint of step {step} was not made by this trainer",
                hint="give the changed script a new job name or checkpoint url",
            )
        return objects.get(name)

    def advance(self) -> bool:
        """Commit the step under way and enter the next; False where training is to stop here."""
        self.commit()
        self.inside = not self.stopping
        if self.inside:
            self.loop.enter_step()
        return self.inside

    def commit(self) -> None:
        """Commit the step under way, if any, and do what is due at its end."""
        if self.inside:
            self.inside = False
            self.loop.commit_step()
        self.stopping = self.loop.stopping

    def finish(self) -> None:
        """End in good order: the last step, the last checkpoint."""
        self.commit()
        self.loop.leave()


def check_names(library: str, thing: object, names: Iterable[str]) -> None:
    """Check that `thing` of `library` has what the adapter builds on.

    Raises:
        ConfigError: a name is missing; it says which, and which version was tested.
    """
    from importlib.metadata import version

    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        kind = type(thing).__name__
        raise ConfigError(
            f"{kind} of {library} {version(library)} has no {', '.join(missing)}",
            hint="perdure was tested with the version that docs/trainers.md names",
        )
