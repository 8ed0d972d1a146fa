"""Checkpoints of an elastic world: for the day on which nobody is left to take the state from.

Replicas are equal, so the first living member saves for all, and nobody has to agree with it. It
saves step *s* when step *s+1* has been reduced and is not yet applied: that every member took
part in it proves that all have applied *s*, and what lies on disk was everyone's state.
"""

import time
from typing import Any

from perdure.worker.checkpoint import Checkpointer
from perdure.worker.checkpoint.registry import Registry
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state.replicated import Replica
from perdure.worker.spec import find_checkpoint_url, read_spec

EVERY_S = 60.0
"""Where the job says nothing: only a restart of the whole world ever reads one."""


class Saving:
    """One rank's part; without perdure, nothing."""

    def __init__(self, membership: Membership, replica: Replica) -> None:
        """Save nothing yet."""
        self._membership, self._replica = membership, replica
        self.config = read_spec().checkpoint
        self.every_steps = self.config.every_steps
        self.every_s = self.config.every_s
        self._wanted = membership.supervised and membership.attachment is not None
        self._saver: Checkpointer | None = None
        self._saved = (-1, time.monotonic())

    def restore(self, extra: dict[str, Any]) -> int:
        """Load the newest checkpoint, fill `extra`; return its step, 0 where there is none."""
        if not self._wanted or self._membership.joins:
            return 0
        step = self._open(self._membership.me).restore(extra)
        self._saved = (step, time.monotonic())
        return step

    def is_due(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether this rank should save `applied` steps, as every member has applied."""
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
        mine = self._wanted and self._membership.me == members[0]
        if not mine or self._saved[0] == applied:
            return
        self._saver = self._saver or self._open(0)
        self._saver.save(applied, reason=reason, extra=extra)
        self._saved = (applied, time.monotonic())

    def set_every_s(self, value: float) -> None:
        """Save every `value` seconds from now on."""
        self.every_s = value

    def hand_over(self, members: tuple[int, ...]) -> None:
        """Some of `members` leave at this step, and take nothing along that the others lack."""

    def leave(self) -> None:
        """Wait until what was begun is written: this rank leaves, and the others go on."""
        self.close()

    def close(self) -> None:
        """Wait until what was begun is written."""
        if self._saver is not None:
            self._saver.close()

    def _make(
        self, rank: int, world_size: int, world: str = "", registry: Registry | None = None
    ) -> Checkpointer:
        membership = self._membership
        return Checkpointer(
            url=find_checkpoint_url(self.config),
            config=self.config,
            rank=rank,
            world_size=world_size,
            generation=membership.generation,
            world=world,
            registry=registry,
            emit=membership.emit,
            now=membership.now,
        )

    def _open(self, rank: int) -> Checkpointer:
        saver = self._make(rank, 1)
        saver.register("model", self._replica.model)
        saver.register("optimizer", self._replica.optimizer)
        for name in ("scheduler", "scaler"):
            if getattr(self._replica, name) is not None:
                saver.register(name, getattr(self._replica, name))
        return saver
