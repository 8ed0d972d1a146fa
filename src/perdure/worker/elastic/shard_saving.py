"""Checkpoints of a sharded state, for the day on which memory has lost a shard as well.

The first copy's members save their shards together, in torch's sharded format, which is read into
any number of shards. When one is due is the first member's to say; it says so with the counts of
the step, so that all save the same one. What is saved after step *s* was reduced and before it is
applied is the state before it, as with a replicated one.
"""

import time
from typing import Any, cast

from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic.group import Broken
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.peers import Peers
from perdure.worker.elastic.saving import Saving
from perdure.worker.elastic.sharded import ShardedReplica


class ShardSaving(Saving):
    """One member's part; without perdure, nothing."""

    def __init__(self, membership: Membership, replica: ShardedReplica, peers: Peers) -> None:
        """Save nothing yet."""
        super().__init__(membership, cast(Any, replica))
        self._sharded, self._peers = replica, peers
        self._first = False
        """This member is one of the first copy's."""
        self.agreed = False
        """The first member has said, with the newest counts, that one is due."""

    def enter(self, first: bool) -> None:
        """A world is formed, and the replica sharded for it; `first` in the first copy."""
        shard = self._sharded.shard
        if not self._wanted or shard is None:
            return
        if self._saver is not None:
            self._saver.settle()
        self._first, self.agreed = first, False
        self._saver = self._open_shard(shard.number, shard.count)

    def restore(self, extra: dict[str, Any]) -> int:
        """Return 0: there is no world to restore a shard in, yet."""
        return 0

    def restore_shard(self, extra: dict[str, Any]) -> int:
        """Load the newest checkpoint with the copy, fill `extra`; return its step, or 0.

        Raises:
            Broken: a member was lost.
        """
        if self._saver is None:
            return 0
        try:
            step = self._saver.restore(extra)
        except RuntimeError as error:
            raise Broken(str(error).splitlines()[0]) from None
        self._saved = (step, time.monotonic())
        return step

    def wants(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether this is the first member, and a checkpoint is due."""
        return super().is_due(applied, members)

    def is_due(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether all have heard that `applied` steps are to be saved."""
        return self.agreed and applied > 0

    def save(
        self, applied: int, members: tuple[int, ...], reason: str, extra: dict[str, Any]
    ) -> None:
        """Begin to save this member's shard, if it was not done.

        Raises:
            OSError, PerdureError: it cannot be begun.
        """
        if self._saver is None or self._saved[0] == applied:
            return
        self._saved = (applied, time.monotonic())
        if self._first:
            self._saver.save(applied, reason=reason, extra=extra)

    def close(self) -> None:
        """Wait until what was begun is written."""
        super().close()
        self._peers.close()

    def _open_shard(self, rank: int, count: int) -> Checkpointer:
        membership, replica = self._membership, self._sharded
        saver = self._make(rank, count, f"e{membership.epoch}")
        saver.register("model", replica.now())
        saver.register("optimizer", replica.optimizer)
        if replica.scheduler is not None:
            saver.register("scheduler", replica.scheduler)
        return saver
