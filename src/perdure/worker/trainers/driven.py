"""Steps of a loop that belongs to a library, and calls back; what it does between them."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perdure.model.errors import ConfigError
from perdure.worker.busy import compute_allowance_s, declare_busy
from perdure.worker.checkpoint.attributes import is_own_class
from perdure.worker.loop import StepLoop
from perdure.worker.rng import capture_rng
from perdure.worker.run import Run

_DEPTH_MAX = 4
"""Of a batch of batches."""


class Driven:
    """perdure's part in one Trainer: the steps of `loop` are taken one by one, as it calls back."""

    def __init__(self, trainer: Any, run: Run, loop: StepLoop) -> None:
        """Touch nothing yet."""
        self._trainer, self._run, self._loop = trainer, run, loop
        self._inside = False
        """Whether a step is under way."""
        self._stopping = False
        """Whether all ranks have agreed to stop."""
        self._called = False
        self._resume_rng: dict[str, Any] | None = None
        """Random state to go on with; None once that was done."""
        self._longest_s: dict[str, float] = {}
        """Of each busy phase, how long it took at most so far."""
        self._theirs: dict[str, Callable[..., Any]] = {}
        """The library's own methods, by name, which this one's stand before."""

    def come_before(self, owner: Any, *names: str) -> None:
        """Have this one's methods of these names called in the place of `owner`'s."""
        for name in names:
            self._theirs[name] = getattr(owner, name)
            setattr(owner, name, getattr(self, name))

    def declare_busy(self, owner: Any, method: str, name: str) -> None:
        """Make each call of `owner.method` a busy phase called `name`, by how long they took."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            longest_s = self._longest_s.get(name, 0.0)
            with declare_busy(name, at_most_s=compute_allowance_s(longest_s)):
                began_s = time.monotonic()
                result = original(*args, **options)
                self._longest_s[name] = max(longest_s, time.monotonic() - began_s)
                return result

        setattr(owner, method, call)

    def list_owned(self) -> dict[str, Any]:
        """Return the objects of the script's own classes, whose plain attributes are kept."""
        handler = getattr(self._trainer, "callback_handler", self._trainer)
        found = [*handler.callbacks, self._trainer, getattr(self._trainer, "datamodule", None)]
        return {
            f"{type(one).__name__}{number}": one
            for number, one in enumerate(one for one in found if is_own_class(one.__class__))
        }

    def read_newest(self, call: str, hint: str = "") -> Any:
        """Return the trainer's state in the newest usable checkpoint; None without one.

        Raises:
            ConfigError: the checkpoint holds none, or it is the second time that `call` begins: a
                run's steps are those of one call.
        """
        if self._called:
            raise ConfigError(f"attach: {call} is resumable once in a run", hint=hint)
        self._called = True
        step, objects = self._loop.read_newest()
        if step and "trainer" not in objects:
            raise ConfigError(
                f"the checkpoint of step {step} was not made by this trainer",
                hint="give the changed script a new job name or checkpoint url",
            )
        return objects.get("trainer")

    def restore(self) -> None:
        """Restore, now that everything there is to restore into was registered."""
        self._loop.begin()
        if self._loop.committed:
            self._resume_rng = capture_rng()

    def note_batch(self, batch: object) -> None:
        """Count a batch of the step under way as its work, unless the script declares it."""
        self._loop.progress.add_units(count_items(batch))

    def enter_next(self) -> bool:
        """Commit the step under way and enter the next; False where training is to stop here."""
        self._commit()
        self._inside = not self._stopping
        if self._inside:
            self._loop.enter_step()
        return self._inside

    def _commit(self) -> None:
        """Commit the step under way, if any, and do what is due at its end."""
        if self._inside:
            self._inside = False
            self._loop.commit_step()
        self._stopping = self._loop.stopping

    def finish(self) -> None:
        """End in good order: the last step, the last checkpoint."""
        self._commit()
        self._loop.leave()


def count_items(batch: object) -> float:
    """Return how many tokens, or samples, there are in a batch; 0 where it does not show.

    Only shapes are looked at: nobody waits for a device, and padding is work as well.

    >>> count_items({"labels": None}), count_items("text")
    (0.0, 0.0)
    """
    try:
        return _count_items(batch, _DEPTH_MAX)
    except Exception:  # A batch may be anything, and is none of ours.
        return 0.0


def _count_items(batch: object, depth: int) -> float:
    if isinstance(batch, Mapping):
        tokens = getattr(batch.get("input_ids"), "shape", None)
        if tokens:
            return float(math.prod(tokens))
        batch = list(batch.values())
    shape = getattr(batch, "shape", None)
    if shape:
        return float(shape[0])
    parts = batch if isinstance(batch, list | tuple) and depth else ()
    return next((count for part in parts if (count := _count_items(part, depth - 1))), 0.0)


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
