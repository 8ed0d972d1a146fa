"""One rank of an elastic world whose state is sharded.

What differs from a replicated one:

- Members of a copy run their micro-batches side by side, because each gathers from all. Where the
  gathering breaks in mid-backward, what that pass has added is taken back.
- A new world has other shards, and so another model (`sharding` says why).
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from perdure.model.errors import PlatformError, ProtocolError
from perdure.plan.elastic.commit import FRESH
from perdure.plan.elastic.microbatches import assign
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
from perdure.worker.config import Config
from perdure.worker.data import derive_seed, seed_all
from perdure.worker.elastic.gradients.buckets import Buckets
from perdure.worker.elastic.group import Broken, Copy, Group, exchange_standings, make_device
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving.rows import move_parts, share_plain
from perdure.worker.elastic.part_trainer import PartTrainer, open_prefix
from perdure.worker.elastic.saving.peers import Peers
from perdure.worker.elastic.saving.shard_checkpoints import ShardSaving
from perdure.worker.elastic.state.fsdp import Parts
from perdure.worker.elastic.state.shards import ShardedReplica
from perdure.worker.elastic.trainer import BUCKET_BYTES


class ShardTrainer(PartTrainer):
    """Runs `compute(step, micro_batch) -> loss` for every micro-batch of every step, once."""

    def __init__(
        self,
        replica: ShardedReplica,
        compute: Callable[[int, int], Tensor],
        *,
        count: int,
        seed: int,
        membership: Membership,
        minimum: int,
        exact: bool = False,
        config: Config | None = None,
        snapshot_every: int = 0,
        memory: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Train `replica`, of which `minimum` members have a copy (0: all of them).

        Every `snapshot_every` steps (0: never) a snapshot goes to the folder `memory`.
        """
        buckets = Buckets(replica.parameters, bucket_bytes, sets=1)
        peers = Peers(memory if snapshot_every else None, membership.me, Snapshot)
        self._disk = ShardSaving(membership, replica, peers)
        super().__init__(
            cast(Any, replica), compute, count=count, seed=seed, exact=exact, membership=membership,
            config=config, saving=self._disk, buckets=buckets, peers=peers,
            snapshot_every=snapshot_every,
        )  # fmt: skip
        self._sharded, self._minimum = replica, minimum
        self._tally = torch.zeros(4, count, dtype=torch.float64)
        """Which micro-batches were done here, and their losses; two rows of votes."""
        self._sums = tuple(torch.zeros_like(self._tally) for _ in range(2))
        self._copy: Copy | None = None
        self._copies: tuple[tuple[int, ...], ...] = ()
        self._rounds = 0
        """Micro-batches of this step that the members of this copy still run side by side."""
        self._filling = False
        self._before: dict[str, Tensor | None] = {}
        """Gradients as they were before the pass under way."""
        self._old: dict[Shard, Parts] = {}
        """Shards of the world before, of the same step."""

    @property
    def model(self) -> nn.Module:
        """Return the model, sharded as the newest world has it."""
        return self._sharded.now()

    # --- one step -----------------------------------------------------------------------------

    def _give_out(self, members: tuple[int, ...]) -> None:
        super()._give_out(members)
        self._plan_rounds(assign(self._count, members))

    def _plan_rounds(self, todo: dict[int, tuple[int, ...]]) -> None:
        mine = next(copy for copy in self._copies if self._membership.me in copy)
        self._rounds = max(len(todo[member]) for member in mine)

    def _reduce(self, group: Group) -> None:
        """Compute what is missing, and reduce; the counts last."""
        scale, armed = 1.0 / self._count, False
        while self._rounds:
            if self._membership.overtaken():
                raise Broken("a new world was ordered")
            armed = self._rounds == 1 and self._tree is None
            self._run_round(group, scale, last=armed)
            if self._todo:
                self._done.append(self._todo.pop(0))
            self._rounds -= 1
            self._progress.mark_work()
        if self._tree is not None:
            self._add_up(self._tree, group, scale)
        elif not armed:
            self._buckets.arm(self._applied, scale, group.all_reduce)
        self._buckets.flush()
        group.wait()
        self._tally[-2, 0] = float(self._disk.wants(self._applied, group.members))
        self._prove(group)
        self._disk.agreed = bool(self._view_tally()[-2].any())

    def _run_round(self, group: Group, scale: float, *, last: bool) -> None:
        """One micro-batch, forward and backward, or one that only keeps the others company."""
        self._filling = not self._todo
        micro_batch = self._todo[0] if self._todo else 0
        if last and self._filling:
            self._buckets.arm(self._applied, scale, group.all_reduce)
            self._buckets.flush()
        seed_all(derive_seed(self._seed, "micro-batch", self._applied, micro_batch))
        try:
            loss = self._compute(self._applied, micro_batch)
            if not self._filling:
                self._tally[0, micro_batch] = 1.0
                self._tally[1, micro_batch] = loss.detach().item()
                if last:
                    self._buckets.arm(self._applied, scale, group.all_reduce)
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            for name, gradient in self._before.items():
                self._sharded.stand_ins[name].grad = gradient
            raise
        finally:
            self._before.clear()
        if not self._filling:
            self._keep_apart(micro_batch)
        if not self._checked:
            self._checked = True
            self._replica.refuse_buffers()

    def _take(self, name: str, parameter: Tensor) -> None:
        """A gathered parameter's gradient of this pass is there."""
        if self._filling:
            return
        stand_in, gradient = self._sharded.stand_ins[name], parameter.grad
        assert gradient is not None
        gradient = gradient.to(stand_in.dtype)
        self._before.setdefault(name, stand_in.grad)
        stand_in.grad = gradient if stand_in.grad is None else stand_in.grad + gradient
        self._buckets.note(stand_in)

    def _let_go(self) -> None:
        self._old.clear()

    def _tell_parts(self) -> tuple[Snapshot, Parts]:
        shard = self._sharded.shard
        assert shard is not None
        named = Snapshot(self._applied, self._line, shard, self._membership.me)
        return named, self._sharded.parts()

    # --- the world ----------------------------------------------------------------------------

    def _leave(self) -> None:
        self._sharded.release()
        if self._copy is not None:
            self._copy.give_up()
        self._copy = None
        super()._leave()

    def _abandon(self) -> None:
        copy = self._copy
        if copy is not None:
            copy.abandon()
        super()._abandon()

    def _form(self, members: tuple[int, ...]) -> Any:
        me, store = self._membership.me, self._open_store(members)
        mine = self._stand()
        overtaken = self._membership.overtaken
        standings = exchange_standings(store, members, me, mine, overtaken)
        lengths = self._sharded.skeleton.lengths
        plan = decide_shards(self._count, lengths, self._minimum, standings)
        if plan is None:
            raise PlatformError(
                "the last copy of a shard is lost, and no snapshot is whole",
                hint="the world starts again from the newest checkpoint",
            )
        self._device = self._device or make_device()
        self._group = group = Group(members, me, store, self._device, overtaken)
        self._note_connected()
        self._roll_forward(plan.step, plan.holder, plan.forward, group)
        self._take_shard(plan, group, store)
        self._peers.enter(self._make_mirror({m: s.node for m, s in standings.items()}, store))
        self._copies = plan.copies
        self._plan_rounds(plan.todo)
        at_step = {
            m: s for m, s in standings.items() if (s.applied, s.line) == (plan.step, plan.line)
        }
        kept = {number: m for m, s in at_step.items() for number in s.done}
        self._owner = kept | {number: m for m, todo in plan.todo.items() for number in todo}
        shard = plan.layout[me]
        self._disk.enter(me in plan.copies[0], shard.number, shard.count)
        if not plan.sources:
            self._load_checkpoint()
        if not plan.sources and self._every:
            self._take_snapshot(members)  # To go back to, before there is a newer one.
        return plan

    def _describe(self, plan: Any) -> dict[str, Any]:
        return {"back": plan.back}

    def _load_checkpoint(self) -> None:
        """Take the newest checkpoint's state in the place of the initial one."""
        extra: dict[str, Any] = {}
        restored = self._disk.restore_part(extra)
        if restored:
            self._steering.load(extra)
            self._applied = self._furthest = restored
            self._old.clear()

    def _stand(self) -> ShardStanding:
        shards = tuple(self._old)
        if self._sharded.shard is not None and self._sharded.shard not in self._old:
            shards = (*shards, self._sharded.shard)
        return ShardStanding(
            node=os.environ.get("PERDURE_NODE", ""),
            applied=FRESH if self._fresh else self._applied,
            line=self._line,
            shards=() if self._fresh else shards,
            done=tuple(self._done),
            ready=self._ready,
            snapshots=self._peers.list_all(),
        )

    def _take_shard(self, plan: ShardReformation, group: Group, store: Any) -> None:
        """Become the shard that the plan gives to this member, at the plan's step."""
        me, replica = self._membership.me, self._sharded
        shard, overtaken = plan.layout[me], self._membership.overtaken
        at_step = not self._fresh and (self._applied, self._line) == (plan.step, plan.line)
        held = dict(self._old) if at_step else {}
        if at_step and replica.shard is not None:
            held[replica.shard] = replica.parts()
        elif not plan.sources and me == min(plan.layout):
            held[WHOLE] = replica.parts()
        read, plain_of = self._make_reader(plan, held)
        first = min(
            plan.sources,
            key=lambda s: (s.owner >= 0, s.member),
            default=Source(min(plan.layout), WHOLE),
        )
        plain = share_plain(
            group, me, first.member, plain_of(first) if me == first.member else None, overtaken
        )
        parts = move_parts(group, me, plan, replica.skeleton.shapes, plain["keys"], read, overtaken)
        mine = next(copy for copy in plan.copies if me in copy)
        prefix = open_prefix(f"copy/{min(mine)}", store)
        copy = Copy(mine, me, prefix, self._device, overtaken)
        self._copy = copy
        replica.adopt(copy, shard, parts, plain, self._take)
        self._rebuilt = True
        self._old = held
        if not at_step:
            self._begin_at(plan.step, plan.line, plain)
        self._ready = NO_LINE

    def _tell_plain(self) -> dict[str, Any]:
        return self._sharded.plain() | self._steering.state()

    def _make_reader(
        self, plan: ShardReformation, held: dict[Shard, Parts]
    ) -> tuple[Callable[[Source], Parts], Callable[[Source], Any]]:
        """Return what gives a source's tensors, and what all members have alike."""

        @functools.cache
        def open_snapshot(source: Source) -> tuple[Parts, Any]:
            one = Snapshot(plan.step, plan.line, source.shard, source.owner)
            try:
                return self._peers.read(one)
            except ProtocolError as error:
                raise Broken(error.message) from None

        def read(source: Source) -> Parts:
            return held[source.shard] if source.owner < 0 else open_snapshot(source)[0]

        def plain_of(source: Source) -> Any:
            return self._tell_plain() if source.owner < 0 else open_snapshot(source)[1]

        return read, plain_of
