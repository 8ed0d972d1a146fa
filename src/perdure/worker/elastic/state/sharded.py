"""The sharded state: each member has its rows of every parameter (`shards`).

What differs from a replicated one:

- Members of a copy run their micro-batches side by side, because each gathers from all. Where the
  gathering breaks in mid-backward, what that pass has added is taken back.
- A new world has other shards, and so another model (`fsdp` says why).
"""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from perdure.model.errors import PlatformError
from perdure.plan.elastic.commit import FRESH
from perdure.plan.elastic.shards import (
    NO_LINE,
    WHOLE,
    Shard,
    ShardReformation,
    ShardStanding,
    Snapshot,
    Source,
    decide_shards,
)
from perdure.worker.elastic.gradients.accumulation import Accumulation, Compute
from perdure.worker.elastic.gradients.buckets import BUCKET_BYTES, Buckets
from perdure.worker.elastic.group import Copy, Group
from perdure.worker.elastic.membership import find_node
from perdure.worker.elastic.moving.exchange import share_plain
from perdure.worker.elastic.moving.rows import move_rows
from perdure.worker.elastic.saving.peers import Peers
from perdure.worker.elastic.saving.snapshots import Snapshots
from perdure.worker.elastic.state import State, Taken
from perdure.worker.elastic.state.fsdp import Parts
from perdure.worker.elastic.state.shards import ShardedReplica


