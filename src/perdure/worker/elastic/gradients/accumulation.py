"""A rank's micro-batches of a step, each computed as a whole: forward, backward, and into `p.grad`.

What was finished is kept whatever breaks, and what is missing is computed in the next attempt.
Members that gather parameters from each other run as many micro-batches side by side: who has
fewer runs one that does not count.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from perdure.plan.elastic.microbatches import assign
from perdure.worker.data import derive_seed, seed_all
from perdure.worker.elastic.gradients.buckets import Buckets
from perdure.worker.elastic.gradients.tally import Tally
from perdure.worker.elastic.gradients.tree import GradientTree
from perdure.worker.elastic.group import Broken, Group

Compute = Callable[[int, int], Tensor]
"""(step, micro-batch) -> the loss"""


class Accumulation:
    """One rank's part of the step under way."""

    def __init__(
        self,
        compute: Compute,
        backward: Callable[[Tensor, bool], object],
        buckets: Buckets,
        *,
        count: int,
        seed: int,
        exact: bool,
        whole: bool,
    ) -> None:
        """Have `backward(loss, counts)` accumulate what `compute` returned, and fill `buckets`.

        Where everyone has the `whole` state, this rank's numbers are sent before its gradients.
        """
        self.buckets = buckets
        self.tally = Tally(1, count, riders=buckets.riders) if whole else Tally(1, count, votes=2)
        self._compute, self._backward = compute, backward
        self._count, self._seed, self._counts_first = count, seed, whole
        self._tree = GradientTree(count) if exact else None
        self._me, self._beside = -1, tuple[int, ...]()
        self.done: list[int] = []
        self._todo: list[int] = []
        self._owner: dict[int, int] = {}
        self._rounds = 0
        """Micro-batches of this step that this rank still runs beside others."""

    def enter(
        self,
        todo: Mapping[int, Sequence[int]],
        kept: Mapping[int, int],
        me: int,
        beside: tuple[int, ...],
    ) -> None:
        """Compute what is missing as `todo` says, by member; `kept` are who has done the rest.

        `beside` are the members that run side by side with this one.
        """
        self._me, self._beside = me, beside
        self._take(todo, kept)

    def give_out(self, members: tuple[int, ...]) -> None:
        """Compute neighbouring micro-batches, as many as the others."""
        self._take(assign(self._count, members), {})

    def _take(self, todo: Mapping[int, Sequence[int]], kept: Mapping[int, int]) -> None:
        self._todo = list(todo[self._me])
        self._rounds = max(len(todo[member]) for member in self._beside)
        self._owner = {**kept, **{m: rank for rank, mine in todo.items() for m in mine}}

    def reduce(self, step: int, group: Group, note_work: Callable[[], object]) -> None:
        """Compute what is missing, and reduce: afterwards the step's buffers have its sum.

        Raises:
            Broken: the world has changed; what was finished is kept.
        """
        armed = False
        while self._rounds:
            if group.overtaken():
                raise Broken("a new world was ordered")
            armed = self._rounds == 1 and self._tree is None
            self._run(step, group, last=armed)
            if self._todo:
                self.done.append(self._todo.pop(0))
            self._rounds -= 1
            note_work()
        if not armed:
            self._begin_reducing(step, group)
        if self._tree is not None:
            flats = self.buckets.flats(step)
            self._tree.reduce(group, self._owner, group.me, flats)
            for flat in flats:
                flat.mul_(1.0 / self._count)
        self.buckets.flush()
        group.wait()

    def _run(self, step: int, group: Group, *, last: bool) -> None:
        """Run one micro-batch, or one that only keeps the others company.

        With the `last`, buckets leave as they fill.
        """
        counts = bool(self._todo)
        micro_batch = self._todo[0] if counts else 0
        if last and not counts:
            self._begin_reducing(step, group)
            self.buckets.flush()
        seed_all(derive_seed(self._seed, "micro-batch", step, micro_batch))
        loss = self._compute(step, micro_batch)
        if counts:
            self.tally.mine.counts[0, micro_batch] = 1.0
            self.tally.mine.losses[micro_batch] = loss.detach().item()
            if last:
                self._begin_reducing(step, group)
        self._backward(loss, counts)
        if counts and self._tree is not None:
            flats = [flat.clone() for flat in self.buckets.copy(step, 1.0)]
            self._tree.add((0, micro_batch), flats)
            self.buckets.drop()

    def _begin_reducing(self, step: int, group: Group) -> None:
        if self._counts_first:
            self.tally.send(step, group)
        if self._tree is None:
            self.buckets.arm(step, 1.0 / self._count, group.all_reduce)

    def drop_unfinished(self) -> None:
        """Forget a micro-batch whose backward pass has not begun: it was not done."""
        self.buckets.disarm()
        for micro_batch in range(self._count):
            if micro_batch not in self.done:
                self.tally.mine.counts[0, micro_batch] = 0.0
                self.tally.mine.losses[micro_batch] = 0.0

    def clear(self) -> None:
        """Begin a step of which nothing is done."""
        self.buckets.drop()
        self.done.clear()
        self.tally.clear()
        if self._tree is not None:
            self._tree.clear()
