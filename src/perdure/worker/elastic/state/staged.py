"""The staged state: each member has some blocks of the model, which is cut into pipeline stages.

What differs from a replicated one:

- A member has some blocks, and does their part of the micro-batches that pass through it; gradients
  are reduced over the members that have the same blocks. These are a stage, or interleaved several.
- Micro-batches of a lost member pass through the other copies of its stage. Where there is none,
  or another cut is much better, blocks move, and only those that somebody lacks.
- A micro-batch that one stage has finished and another has lost passes through both once more;
  the former then computes only what the latter needs of it.
- A newcomer chooses its stage as all will choose it when it has come: where the layout stays what
  it is, and only then. Of several that come at once each counts those in who were told before it,
  so that they have different stages; once they are members, what they have is theirs. It follows
  its stage's copies, and is given with each step's gradients the norms of all parameters, by which
  the members clip them.

The micro-batches that pass through a member's blocks are its part of a step (`Passing`). What was
finished of one in all of its blocks is kept while it has them. One that another stage has lost
passes through here once more, and its gradients are not taken again.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.model.planning.pipeline import Action, Executed
from perdure.plan.elastic.commit import FRESH, NO_LINE
from perdure.plan.elastic.stage_commit import (
    Holder,
    StageProgress,
    StageReformation,
    StageSnapshot,
    decide_stages,
)
from perdure.plan.elastic.stage_orders import Passes, StageSchedule, plan_passes
from perdure.plan.elastic.stages import Choose, Layout, Runs, Section, list_blocks, remaining_layout
from perdure.plan.worlds.measures import StageTimes, collect_times
from perdure.worker.elastic.comparing import NAMED, hash_attributes
from perdure.worker.elastic.gradients import (
    BUCKET_BYTES,
    Apart,
    Buckets,
    GradientTree,
    Tally,
    Work,
)
from perdure.worker.elastic.group import Broken, Group
from perdure.worker.elastic.membership import read_node_name
from perdure.worker.elastic.moving import collect_tensors, map_tensors, move_blocks, share_plain
from perdure.worker.elastic.snapshots import Snapshots
from perdure.worker.elastic.state import At, Followed, Lost, PartState, Source, Taken
from perdure.worker.elastic.state.blocks import (
    BlockState,
    StagedReplica,
    StageRegistry,
    compute_norms,
)
from perdure.worker.elastic.state.replicated import OWN
from perdure.worker.pipeline import Runner, Schedule, StageBlocks

_EXECUTED_MAX = 64


class Passing(Work):
    """The passes of one member's blocks in a world, and the gradients that they leave."""

    def __init__(
        self,
        replica: StagedReplica,
        load: Callable[[int, int], Any],
        loss: Callable[[Any, Any], Tensor],
        *,
        count: int,
        seed: int,
        exact: bool,
        bucket_bytes: int,
        recompute: bool,
        schedule: StageSchedule,
        device: str | torch.device,
    ) -> None:
        """Have no blocks yet, and nothing to do."""
        more = len(replica.places)  # Norms of reduced gradients, in the model's order.
        tally = Tally(len(replica.blocks), count, more=more)
        super().__init__(Buckets((), bucket_bytes, sets=1), tally, {}, seed)
        self.layout = Layout((), ())
        """Who has which blocks in the newest world."""
        self._replica, self._load, self._loss = replica, load, loss
        self._count, self._exact = count, exact
        self._bucket_bytes, self._recompute = bucket_bytes, recompute
        self._schedule, self._device = schedule, device
        self._fitted: Runs = ()
        """What buckets and trees are for."""
        self._world: Group
        self._stage: Group
        """The members that have the same blocks."""
        self._ties: dict[Apart, Group] = {}
        """Blocks that share parameters -> the members that have one of them, this among them."""
        self._steady: Passes | None = None
        """An undisturbed step's."""
        self._passes: Passes | None = None
        self._runner: Runner | None = None
        self._parts: list[StageBlocks] = []
        self._todo: set[int] = set()
        self._note_work: Callable[[], object] = lambda: None
        self._armed = False
        self._step = 0
        self._last: Action | None = None
        """The last action of a step that adds to gradients here."""
        self._executed: deque[Executed] = deque(maxlen=_EXECUTED_MAX)
        """The newest actions of whole steps of this layout."""

    def fit(self, layout: Layout | None = None) -> None:
        """Have room for the gradients of this member's blocks, its own ones."""
        if layout is not None:
            if layout.sections != self.layout.sections:
                self._executed.clear()
            self.layout = layout
        if self._replica.runs != self._fitted:
            self.buckets.close()
            replica = self._replica
            self.buckets = Buckets(
                replica.parameters, self._bucket_bytes, sets=1, apart=replica.shared,
                names=replica.names,
            )  # fmt: skip
            self._trees = {b: GradientTree(self._count) for b in self._replica.mine}
            self._fitted = self._replica.runs

    def enter(
        self, plan: StageReformation, world: Group, stage: Group, ties: dict[Apart, Group]
    ) -> None:
        """Pass what is missing of the step under way through the copies of `stage`.

        `ties` are the members among whom blocks share parameters.
        """
        self._world, self._stage, self._ties = world, stage, ties
        self._steady = self._passes = None
        self._take(plan.passes, plan.todo[world.me])

    def give_out(self, members: tuple[int, ...]) -> None:
        """Pass what an undisturbed step passes."""
        if self._steady is None:
            weights = self._replica.weights
            works = [sum(weights[first:stop]) for first, stop in self.layout.sections]
            self._steady = plan_passes(self.layout, self._count, {}, works, self._schedule)
        self._take(self._steady, self._steady.list_todo(self._world.me, ()))

    def _take(self, passes: Passes, todo: tuple[int, ...]) -> None:
        self._todo = set(todo)
        if passes is self._passes:
            return
        self._passes, blocks = passes, self._replica.blocks
        self._parts = parts = [
            StageBlocks(stage, blocks[first:stop], first, recompute=self._recompute)
            for stage, (first, stop) in self._list_stages()
        ]
        self._runner = Runner(
            Schedule(passes.orders, len(self.layout.sections), passes.cells),
            passes.cells.index(self._world.me),
            parts,
            self._world,
            load=self._load,
            loss=self._loss,
            seed=self._seed,
            trees=self._trees if self._exact else None,
            device=self._device,
        )
        self._runner.before = self._watch

    def has_passed(self) -> bool:
        """Return whether all of this member's blocks have passed something in this step."""
        return all(part.taken for part in self._parts)

    def recompute(self) -> list[Any]:
        """Return what the blocks make of what each stage took last, once more."""
        return [part.forward_again() for part in self._parts]

    def clear(self) -> None:
        """Begin a step of which nothing is done."""
        super().clear()
        for part in self._parts:
            part.taken = None

    def _list_stages(self) -> list[tuple[int, Section]]:
        """Return the stages of this member, and the blocks of each."""
        place, places = self.layout.place_of(self._world.me), len(self.layout.copies)
        return [(place + turn * places, run) for turn, run in enumerate(self._replica.runs)]

    def _name_task(self, stage: int, micro_batch: int) -> int:
        return stage // len(self.layout.copies) * self._count + micro_batch

    def _watch(self, action: Action) -> None:
        """Before an action: the last one sends gradients as they come."""
        self._note_work()
        if action == self._last and not self._exact:
            self._arm()

    def _arm(self) -> None:
        self._armed = True
        self.buckets.arm(self._step, 1.0 / self._count, self._stage.all_reduce)

    def reduce(self, step: int, group: Group, note_work: Callable[[], object]) -> None:
        """Compute what is missing, and reduce it over this stage's copies.

        Raises:
            Broken: the world has changed; what was finished is kept.
        """
        runner = self._runner
        assert runner is not None
        self._step, self._note_work = step, note_work
        adding = [
            a for a in runner.list_adding() if self._name_task(a.stage, a.micro_batch) in self._todo
        ]
        self._last = adding[-1] if adding else None
        self._armed = False
        others = [
            (stage, m)
            for stage, _ in self._list_stages()
            for m in runner.schedule.micro_batches
            if self._name_task(stage, m) not in self._todo
        ]
        runner.run(step, group.overtaken, counted=others)
        self._take_done(runner)
        if not others and torch.device(self._device).type == "cpu":  # Others tell no end of it.
            self._executed.extend(runner.executed)
        if self._exact:
            self._reduce_trees(step)
        else:
            if not self._armed:
                self._arm()
            self.buckets.flush()
        self._stage.wait()
        if not self._exact:
            self._reduce_shared(step)
        self._note_norms(step)

    def _reduce_shared(self, step: int) -> None:
        """Sum the gradients of what blocks share over all members that have one of these.

        It is done once all else is: where one member has several of the blocks, its sum is whole
        only then. The groups come in one order, so that no two members wait for each other.
        """
        for blocks, group in self._ties.items():
            for flat in self.buckets.copy_apart(step, 1.0 / self._count, blocks):
                group.all_reduce(flat)
            group.wait()

    def _reduce_trees(self, step: int) -> None:
        """Sum along the trees; what blocks share is the sum of theirs, in the blocks' order."""
        assert self._passes is not None
        views, me = self.buckets.list_views(step), self._world.me
        parts: dict[Tensor, dict[int, Tensor]] = {p: {} for p in self._replica.shared}
        used: dict[Tensor, float] = {}
        for number, run in self._list_stages():
            for block in range(*run):
                trained = self._replica.trained([block])
                for p in trained:
                    if p in parts:
                        parts[p][block] = torch.empty_like(p)
                out = [parts[p][block] if p in parts else views[p] for p in trained]
                if out:
                    counts = torch.zeros(len(out), device=out[0].device)
                    owner = self._passes.counted[number]
                    self._trees[block].reduce(self._stage, owner, me, [*out, counts])
                    found = zip(trained, counts.tolist(), strict=True)
                    used |= {p: count for p, count in found if p not in parts}
        for blocks, group in self._ties.items():
            for p, having in self._replica.shared.items():
                if having == blocks and p.requires_grad:
                    self._share_parts(views[p], parts[p], blocks, group)
        self.buckets.set_used(step, used)
        if views:
            torch._foreach_mul_(list(views.values()), 1.0 / self._count)

    def _share_parts(
        self, out: Tensor, mine: Mapping[int, Tensor], blocks: Apart, group: Group
    ) -> None:
        """Sum the gradients that a parameter has in each of `blocks`; `mine` are those of here."""
        found = [mine[block] if block in mine else torch.empty_like(out) for block in blocks]
        for block, part in zip(blocks, found, strict=True):
            group.broadcast(part, self.layout.copies[self.layout.place_of_block(block)][0])
        group.wait()
        out.copy_(found[0])
        for part in found[1:]:
            out.add_(part)

    def _take_done(self, runner: Runner) -> None:
        """Note what the gradients contain."""
        sections = self.layout.sections
        for stage, micro_batch in sorted(runner.done):
            self.done.append(self._name_task(stage, micro_batch))
            self.tally.mine.counts[slice(*sections[stage]), micro_batch] = 1.0
            if stage + 1 == len(sections):
                self.tally.mine.losses[micro_batch] = float(runner.losses[micro_batch])
        runner.done.clear()

    def _note_norms(self, step: int) -> None:
        """Have the first copy tell the norms of its blocks, so that all know that of all."""
        norms, replica = self.tally.mine.more, self._replica
        norms.zero_()
        if replica.clip_norm and self._stage.index == 0:
            views = self.buckets.list_views(step)
            mine = [p for p in replica.parameters if self._is_told_here(p)]
            places = torch.tensor([replica.places[p] for p in mine], dtype=torch.int64)
            norms[places] = compute_norms([views[p] for p in mine]).to(norms.device)

    def _is_told_here(self, parameter: Tensor) -> bool:
        """Return whether its norm is this stage's to tell: of several, the first block's."""
        blocks = self._replica.shared.get(parameter)
        return blocks is None or blocks[0] in self._replica.mine

    def drop_unfinished(self) -> None:
        """Keep what was finished."""
        self.buckets.disarm()
        if self._runner is not None:
            self._take_done(self._runner)

    def tell_times(self) -> tuple[StageTimes, ...]:
        """Return how long the newest micro-batches took here."""
        if not self._executed:
            return ()
        cuts = {stage: (*run, self._recompute) for stage, run in self._list_stages()}
        return tuple(collect_times(str(self._world.me), cuts, self._executed))


