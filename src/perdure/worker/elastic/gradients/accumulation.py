"""A rank's micro-batches of a step, each computed as a whole: forward, backward, and into `p.grad`.

What was finished is kept whatever breaks, and what is missing is computed in the next attempt.
Members that gather parameters from each other run as many micro-batches side by side: who has
fewer runs one that does not count.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

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
        tally: Tally,
        *,
        count: int,
        seed: int,
        exact: bool,
        counts_first: bool,
    ) -> None:
        """Have `backward(loss, counts)` accumulate what `compute` returned.

        With `counts_first`, this rank's numbers are sent before its gradients.
        """
        self._compute, self._backward = compute, backward
        self._buckets, self._tally = buckets, tally
        self._count, self._seed, self._counts_first = count, seed, counts_first
        self._tree = GradientTree(count) if exact else None
        self.done: list[int] = []
        self._todo: list[int] = []
        self._owner: dict[int, int] = {}
        self._rounds = 0
        """Micro-batches of this step that this rank still runs beside others."""

    def give_out(
        self,
        todo: Mapping[int, Sequence[int]],
        me: int,
        beside: Sequence[int],
        kept: Mapping[int, int] | None = None,
    ) -> None:
        """Compute what is missing as `todo` says, by member; `kept` are who has done the rest.

        `beside` are the members that run side by side with this one.
        """
        self._todo = list(todo[me])
        self._rounds = max(len(todo[member]) for member in beside)
        self._owner = {**(kept or {}), **{m: rank for rank, mine in todo.items() for m in mine}}

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
            flats = self._buckets.flats(step)
            self._tree.reduce(group, self._owner, group.me, flats)
            for flat in flats:
                flat.mul_(1.0 / self._count)
        self._buckets.flush()
        group.wait()

    def _run(self, step: int, group: Group, *, last: bool) -> None:
        """Run one micro-batch, or one that only keeps the others company.

        With the `last`, buckets leave as they fill.
        """
        counts = bool(self._todo)
        micro_batch = self._todo[0] if counts else 0
        if last and not counts:
            self._begin_reducing(step, group)
            self._buckets.flush()
        seed_all(derive_seed(self._seed, "micro-batch", step, micro_batch))
        loss = self._compute(step, micro_batch)
        if counts:
            self._tally.mine.counts[0, micro_batch] = 1.0
            self._tally.mine.losses[micro_batch] = loss.detach().item()
            if last:
                self._begin_reducing(step, group)
        self._backward(loss, counts)
        if counts and self._tree is not None:
            flats = [flat.clone() for flat in self._buckets.copy(step, 1.0)]
            self._tree.add((0, micro_batch), flats)
            self._buckets.drop()

    def _begin_reducing(self, step: int, group: Group) -> None:
        if self._counts_first:
            self._tally.send(step, group)
        if self._tree is None:
            self._buckets.arm(step, 1.0 / self._count, group.all_reduce)

    def drop_unfinished(self) -> None:
        """Forget a micro-batch whose backward pass has not begun: it was not done."""
        self._buckets.disarm()
        for micro_batch in range(self._count):
            if micro_batch not in self.done:
                self._tally.mine.counts[0, micro_batch] = 0.0
                self._tally.mine.losses[micro_batch] = 0.0

    def clear(self) -> None:
        """Begin a step of which nothing is done."""
        self.done.clear()
        self._tally.clear()
        if self._tree is not None:
            self._tree.clear()