class ShardedState(State):
    """One member's shard, of a copy of the state that some members have together."""

    work: Accumulation

    def __init__(
        self,
        replica: ShardedReplica,
        compute: Compute,
        *,
        me: int,
        count: int,
        seed: int,
        minimum: int,
        exact: bool = False,
        snapshot_every: int = 0,
        memory: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Train `replica`, of which `minimum` members have a copy (0: all of them).

        Every `snapshot_every` steps (0: never) a snapshot goes to the folder `memory`.
        """
        self.replica = replica
        peers = Peers(memory if snapshot_every else None, me, Snapshot)
        self.snapshots = Snapshots(peers, snapshot_every)
        self._me, self._count, self._minimum = me, count, minimum
        buckets = Buckets(replica.parameters, bucket_bytes, sets=1)
        self.work = Accumulation(
            compute,
            self._backward,
            buckets,
            count=count,
            seed=seed,
            exact=exact,
            whole=False,
        )
        replica.watch(buckets.note)
        self._saves = False
        """This member is of the first copy."""
        self._old: dict[Shard, Parts] = {}
        """Shards of the world before, of the same step."""
        self._rebuilt = False
        """The model is another one than in the world before."""

    @property
    def model(self) -> nn.Module:
        """Return the model, sharded as the newest world has it."""
        return self.replica.now()

    # --- a step -------------------------------------------------------------------------------

    def start_at(self, step: int) -> None:
        """Note that this is the state after `step` steps, and nothing of another one is held."""
        self.applied = step
        self._old.clear()

    def _backward(self, loss: Tensor, counts: bool) -> None:
        self.replica.backward(loss, counts)
        self.replica.refuse_buffers()

    def update(self, source: object) -> None:
        """Apply this member's rows of the gradients."""
        self.work.buckets.expose(self.applied)
        self.replica.update()
        self.applied += 1
        self.line, self.ready = self.ready, NO_LINE
        self._old.clear()
        self.work.clear()
        if self._rebuilt:
            self._rebuilt = False
            gc.collect()  # The model of the world before refers to itself, and to its parts.

    # --- the world ----------------------------------------------------------------------------

    def stand(self) -> ShardStanding:
        """Return what this member holds."""
        mine = self.replica.shard
        held = [*(shard for shard in self._old if shard != mine), *([mine] if mine else [])]
        return ShardStanding(
            node=find_node(),
            applied=self.applied,
            line=self.line,
            shards=() if self.applied == FRESH else tuple(held),
            done=tuple(self.work.done),
            ready=self.ready,
            snapshots=self.snapshots.peers.list_all(),
        )

    def decide(self, standings: Mapping[int, ShardStanding], line: int) -> ShardReformation:
        """Return from which step on, and who has which shard.

        Raises:
            PlatformError: nothing whole is left.
        """
        lengths = self.replica.skeleton.lengths
        plan = decide_shards(self._count, lengths, self._minimum, standings)
        if plan is None:
            raise PlatformError(
                "the last copy of a shard is lost, and no snapshot is whole",
                hint="the world starts again from the newest checkpoint",
            )
        return plan

    def list_reduced(self, step: int) -> list[Tensor]:
        """Return the sums: gradients of its own rows each member has."""
        return [self.work.tally.sums(step)]

    def take(self, plan: ShardReformation, group: Group, settings: dict[str, Any]) -> Taken:
        """Become the shard that the plan gives to this member, at the plan's step."""
        me, replica = self._me, self.replica
        at_step = (self.applied, self.line) == (plan.step, plan.line)
        held = dict(self._old) if at_step else {}
        if at_step and replica.shard is not None:
            held[replica.shard] = replica.parts()
        elif plan.fresh and me == min(plan.layout):
            held[WHOLE] = replica.parts()
        read_snapshot = self.snapshots.make_reader()

        def open_one(source: Source) -> Any:
            return read_snapshot(Snapshot(plan.step, plan.line, source.shard, source.owner))

        def read(source: Source) -> Parts:
            return held[source.shard] if source.owner < 0 else open_one(source)["parts"]

        def tell() -> dict[str, Any]:
            return replica.plain() | settings if teller.owner < 0 else open_one(teller)["plain"]

        teller = min(
            plan.sources,
            key=lambda s: (s.owner >= 0, s.member),
            default=Source(min(plan.layout), WHOLE),
        )
        plain = share_plain(group, teller.member, tell)
        parts = move_rows(group, plan, replica.skeleton.shapes, plain["keys"], read)
        mine = next(copy for copy in plan.copies if me in copy)
        copy = group.open(Copy, f"copy/{mine[0]}", mine)
        self.groups = (copy,)
        replica.adopt(copy, plan.layout[me], parts, plain)
        self._rebuilt = True
        self._old = held
        self.ready = NO_LINE
        if at_step:
            return Taken(teller.member)
        self.applied, self.line = plan.step, plan.line
        self.work.clear()
        return Taken(teller.member, plain, changed=True)

    def enter(
        self,
        plan: ShardReformation,
        group: Group,
        standings: Mapping[int, ShardStanding],
        line: int,
    ) -> None:
        """Compute what nobody has."""
        at_step = {
            m: s for m, s in standings.items() if (s.applied, s.line) == (plan.step, plan.line)
        }
        kept = {number: m for m, s in at_step.items() for number in s.done}
        self.work.enter(plan.todo, kept, self._me, self.groups[0].members)
        self._saves = self._me in plan.copies[0]

    def leave(self) -> None:
        """Keep whole micro-batches, and free what is gathered."""
        super().leave()
        self.replica.release()

    def describe(self, plan: ShardReformation) -> dict[str, Any]:
        """Return how far all went back."""
        return {"back": plan.back}

    # --- what outlives a loss -----------------------------------------------------------------

    def part(self, group: Group) -> tuple[bool, int, int]:
        """Return that the first copy saves its shards."""
        shard = self.replica.shard
        assert shard is not None
        return self._saves, shard.number, shard.count

    def list_saved(self) -> dict[str, Any]:
        """Return the objects that have the shard."""
        replica = self.replica
        saved = {"model": replica.now(), "optimizer": replica.optimizer}
        return saved | ({"scheduler": replica.scheduler} if replica.scheduler is not None else {})

    def snapshot(self, settings: dict[str, Any]) -> tuple[Snapshot, Any]:
        """Return the shard, and what all members have alike."""
        replica = self.replica
        assert replica.shard is not None
        named = Snapshot(self.applied, self.line, replica.shard, self._me)
        return named, {"parts": replica.parts(), "plain": replica.plain() | settings}
