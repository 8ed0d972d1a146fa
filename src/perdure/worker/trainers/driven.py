"""Steps of a loop that belongs to a library, and calls back."""

from collections.abc import Iterable
from typing import Any

from perdure.model.errors import ConfigError
from perdure.worker.loop import StepLoop


class DrivenSteps:
    """The steps of `loop`, taken one by one."""

    def __init__(self, loop: StepLoop) -> None:
        """Touch nothing yet."""
        self._loop = loop
        self.inside = False
        """Whether a step is under way."""
        self.stopping = False
        """Whether all ranks have agreed to stop."""

    @property
    def committed(self) -> int:
        """Committed steps so far."""
        return self._loop.committed

    def find(self, name: str) -> Any:
        """Return the state of object `name` in the newest usable checkpoint; None without one.

        Raises:
            ConfigError: the checkpoint holds no such object.
        """
        step, objects = self._loop.find()
        if step and name not in objects:
            raise ConfigError(
                f"the checkpoint of step {step} was not made by this trainer",
                hint="give the changed script a new job name or checkpoint url",
            )
        return objects.get(name)

    def begin(self) -> None:
        """Restore what was registered."""
        self._loop.begin()

    def advance(self) -> bool:
        """Commit the step under way and enter the next; False where training is to stop here."""
        self.commit()
        self.inside = not self.stopping
        if self.inside:
            self._loop.enter_step()
        return self.inside

    def commit(self) -> None:
        """Commit the step under way, if any, and do what is due at its end."""
        if self.inside:
            self.inside = False
            self._loop.commit_step()
        self.stopping = self._loop.stopping

    def finish(self) -> None:
        """End in good order: the last step, the last checkpoint."""
        self.commit()
        self._loop.leave()

    def abandon(self) -> None:
        """Note that the trainer left its loop by an exception."""
        self._loop.abandon()


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
