"""One rank of an elastic world whose model is cut into pipeline stages.

What differs from a replicated one:

- A member has some blocks, and does their part of the micro-batches that pass through it; gradients
  are reduced over the members that have the same blocks. These are a stage, or interleaved several.
- Micro-batches of a lost member pass through the other copies of its stage. Where there is none,
  or another cut is much better, blocks move, and only those that somebody lacks.
- A micro-batch that one stage has finished and another has lost passes through both once more;
  the former then computes only what the latter needs of it.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.planning.pipeline import Action, Executed
from perdure.plan.elastic.commit import FRESH
from perdure.plan.elastic.shards import NO_LINE
from perdure.plan.elastic.stage_commit import (
    Holder,
    StageReformation,
    StageSnapshot,
    StageStanding,
    decide_stages,
)
from perdure.plan.elastic.stage_orders import Passes, StageSchedule, plan_passes
from perdure.plan.elastic.stages import Choose, Layout, Runs, Section, list_blocks
from perdure.plan.worlds.measures import StageTimes, collect_times
from perdure.worker.config import Config
from perdure.worker.elastic.gradients.buckets import Buckets
from perdure.worker.elastic.gradients.tree import GradientTree
from perdure.worker.elastic.group import Broken, Group, exchange_standings, make_device, wait_for
from perdure.worker.elastic.joining.follower import CatchUp
from perdure.worker.elastic.joining.stage_follower import StagePupil, find_node
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving.blocks import move_blocks
from perdure.worker.elastic.moving.rows import share_plain
from perdure.worker.elastic.part_trainer import PartTrainer, open_prefix
from perdure.worker.elastic.saving.peers import Peers
from perdure.worker.elastic.saving.stage_checkpoints import StageSaving
from perdure.worker.elastic.state.blocks import (
    BlockState,
    StagedReplica,
    count_bytes,
    find_norms,
    join_block,
)
from perdure.worker.elastic.state.fsdp import Parts
from perdure.worker.elastic.trainer import BUCKET_BYTES, Trainer
from perdure.worker.pipeline import Runner, Schedule, StageBlocks

_EXECUTED_MAX = 64


class StageTrainer(PartTrainer):
    """Passes every micro-batch of every step through all stages, once."""

    def __init__(
        self,
        replica: StagedReplica,
        load: Callable[[int, int], Any],
        loss: Callable[[Any, Any], Tensor],
        *,
        count: int,
        seed: int,
        exact: bool,
        membership: Membership,
        choose: Choose,
        config: Config | None = None,
        snapshot_every: int = 0,
        memory: Path | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        recompute: bool = False,
        schedule: StageSchedule = "1f1b",
        device: str | torch.device = "cpu",
    ) -> None:
        """Train `replica`, cut as `choose` says.

        `load(step, micro_batch)` returns (inputs, targets), `loss(output, targets)` a mean. Every
        `snapshot_every` steps (0: never) a snapshot goes to the folder `memory`.
        """
        peers = Peers(memory if snapshot_every else None, membership.me, StageSnapshot)
        self._disk = StageSaving(membership, replica, peers)
        super().__init__(
            cast(Any, replica), cast(Any, None), count=count, seed=seed, exact=False,
            membership=membership, config=config, saving=self._disk, peers=peers,
            buckets=Buckets((), bucket_bytes, sets=1), snapshot_every=snapshot_every,
        )  # fmt: skip
        self._staged, self._load, self._loss, self._choose = replica, load, loss, choose
        self._catching = CatchUp(
            StagePupil(replica, membership.me, choose, self._fit, self._list_norms)
        )
        self._feed.node = find_node()
        self._bucket_bytes, self._exact = bucket_bytes, exact
        self._recompute, self._schedule, self._on = recompute, schedule, device
        blocks = len(replica.blocks)
        self._tally = torch.zeros(blocks + 3, count, dtype=torch.float64)
        """How often each block did each micro-batch here; losses; two rows of votes."""
        self._norms = torch.zeros(len(replica.parameters), dtype=torch.float64)
        """Of the reduced gradients of each parameter, in the model's order."""
        size = self._tally.numel() + len(self._norms)
        self._sums = tuple(torch.zeros(size, dtype=torch.float64) for _ in range(2))
        self._trees: dict[int, GradientTree] = {}
        self._stage: Group | None = None
        """The members that have the same blocks."""
        self._layout = Layout((), ())
        self._steady: Passes | None = None
        """An undisturbed step's."""
        self._passes: Passes | None = None
        self._runner: Runner | None = None
        self._armed = False
        self._last: Action | None = None
        """The last action of a step that adds to gradients here."""
        self._has_section = False
        self._fitted: Runs = ()
        """What buckets and trees are for."""
        self._old: dict[int, BlockState] = {}
        """Blocks of the world before, of the same step."""
        self._moved = 0
        """Bytes that this member was sent for the newest world."""
        self._executed: deque[Executed] = deque(maxlen=_EXECUTED_MAX)
        """The newest actions of whole steps of this layout."""

    @property
    def layout(self) -> Layout:
        """Return who has which blocks in the newest world."""
        return self._layout

    # --- one step -----------------------------------------------------------------------------

    def _give_out(self, members: tuple[int, ...]) -> None:
        if self._steady is None:
            self._steady = plan_passes(
                self._layout, self._count, {}, self._find_works(), self._schedule
            )
        self._take_passes(self._steady)

    def _find_works(self) -> list[float]:
        return [sum(self._staged.weights[s.first : s.stop]) for s in self._layout.sections]

    def _take_passes(self, passes: Passes) -> None:
        """Pass what `passes` says; done before is what this member keeps."""
        if passes is not self._passes:
            self._passes, blocks = passes, self._staged.blocks
            parts = [
                StageBlocks(stage, blocks[first:stop], first, recompute=self._recompute)
                for stage, (first, stop) in self._list_stages()
            ]
            assert self._group is not None
            schedule = Schedule(passes.orders, len(self._layout.sections), passes.cells)
            self._runner = Runner(
                schedule, passes.cells.index(self._membership.me), parts, self._group,
                load=self._load, loss=self._loss, seed=self._seed,
                trees=self._trees if self._exact else None, device=self._on,
            )  # fmt: skip
            self._runner.before = self._watch
        self._todo = list(passes.find_todo(self._membership.me, self._done))

    def _list_stages(self) -> list[tuple[int, Section]]:
        """Return the stages of this member, and the blocks of each."""
        place, places = self._layout.find_place(self._membership.me), len(self._layout.copies)
        return [(place + turn * places, run) for turn, run in enumerate(self._staged.runs)]

    def _name_task(self, stage: int, micro_batch: int) -> int:
        return stage // len(self._layout.copies) * self._count + micro_batch

    def _watch(self, action: Action) -> None:
        """Before an action: the last one sends gradients as they come."""
        self._progress.mark_work()
        if action == self._last and not self._exact:
            self._arm()

    def _arm(self) -> None:
        assert self._stage is not None
        self._armed = True
        self._buckets.arm(self._applied, 1.0 / self._count, self._stage.all_reduce)

    def _reduce(self, group: Group) -> None:
        """Compute what is missing, and reduce it over this stage's copies; the counts last."""
        runner, stage = self._runner, self._stage
        assert runner is not None
        assert stage is not None
        todo = set(self._todo)
        adding = [
            a for a in runner.list_adding() if self._name_task(a.stage, a.micro_batch) in todo
        ]
        self._last = adding[-1] if adding else None
        self._armed = False
        others = [
            (stage, m)
            for stage, _ in self._list_stages()
            for m in runner.schedule.micro_batches
            if self._name_task(stage, m) not in todo
        ]
        runner.run(self._applied, self._membership.overtaken, counted=others)
        self._take_done(runner)
        if not others and torch.device(self._on).type == "cpu":  # Others tell no end of an action.
            self._executed.extend(runner.executed)
        if not self._checked:
            self._checked = True
            self._replica.refuse_buffers()
        if self._exact:
            self._reduce_trees(stage)
        else:
            if not self._armed:
                self._arm()
            self._buckets.flush()
        stage.wait()
        self._note_norms(stage)
        self._tally[-2, 0] = float(self._disk.wants(self._applied, group.members))
        self._prove(group)
        self._disk.agreed = bool(self._view_tally()[-2].any())

    def _reduce_trees(self, stage: Group) -> None:
        passes, me = self._passes, self._membership.me
        assert passes is not None
        views = self._buckets.list_views(self._applied)
        for number, run in self._list_stages():
            for block in range(*run):
                out = [views[p] for p in self._staged.trained([block])]
                if out:
                    self._trees[block].reduce(stage, passes.counted[number], me, out)
                    torch._foreach_mul_(out, 1.0 / self._count)

    def _take_done(self, runner: Runner) -> None:
        """Note what the gradients contain."""
        sections = self._layout.sections
        for stage, micro_batch in sorted(runner.done):
            task = self._name_task(stage, micro_batch)
            if task not in self._done:
                self._done.append(task)
                self._tally[slice(*sections[stage]), micro_batch] = 1.0
                if stage + 1 == len(sections):
                    self._tally[-3, micro_batch] = float(runner.losses[micro_batch])

    def _drop_unfinished(self) -> None:
        """The attempt has broken: what was finished of it is kept."""
        if self._runner is not None:
            self._take_done(self._runner)

    def _note_norms(self, stage: Group) -> None:
        """Have the first copy tell the norms of its blocks, so that all know that of all."""
        self._norms.zero_()
        if self._staged.clip_norm and stage.index == 0:
            views = self._buckets.list_views(self._applied)
            for first, stop in self._staged.runs:
                before = len(self._staged.trained(range(first)))
                norms = find_norms([views[p] for p in self._staged.trained(range(first, stop))])
                self._norms[before : before + len(norms)] = norms

    def _send_tally(self, group: Group) -> None:
        total = self._sums[self._applied % 2]
        torch.cat([self._tally.flatten(), self._norms], out=total)
        group.all_reduce(total)

    def _view_tally(self) -> Tensor:
        size = self._tally.numel()
        return self._sums[self._applied % 2][:size].view_as(self._tally)

    def _read_counts(self) -> list[float]:
        counts: list[float] = self._view_tally()[:-3].flatten().tolist()
        return counts

    def _read_losses(self) -> list[float]:
        losses: list[float] = self._view_tally()[-3].tolist()
        return losses

    def _list_norms(self, step: int) -> Tensor:
        return self._sums[step % 2][self._tally.numel() :]

    def _apply(self, group: Group, *, sent: bool = False) -> None:
        self._staged.take_norms(self._list_norms(self._applied))
        super()._apply(group)

    def _forget(self) -> None:
        super()._forget()
        for tree in self._trees.values():
            tree.clear()
        if self._runner is not None:  # Else what breaks at a boundary would keep the step before.
            self._runner.done.clear()

    def _let_go(self) -> None:
        self._old.clear()

    def _tell_parts(self) -> tuple[StageSnapshot, Parts]:
        named = StageSnapshot(self._applied, self._line, self._staged.runs, self._membership.me)
        return named, self._staged.split()[0]

    def _tell_plain(self) -> dict[str, Any]:
        numbers = {"numbers": self._staged.split()[1]}
        return numbers | self._staged.plain() | self._steering.state()

    # --- the world ----------------------------------------------------------------------------

    def _offer(self) -> tuple[str, int]:
        return Trainer._offer(self)

    def _note_followed(self) -> None:
        super()._note_followed()
        self._has_section |= not self._fresh

    def _leave(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.give_up()
        super()._leave()

    def _find_wait(self) -> float:
        stage = self._stage
        return super()._find_wait() or (stage.waits_since_s if stage is not None else 0.0)

    def _abandon(self) -> None:
        stage = self._stage
        if stage is not None:
            stage.abandon()
        super()._abandon()

    def _form(self, members: tuple[int, ...]) -> Any:
        me, store = self._membership.me, self._open_store(members)
        overtaken = self._membership.overtaken
        self._catch_up_last(store, members, StageStanding)
        standings = exchange_standings(store, members, me, self._stand(), overtaken)
        plan = decide_stages(
            self._count, self._staged.sizes, self._choose, standings, self._make_line(),
            self._schedule,
        )  # fmt: skip
        if plan is None:
            raise PlatformError(
                "the last copy of a stage is lost, and no snapshot is whole",
                hint="the world starts again from the newest checkpoint",
            )
        self._device = self._device or make_device()
        self._group = group = Group(members, me, store, self._device, overtaken)
        self._note_connected()
        self._roll_forward(plan.step, plan.holder, plan.forward, group)
        self._take_blocks(plan, group)
        self._steering.share(store, plan.plain.member)
        number = plan.layout.find_place(me)
        copies, prefix = plan.layout.copies[number], open_prefix(f"stage/{number}", store)
        self._stage = Group(copies, me, prefix, self._device, overtaken)
        self._peers.enter(self._make_mirror({m: s.node for m, s in standings.items()}, store))
        self._disk.enter(me == copies[0], number, len(plan.layout.copies))
        self._steady = self._passes = None
        self._take_passes(plan.passes)
        if plan.step == 0:  # Nobody has trained anything yet.
            self._load_checkpoint(group, number, len(plan.layout.copies))
        if plan.fresh and self._every:  # Else somebody may still be reading what it would replace.
            self._take_snapshot(members)  # To go back to, before there is a newer one.
        return plan

    def _describe(self, plan: Any) -> dict[str, Any]:
        shape, morphed = plan.layout.shape, plan.changed
        first, *more = (tuple(run) for run in self._staged.runs)
        held = {"section": first, "more_sections": tuple(more), "micro_batches": self._count}
        moved = {"morphed": morphed, "moved_bytes": self._moved}
        return {"back": plan.back, "shape": shape, **held, **moved}

    def _load_checkpoint(self, group: Group, number: int, count: int) -> None:
        """Take the newest checkpoint's state in the place of the initial one.

        Raises:
            PlatformError: members do not find the same one.
        """
        found, extra = self._disk.find(), dict[str, Any]()
        if group.index == 0:
            group.store.set("checkpoint", str(found))
        wait_for(group.store, ["checkpoint"], self._membership.overtaken)
        chosen = int(group.store.get("checkpoint"))
        if found != chosen:
            raise PlatformError(
                f"rank {self._membership.me} finds the checkpoint of step {found}, and the first "
                f"rank that of step {chosen}",
                hint="all nodes have to see the same checkpoints",
            )
        if self._disk.restore_part(extra):
            self._steering.load(extra)
            self._applied = self._furthest = found
            self._old.clear()
            self._disk.enter(self._layout.copies[number][0] == self._membership.me, number, count)

    def _stand(self) -> StageStanding:
        held = sorted({*self._staged.mine, *self._old})
        return StageStanding(
            node=find_node(),
            applied=FRESH if self._fresh else self._applied,
            line=self._line,
            runs=self._staged.runs if self._has_section else (),
            held=() if self._fresh else tuple(held),
            done=tuple(sorted(self._done)),
            ready=self._ready,
            snapshots=self._peers.list_all(),
            times=self._tell_times(),
        )

    def _tell_times(self) -> tuple[StageTimes, ...]:
        if not self._executed:
            return ()
        cuts = {stage: (*run, self._recompute) for stage, run in self._list_stages()}
        return tuple(collect_times(str(self._membership.me), cuts, self._executed))

    def _take_blocks(self, plan: StageReformation, group: Group) -> None:
        """Have the blocks that the plan gives to this member, at the plan's step."""
        me, replica = self._membership.me, self._staged
        runs = plan.layout.runs[plan.layout.find_place(me)]
        mine = set(list_blocks(runs))
        fresh = plan.fresh or self._fresh
        at_step = not fresh and (self._applied, self._line) == (plan.step, plan.line)
        first = plan.fresh and me == plan.plain.member
        held: dict[int, BlockState] = {}
        if at_step or first:
            held = self._old | {b: replica.state_of(b) for b in replica.mine}
        states, plain = self._bring(plan, group, held)
        states |= {b: s for b, s in self._old.items() if at_step and b in mine}
        if states or not self._has_section or runs != replica.runs:
            self._rebuilt = self._has_section
            self._feed.cut()
            replica.adopt(runs, states, None if at_step or first else plain)
        if not at_step:
            self._begin_at(plan.step, plan.line, plain)
        self._fit(runs)
        self._feed.runs = runs
        if me not in plan.kept:
            self._buckets.drop()
            self._forget()
        self._old = {b: state for b, state in held.items() if b not in mine}
        if plan.layout.sections != self._layout.sections:
            self._executed.clear()
        self._layout, self._fresh, self._has_section = plan.layout, False, True
        self._ready = NO_LINE

    def _fit(self, runs: Runs) -> Buckets:
        """Return the room for the gradients of the blocks of `runs`, its own ones."""
        if runs != self._fitted:
            self._buckets.close()
            self._buckets = Buckets(self._staged.parameters, self._bucket_bytes, sets=1)
            self._trees = {b: GradientTree(self._count) for b in list_blocks(runs)}
            self._fitted = runs
        return self._buckets

    def _bring(
        self, plan: StageReformation, group: Group, held: Mapping[int, BlockState]
    ) -> tuple[dict[int, BlockState], dict[str, Any]]:
        """Return the blocks that this member lacks, and what all have alike if any moves.

        Raises:
            Broken: a member was lost.
        """
        self._moved = 0
        if not plan.moves:
            return {}, {}
        me, overtaken, holder = self._membership.me, self._membership.overtaken, plan.plain
        read, plain_of = self._make_reader(plan, held)
        told = plain_of(holder) if me == holder.member else None
        plain = share_plain(group, me, holder.member, told, overtaken)
        states = move_blocks(group, me, plan.moves, read, overtaken)
        remote = {m.block for m in plan.moves if m.to == me != m.holders[0].member}
        self._moved = sum(count_bytes(states[block]) for block in remote)
        return states, plain

    def _make_reader(
        self, plan: StageReformation, held: Mapping[int, BlockState]
    ) -> tuple[Callable[[Holder, int], BlockState], Callable[[Holder], Any]]:
        """Return what gives a block of this member's, and what all members have alike."""
        there = self._peers.list_all()

        @functools.cache
        def open_one(one: StageSnapshot) -> tuple[Parts, Any]:
            try:
                return self._peers.read(one)
            except ProtocolError as error:
                raise Broken(error.message) from None

        def open_snapshot(owner: int, block: int | None = None) -> tuple[Parts, Any]:
            """A member may have two of one step: of its blocks before a change, and after it."""
            wanted = (plan.step, plan.line, owner)
            for one in there:
                if (one.step, one.line, one.owner) == wanted and (
                    block is None or block in list_blocks(one.runs)
                ):
                    return open_one(one)
            raise Broken(f"the snapshot of step {plan.step} by rank {owner} is gone")

        def read(holder: Holder, block: int) -> BlockState:
            if holder.owner < 0:
                return held[block]
            parts, plain = open_snapshot(holder.owner, block)
            return join_block(block, parts, plain["numbers"])

        def plain_of(holder: Holder) -> Any:
            return self._tell_plain() if holder.owner < 0 else open_snapshot(holder.owner)[1]

        return read, plain_of
