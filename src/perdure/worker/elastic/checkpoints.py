"""What outlives a loss: checkpoints on disk, snapshots in memory.

Checkpoints of an elastic world: for the day on which nobody is left to take the state from.

Where everyone has the whole state, the first living member saves for all, and nobody has to agree
with it. It saves step *s* when step *s+1* has been reduced and is not yet applied: that every
member took part in it proves that all have applied *s*, and what lies on disk was everyone's state.

Of a state that lies in parts, members who together have everything save it together, in a format
that is read into any number of parts. When one is due is the first member's to say; it says so
with the counts of the step, so that all save the same one.
"""

import time
from collections.abc import Callable
from typing import Any

from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state import State
from perdure.worker.settings import read_checkpoint_url, read_spec

EVERY_S = 60.0
"""Where the job says nothing: only a restart of the whole world ever reads one."""


class Saving:
    """One rank's part; without perdure, nothing."""

    def __init__(
        self,
        membership: Membership,
        state: State,
        hand_over: Callable[[tuple[int, ...]], object] = lambda members: None,
    ) -> None:
        """Save nothing yet; `hand_over` sees to it that members that leave take nothing along."""
        self._membership, self._state = membership, state
        self.hand_over = hand_over
        self.config = read_spec().checkpoint
        self.every_steps = self.config.every_steps
        self.every_s = self.config.every_s
        self._wanted = membership.attachment.control is not None
        self._saver: Checkpointer | None = None
        self._saved = (-1, time.monotonic())
        self._mine = False
        """This member's part is the one of its kind that is saved."""
        self.agreed = False
        """All have heard that the newest state is to be saved; or it is this rank's to say."""

    def enter(self, mine: bool, number: int, count: int) -> None:
        """Enter a world in which this member has part `number` of `count`.

        It is `mine` to save where other members have the same part.
        """
        self._mine = mine
        if self._wanted and not self._state.whole:
            if self._saver is not None:
                self._saver.settle()
            self._saver = self._open(number, count)

    def read_newest(self) -> int:
        """Return the step of the newest usable checkpoint, 0 where there is none."""
        return self._saver.read_newest()[0] if self._saver is not None else 0

    def restore(self, extra: dict[str, Any]) -> int:
        """Load the newest checkpoint, fill `extra`; return its step, 0 where there is none.

        A part is restored with the others, in a world.
        """
        saver = self._saver
        if self._wanted and self._state.whole and not self._membership.joins:
            saver = self._open(self._membership.me, 1)
        if saver is None:
            return 0
        step = saver.restore(extra)
        self._saved = (step, time.monotonic())
        return step

    def wants(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether this is the first member, and a checkpoint of `applied` steps is due."""
        if not self._wanted or self._membership.me != members[0]:
            return False
        step, at = self._saved
        every = self.every_steps
        elapsed_s = time.monotonic() - at
        due = applied % every == 0 if every else elapsed_s >= (self.every_s or EVERY_S)
        return due and applied not in (0, step)

    def save(
        self, applied: int, members: tuple[int, ...], reason: str, extra: dict[str, Any]
    ) -> None:
        """Begin to save, if it is ours to do and was not done.

        Raises:
            OSError, PerdureError: it cannot be begun.
        """
        if not self._wanted or self._saved[0] == applied or (self._state.whole and not self._mine):
            return
        self._saver = self._saver or self._open(0, 1)
        if self._mine:
            self._saver.save(applied, reason=reason, extra=extra)
        self._saved = (applied, time.monotonic())

    def close(self) -> None:
        """Wait until what was begun is written."""
        if self._saver is not None:
            self._saver.close()

    def _open(self, number: int, count: int) -> Checkpointer:
        membership = self._membership
        saver = Checkpointer(
            url=read_checkpoint_url(self.config),
            config=self.config,
            rank=number,
            world_size=count,
            generation=membership.generation,
            world="" if self._state.whole else f"e{membership.epoch}",
            registry=self._state.make_registry(number, count),
            emit=membership.emit,
            now=membership.now,
        )
        for name, value in self._state.list_saved().items():
            saver.register(name, value)
        return saver
