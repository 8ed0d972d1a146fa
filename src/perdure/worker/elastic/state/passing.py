"""A staged member's part of a step: the micro-batches that pass through its blocks.

What was finished of a micro-batch in all of a member's blocks is kept while it has them. One that
another stage has lost passes through here once more, and its gradients are not taken again.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perdure.model.planning.pipeline import Action, Executed
from perdure.plan.elastic.stage_commit import StageReformation
from perdure.plan.elastic.stage_orders import Passes, StageSchedule, plan_passes
from perdure.plan.elastic.stages import Layout, Runs, Section
from perdure.plan.worlds.measures import StageTimes, collect_times
from perdure.worker.elastic.gradients import Buckets, GradientTree, Tally, Work
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.state.blocks import StagedReplica, compute_norms
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
        more = len(replica.parameters)  # Norms of reduced gradients, in the model's order.
        tally = Tally(len(replica.blocks), count, votes=2, more=more)
        super().__init__(Buckets((), bucket_bytes, sets=1), tally, {})
        self.layout = Layout((), ())
        """Who has which blocks in the newest world."""
        self._replica, self._load, self._loss = replica, load, loss
        self._count, self._seed, self._exact = count, seed, exact
        self._bucket_bytes, self._recompute = bucket_bytes, recompute
        self._schedule, self._device = schedule, device
        self._fitted: Runs = ()
        """What buckets and trees are for."""
        self._world: Group
        self._stage: Group
        """The members that have the same blocks."""
        self._steady: Passes | None = None
        """An undisturbed step's."""
        self._passes: Passes | None = None
        self._runner: Runner | None = None
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
            self.buckets = Buckets(self._replica.parameters, self._bucket_bytes, sets=1)
            self._trees = {b: GradientTree(self._count) for b in self._replica.mine}
            self._fitted = self._replica.runs

    def enter(self, plan: StageReformation, world: Group, stage: Group) -> None:
        """Pass what is missing of the step under way through the copies of `stage`."""
        self._world, self._stage = world, stage
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
        parts = [
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
        self._replica.guard.check()
        if self._exact:
            self._reduce_trees(step)
        else:
            if not self._armed:
                self._arm()
            self.buckets.flush()
        self._stage.wait()
        self._note_norms(step)

    def _reduce_trees(self, step: int) -> None:
        assert self._passes is not None
        views, me = self.buckets.list_views(step), self._world.me
        for number, run in self._list_stages():
            for block in range(*run):
                out = [views[p] for p in self._replica.trained([block])]
                if out:
                    self._trees[block].reduce(self._stage, self._passes.counted[number], me, out)
                    torch._foreach_mul_(out, 1.0 / self._count)

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
            for first, stop in replica.runs:
                before = len(replica.trained(range(first)))
                found = compute_norms([views[p] for p in replica.trained(range(first, stop))])
                norms[before : before + len(found)] = found

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
