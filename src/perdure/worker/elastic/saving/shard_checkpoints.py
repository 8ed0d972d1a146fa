"""Checkpoints of a sharded state: the first copy's members save it, in torch's sharded format."""

from typing import Any, cast

from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic.saving.part_checkpoints import PartSaving
from perdure.worker.elastic.state.shards import ShardedReplica


class ShardSaving(PartSaving):
    """One member's shard; without perdure, nothing."""

    def _open_part(self, number: int, count: int) -> Checkpointer:
        membership, replica = self._membership, cast(ShardedReplica, cast(Any, self._replica))
        saver = self._make(number, count, f"e{membership.epoch}")
        saver.register("model", replica.now())
        saver.register("optimizer", replica.optimizer)
        if replica.scheduler is not None:
            saver.register("scheduler", replica.scheduler)
        return saver
