"""Checkpoints of an elastic world: for the day on which nobody is left to take the state from.

Replicas are equal, so the first living member saves for all, and nobody has to agree with it. It
saves step *s* when step *s+1* has been reduced and is not yet applied: that every member took
part in it proves that all have applied *s*, and what lies on disk was everyone's state.
"""

import time

from perdure.model.errors import PerdureError
from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.replica import Replica
from perdure.worker.spec import find_checkpoint_url, read_spec

EVERY_S = 60.0
"""Where the job says nothing: only a restart of the whole world ever reads one."""


class Saving:
    """One rank's part; without perdure, nothing."""

    def __init__(self, membership: Membership, replica: Replica) -> None:
        """Save nothing yet."""
        self._membership, self._replica = membership, replica
        self._config = read_spec().checkpoint
        self._wanted = membership.supervised and membership.attachment is not None
        self._saver: Checkpointer | None = None
        self._saved = (-1, time.monotonic())

    def restore(self) -> int:
        """Load the newest checkpoint; return its step, 0 where there is none."""
        if not self._wanted or self._membership.joins:
            return 0
        step = self._open(self._membership.me).restore({})
        self._saved = (step, time.monotonic())
        return step

    def look(self, applied: int, members: tuple[int, ...]) -> None:
        """Save, if it is due and ours to do; `applied` steps are applied by every member."""
        if not self._wanted or self._membership.me != members[0]:
            return
        step, at = self._saved
        every = self._config.every_steps
        elapsed_s = time.monotonic() - at
        due = applied % every == 0 if every else elapsed_s >= (self._config.every_s or EVERY_S)
        if not due or applied in (0, step):
            return
        self._saved = (applied, time.monotonic())
        self._saver = self._saver or self._open(0)
        try:
            self._saver.save(applied, reason="interval", extra={})
        except (OSError, PerdureError) as error:
            print(f"perdure: checkpoint of step {applied}: {error}")

    def close(self) -> None:
        """Wait until what was begun is written."""
        if self._saver is not None:
            self._saver.close()

    def _open(self, rank: int) -> Checkpointer:
        membership = self._membership
        saver = Checkpointer(
            url=find_checkpoint_url(self._config),
            config=self._config,
            rank=rank,
            world_size=1,
            generation=membership.generation,
            emit=membership.emit,
            now=membership.now,
        )
        saver.register("model", self._replica.model)
        saver.register("optimizer", self._replica.optimizer)
        if self._replica.scheduler is not None:
            saver.register("scheduler", self._replica.scheduler)
        return saver