class StagedState(PartState, Followed):
    """One member's blocks; every micro-batch of every step passes through all stages, once."""

    work: Passing
    part_name = "stage"

    def __init__(
        self,
        replica: StagedReplica,
        load: Callable[[int, int], Any],
        loss: Callable[[Any, Any], Tensor],
        *,
        me: int,
        count: int,
        seed: int,
        exact: bool,
        choose: Choose,
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
        self.replica = replica
        self.node = read_node_name()
        super().__init__(Snapshots(memory, me, StageSnapshot, every=snapshot_every))
        self.work = Passing(
            replica,
            load,
            loss,
            count=count,
            seed=seed,
            exact=exact,
            bucket_bytes=bucket_bytes,
            recompute=recompute,
            schedule=schedule,
            device=device,
        )
        self._me, self._count, self._choose, self._schedule = me, count, choose, schedule
        self._has_section = False
        self._moved = 0
        """Bytes that this member was sent for the newest world."""

    def update(self, source: Source) -> None:
        """Apply the gradients of its blocks, clipped by the norms of all."""
        norms = self.work.tally.read(self.applied).more
        self.replica.norm = float(torch.linalg.vector_norm(norms.to(torch.float32)))
        super().update(source)

    def check_passes(self) -> None:
        """Pass this member's blocks again, on the input that they took last."""
        if self.work.has_passed():
            self.replica.guard.check(self.work.recompute)

    # --- the world ----------------------------------------------------------------------------

    def stand(self) -> StageProgress:
        """Return what this member holds."""
        fresh = self.applied == FRESH
        return StageProgress(
            node=self.node,
            applied=self.applied,
            line=self.line,
            runs=self.replica.runs if self._has_section else (),
            held=() if fresh else tuple(sorted({*self.replica.mine, *self._old})),
            done=tuple(sorted(self.work.done)),
            ready=self.ready,
            snapshots=self.snapshots.list_all(),
            times=self.work.tell_times(),
        )

    def make_plan(
        self, progress: Mapping[int, StageProgress], line: int
    ) -> StageReformation | None:
        """Return from which step on, how the model is cut, and who has which blocks."""
        return decide_stages(
            self._count, self.replica.sizes, self._choose, progress, line, self._schedule
        )

    def take(self, plan: StageReformation, group: Group, settings: dict[str, Any]) -> Taken:
        """Have the blocks that the plan gives to this member, at the plan's step."""
        me, replica = self._me, self.replica
        runs = plan.layout.runs[plan.layout.place_of(me)]
        mine = set(list_blocks(runs))
        at_step = (self.applied, self.line) == (plan.step, plan.line)
        first = plan.fresh and me == plan.plain.member
        held: dict[int, BlockState] = {}
        if at_step or first:
            held = self._old | {b: replica.state_of(b) for b in replica.mine}
        states, plain = self._bring(plan, group, held, settings)
        states |= {b: state for b, state in self._old.items() if at_step and b in mine}
        changed = bool(states) or not self._has_section or runs != replica.runs
        if changed:
            self._rebuilt = self._has_section
            replica.adopt(runs, states, None if at_step or first else plain)
        self.applied, self.line, self.ready = plan.step, plan.line, NO_LINE
        self.work.fit(plan.layout)
        if me not in plan.kept or not at_step:
            self.work.clear()
        self._old = {b: state for b, state in held.items() if b not in mine}
        self._has_section = True
        return Taken(None if at_step else plain, changed or not at_step)

    def _bring(
        self,
        plan: StageReformation,
        group: Group,
        held: Mapping[int, BlockState],
        settings: dict[str, Any],
    ) -> tuple[dict[int, BlockState], dict[str, Any]]:
        """Return the blocks that this member lacks, and what all have alike if any moves.

        Raises:
            Broken: a member was lost.
        """
        self._moved = 0
        if not plan.moves:
            return {}, {}
        me, teller = self._me, plan.plain
        there = self.snapshots.list_all()
        read_snapshot = self.snapshots.make_reader()

        def open_one(owner: int, block: int | None = None) -> Any:
            """A member may have two of one step: of its blocks before a change, and after it."""
            wanted = (plan.step, plan.line, owner)
            for one in there:
                if (one.step, one.line, one.owner) == wanted and (
                    block is None or block in list_blocks(one.runs)
                ):
                    return read_snapshot(one)
            raise Broken(f"the snapshot of step {plan.step} by rank {owner} is gone")

        def read(holder: Holder, block: int) -> BlockState:
            if holder.owner < 0:
                return held[block]
            state: BlockState = map_tensors(
                open_one(holder.owner, block)["blocks"][block], Tensor.clone
            )
            return state

        def tell() -> Any:
            plain = self.replica.plain() | settings
            return plain if teller.owner < 0 else open_one(teller.owner)["plain"]

        plain = share_plain(group, teller.member, tell)
        states = move_blocks(group, plan.moves, read)
        remote = {m.block for m in plan.moves if m.to == me != m.holders[0].member}
        self._moved = sum(t.nbytes for block in remote for t in collect_tensors(states[block]))
        return states, plain

    def enter(
        self,
        plan: StageReformation,
        group: Group,
        progress: Mapping[int, StageProgress],
        line: int,
    ) -> None:
        """Be a copy of a stage, and pass what the plan says."""
        layout, number = plan.layout, plan.layout.place_of(self._me)
        stage = group.open(Group, f"stage/{number}", layout.copies[number])
        self.groups = (stage,)
        opened: dict[tuple[int, ...], Group] = {(number,): stage}
        ties: dict[Apart, Group] = {}
        trained = {b for p, b in self.replica.shared.items() if p.requires_grad}
        for blocks in sorted(trained):
            places = tuple(sorted({layout.place_of_block(block) for block in blocks}))
            if number in places:
                ties[blocks] = opened.get(places) or self._open_tie(group, layout, places)
                opened[places] = ties[blocks]
        self.work.enter(plan, group, stage, ties)

    def _open_tie(self, group: Group, layout: Layout, places: tuple[int, ...]) -> Group:
        """Return the group of the members of several places.

        All open theirs in one order.

        Raises:
            Broken: a member was lost.
        """
        members = tuple(sorted(m for place in places for m in layout.copies[place]))
        tie = group.open(Group, "tie/" + "-".join(map(str, places)), members)
        self.groups = (*self.groups, tie)
        return tie

    def describe(self, plan: StageReformation) -> dict[str, Any]:
        """Return how the model is cut, what this member has of it, and what moved."""
        first, *more = (tuple(run) for run in self.replica.runs)
        held = {"section": first, "more_sections": tuple(more), "micro_batches": self._count}
        moved = {"morphed": plan.changed, "moved_bytes": self._moved}
        return {**super().describe(plan), "shape": plan.layout.shape, **held, **moved}

    def list_units(self) -> dict[str, Any]:
        """Return each block, what all members of a stage have alike, and what may differ."""
        replica = self.replica
        runs = " ".join(f"{first}-{stop}" for first, stop in replica.runs)
        blocks = {f"block {b}": {"block": {b: replica.state_of(b)}} for b in replica.mine}
        plain = replica.plain(OWN)
        attributes = plain.pop("attributes").items()
        named = {
            f"{NAMED} of block {b}": hash_attributes(
                {p: v for p, v in attributes if f"{p}.".startswith(f"model.{b}.")}
            )
            for b in replica.mine
        }
        return {**blocks, f"settings of blocks {runs}": {"settings": plain}, **named}

    # --- what outlives a loss -----------------------------------------------------------------

    def part(self, group: Group) -> tuple[bool, int, int]:
        """Return that the first copy of each stage saves it."""
        layout = self.work.layout
        number = layout.place_of(self._me)
        return self._me == layout.copies[number][0], number, len(layout.copies)

    def list_saved(self) -> dict[str, Any]:
        """Return the optimizer, whose steps wait for what is copied; the registry has the rest."""
        return {"optimizer": self.replica.optimizer}

    def make_registry(self, number: int, count: int) -> StageRegistry:
        """Return what saves this member's blocks by their names."""
        return StageRegistry(self.replica, number, count)

    def snapshot(self, settings: dict[str, Any]) -> tuple[StageSnapshot, Any]:
        """Return the blocks, and what all members have alike."""
        replica = self.replica
        named = StageSnapshot(self.applied, self.line, replica.runs, self._me)
        return named, replica.state() | {"plain": replica.plain() | settings}

    # --- what a newcomer follows --------------------------------------------------------------

    @property
    def runs(self) -> Runs:
        """Return this member's blocks."""
        return self.replica.runs

    def choose_donors(self, answers: Mapping[int, At], ahead: Sequence[int]) -> tuple[int, ...]:
        """Return the copies of the stage that this rank is to have.

        Raises:
            Lost: the members will have other blocks when it has come.
        """
        blocks = len(self.replica.blocks)
        runs = {m: tuple(Section(*run) for run in at.runs) for m, at in answers.items()}
        nodes = {member: answers[member].node for member in sorted(answers)}
        nodes |= dict.fromkeys([*ahead, self._me], self.node)
        rest = remaining_layout(blocks, answers, runs)
        choice = self._choose(list(nodes), nodes, rest, ())
        if rest is None or choice.stays is None:
            raise Lost(f"blocks move when it comes: {choice.reason}")
        return rest.copies[choice.stays.place_of(self._me)]

    def become(self, state: Any, step: int, line: int) -> None:
        """Become one more copy of the donors' stage."""
        self.replica.adopt(
            tuple(Section(*run) for run in state["runs"]), state["blocks"], state["plain"]
        )
        self.replica.guard.harmless |= set(state["harmless"])
        self.work.fit()
        self.applied, self.line, self._has_section = step, line, True

    def list_sent(self) -> list[Tensor]:
        """Return the stage's gradients, and the norms of all parameters' gradients."""
        return [*self.work.buckets.flats(self.applied), self.work.tally.read(self.applied).more]
