"""Gradients of a step: copied, reduced, added in one order.

*Tree* (`exact=True`): gradients are added in one order, whatever the world was. Each micro-batch's
gradient is a leaf of a binary tree over the micro-batches' numbers; two siblings are added as soon
as one rank has both, which gives the same sum wherever that is. What no single rank could add is
sent to all, who add it alike. The cost: gradients of micro-batches are kept apart (at most one set
for each level and gap), every member's nodes are sent to every other (W sets of gradients instead
of two), and nothing of it overlaps with backward.

*Tally*: the numbers that members sum once a step: what each has done, losses, votes, and norms.
They prove that every micro-batch is in the step once. Where everyone has the whole state they ride
with the first bucket of gradients; elsewhere they are reduced last, and then prove as well that
each member has the reduced gradients of its part.

*Buckets*: gradients are copied into them, and reduced as copies while backward still runs. What a
rank has accumulated in `p.grad` is never handed to a collective: a peer that dies in the middle of
an all-reduce leaves partial sums in whatever was being reduced, and these lie in the copies, which
are simply made again. The reduced result stays in one of two sets of buffers until the next step is
reduced, which is what the commit rule asks for.

*Accumulation*: a rank's micro-batches of a step, each computed as a whole: forward, backward, and
into `p.grad`. What was finished is kept whatever breaks, and what is missing is computed in the
next attempt. Members that gather parameters from each other run as many micro-batches side by side:
who has fewer runs one that does not count.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perdure.model.errors import ConfigError
from perdure.plan.elastic.microbatches import (
    Node,
    assign,
    cover,
    leaves_of,
    parent_of,
    root_of,
    sibling_of,
)
from perdure.plan.worlds.score import BUCKET_BYTES as BUCKET_BYTES
from perdure.worker.checkpoint.registry import is_dense
from perdure.worker.data import derive_seed, seed_all
from perdure.worker.elastic.group import Broken, Group

Sum = list[Tensor]
"""One tensor a bucket."""


class GradientTree:
    """What one rank holds of a step's gradients."""

    def __init__(self, count: int) -> None:
        """Hold nothing of `count` micro-batches."""
        self._count = count
        self._sums: dict[Node, Sum] = {}

    def add(self, node: Node, value: Sum) -> None:
        """Take a node's sum, which is this tree's to alter, and add it up as far as it goes."""
        root = root_of(self._count)
        while node != root:
            sibling = sibling_of(node, self._count)
            if sibling is not None:
                other = self._sums.pop(sibling, None)
                if other is None:
                    break
                for mine, its in zip(value, other, strict=True):
                    mine.add_(its)
            node = parent_of(node)
        self._sums[node] = value

    def reduce(self, group: Any, owner: Mapping[int, int], me: int, out: Sequence[Tensor]) -> None:
        """Sum the gradients of all members into `out`; `owner` says who holds a micro-batch.

        What this rank holds stays as it is, so that a broken attempt can be made again.

        Raises:
            Broken: a member was lost.
        """
        total = GradientTree(self._count)
        for node, rank in plan_sends(owner, self._count):
            held = self._sums.get(node, out)
            value = [t.clone() if rank == me else torch.empty_like(t) for t in held]
            for tensor in value:
                group.broadcast(tensor, rank)
            group.wait()
            total.add(node, value)
        for tensor, result in zip(out, total._sums[root_of(self._count)], strict=True):
            tensor.copy_(result)

    def clear(self) -> None:
        """Hold nothing any more."""
        self._sums.clear()


def plan_sends(owner: Mapping[int, int], count: int) -> list[tuple[Node, int]]:
    """Return (node, who sends it) for the whole step, in the order of their micro-batches."""
    found = [
        (node, rank)
        for rank in sorted(set(owner.values()))
        for node in cover([m for m, r in owner.items() if r == rank], count)
    ]
    return sorted(found, key=lambda pair: leaves_of(pair[0], count).start)


VOTES = 3
"""For a checkpoint on disk, for a snapshot in memory, and to pass a micro-batch again together."""


class Numbers(NamedTuple):
    """The numbers of a step, as views of one tensor."""

    counts: Tensor
    """How often each part of the model has done each micro-batch: (parts, micro-batches)."""
    losses: Tensor
    """Of each micro-batch."""
    votes: Tensor
    """On what all do after the step (`VOTES`)."""
    more: Tensor


class Tally:
    """One member's numbers of the step under way, and the sums of the newest two steps."""

    def __init__(
        self,
        parts: int,
        count: int,
        *,
        more: int = 0,
        riders: Sequence[Tensor] = (),
    ) -> None:
        """Count `count` micro-batches in each of the model's `parts`.

        `riders` are where the sums of even and of odd steps lie within a bucket of gradients.
        """
        self._parts, self._sizes = parts, [parts * count, count, VOTES, more]
        self.all = torch.zeros(sum(self._sizes), dtype=torch.float64)
        self.mine = self._view(self.all)
        self.ride(riders)
        self._losses: dict[int, Tensor] = {}
        """By micro-batch; those that no number has been read of yet."""

    def ride(self, riders: Sequence[Tensor]) -> None:
        """Have the sums at `riders`, if there are any."""
        self.rides = bool(riders)
        self._sums = tuple(riders) or tuple(torch.zeros_like(self.all) for _ in range(2))
        self._read = tuple(self._view(sums) for sums in self._sums)

    def sums(self, step: int) -> Tensor:
        """Return the sums of a step over all members, in one tensor."""
        return self._sums[step % 2]

    def read(self, step: int) -> Numbers:
        """Return the sums of a step over all members."""
        return self._read[step % 2]

    def note(self, micro_batch: int, loss: Tensor) -> None:
        """Count a micro-batch of the model's only part, and keep a copy of its loss, unread.

        To read it here would hold the CPU until the device has ended the forward pass, for each
        micro-batch; `send` does so once a step.
        """
        self.mine.counts[0, micro_batch] = 1.0
        self._losses[micro_batch] = loss.detach().clone().view(())

    def clear(self) -> None:
        """Begin a step of which nothing is done."""
        self._losses.clear()
        self.all.zero_()

    def forget(self, micro_batch: int) -> None:
        """Take back what was noted of a micro-batch."""
        self._losses.pop(micro_batch, None)
        self.mine.counts[0, micro_batch] = 0.0
        self.mine.losses[micro_batch] = 0.0

    def send(self, step: int, group: Group) -> None:
        """Begin to sum this step's numbers, unless they ride with a bucket."""
        if self._losses:
            read = torch.stack(list(self._losses.values())).cpu().double()
            self.mine.losses[list(self._losses)] = read
            self._losses.clear()
        self.sums(step).copy_(self.all)
        if not self.rides:
            group.all_reduce(self.sums(step))

    def _view(self, numbers: Tensor) -> Numbers:
        counts, losses, votes, more = torch.split(numbers, self._sizes)
        return Numbers(counts.view(self._parts, -1), losses, votes, more)


_FIRST_BYTES = 1 << 20
"""The first bucket is small, so that the first all-reduce begins early."""
_EXACT_ENOUGH = (torch.float32, torch.float64)
Apart = tuple[int, ...]
"""The blocks that share a parameter, whose gradient is not whole before all of them are done."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Neighbouring parameters of one dtype and device, last ones first."""

    params: list[Tensor]
    flats: tuple[Tensor, ...]
    """For even and odd steps, or for all."""
    views: tuple[list[Tensor], ...]
    used: tuple[Tensor, ...]
    """For each parameter how many members have a gradient of it: the end of each of `flats`."""
    missing: set[Tensor] = field(default_factory=set)
    """Parameters whose gradient the backward pass under way has not finished."""
    waits: bool = False
    """A pass adds to the gradient of one of its parameters twice, as under reentrant activation
    checkpointing. So nobody knows before the pass has ended that it is finished."""


@dataclass(slots=True)
class _Pass:
    """The last backward pass of a step: buckets leave as they fill up, in order."""

    step: int
    send: Callable[[Tensor], None]
    scale: float
    next: int = 0


_TWICE = (
    "backward added to the gradient of {} after it was sent, which no pass "
    "before did: use checkpoint(..., use_reentrant=False)"
)


class Buckets:
    """The gradients of `params`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        bucket_bytes: int,
        sets: int = 2,
        rider: int = 0,
        apart: Mapping[Tensor, Apart] | None = None,
        names: Mapping[Tensor, str] | None = None,
    ) -> None:
        """Make buffers for two steps (or one), and watch each parameter's gradient.

        `rider` numbers are summed with the first bucket: a collective of their own would cost
        more than all else that a step does here. Where that bucket has less than 32 bits a number,
        there are none. Those of `params` that are `apart` have buckets of their own, by what it
        says of them; they never leave by themselves. `names` are for what is refused.
        """
        self._names = names or {}
        self.params = [p for p in params if p.requires_grad]
        apart = {p: apart[p] for p in self.params if p in apart} if apart else {}
        alone = [p for p in self.params if p not in apart]
        groups = _split(alone, bucket_bytes)
        if not groups or groups[0][0].dtype not in _EXACT_ENOUGH:
            rider = 0
        self._leaving = [
            _make_bucket(group, sets, 0 if number else rider) for number, group in enumerate(groups)
        ]
        self._apart = {
            one: [
                _make_bucket(group, sets, 0)
                for group in _split([p for p in apart if apart[p] == one], bucket_bytes)
            ]
            for one in sorted(set(apart.values()))
        }
        self.buckets = [*self._leaving, *(b for found in self._apart.values() for b in found)]
        self.riders = [flat[-rider:] for flat in self.buckets[0].flats] if rider else []
        """For even and odd steps; gradients are scaled, and these are not."""
        self._of = {p: b for b in self._leaving for p in b.params}
        self._pass: _Pass | None = None
        self._failure: Exception | None = None
        self._learns = True
        """No pass has shown yet which buckets have to wait for its end."""
        self._hooks: list[Any] = [
            param.register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]
            for param in alone
        ]

    def close(self) -> None:
        """Watch the parameters no longer."""
        for hook in self._hooks:
            hook.remove()

    def flats(self, step: int) -> list[Tensor]:
        """Return the buffers of a step."""
        return [_of_step(bucket.flats, step) for bucket in self.buckets]

    def list_views(self, step: int) -> dict[Tensor, Tensor]:
        """Return each parameter's part of the buffers of a step."""
        return {
            param: view
            for bucket in self.buckets
            for param, view in zip(bucket.params, _of_step(bucket.views, step), strict=True)
        }

    def arm(self, step: int, scale: float, send: Callable[[Tensor], None]) -> None:
        """Hand each bucket, times `scale`, to `send` once the coming backward has filled it."""
        self._pass, self._failure = _Pass(step, send, scale), None
        for bucket in self._leaving:
            bucket.missing = set(bucket.params)

    def set_used(self, step: int, used: Mapping[Tensor, float]) -> None:
        """Set for parameters whether any member has used them, where trees have summed."""
        for bucket in self.buckets:
            counts = [used.get(param, 1.0) for param in bucket.params]
            _of_step(bucket.used, step).copy_(torch.tensor(counts))

    def flush(self) -> None:
        """Send what is left: buckets with parameters that had no gradient, or all of them.

        Raises whatever a `send` during backward has raised.

        Raises:
            RuntimeError: a gradient was added to after it was sent, and never in a pass before.
        """
        current, self._pass, self._learns = self._pass, None, False
        if self._failure is not None:
            raise self._failure
        if current is not None:
            for bucket in self._leaving[current.next :]:
                self._send(current, bucket)

    def disarm(self) -> None:
        """Send nothing more."""
        self._pass, self._failure = None, None

    def copy(self, step: int, scale: float) -> list[Tensor]:
        """Copy all gradients, times `scale`, into the buffers of `step` and return these."""
        for bucket in self.buckets:
            self._fill(bucket, step, scale)
        return self.flats(step)

    def copy_apart(self, step: int, scale: float, apart: Apart) -> list[Tensor]:
        """Copy the gradients of what is `apart` like this, and return their buffers."""
        found = self._apart.get(apart, [])
        for bucket in found:
            self._fill(bucket, step, scale)
        return [_of_step(bucket.flats, step) for bucket in found]

    def expose(self, step: int) -> None:
        """Make the buffers of `step` the gradients of the parameters that any member has used."""
        for bucket in self.buckets:
            views, used = _of_step(bucket.views, step), _of_step(bucket.used, step).abs().tolist()
            for param, view, count in zip(bucket.params, views, used, strict=True):
                param.grad = view if count > 0.0 else None

    def drop(self) -> None:
        """Forget what was accumulated."""
        for param in self.params:
            param.grad = None

    def note(self, param: Tensor) -> None:
        """The gradient of `param` is there: in an armed pass, full buckets leave."""
        current = self._pass
        if current is None:
            return
        bucket = self._of[param]
        if param in bucket.missing:
            bucket.missing.remove(param)
        else:
            bucket.waits = True
            if bucket in self._leaving[: current.next]:
                self._failure = self._failure or RuntimeError(_TWICE.format(self._name(param)))
        while not self._learns and current.next < len(self._leaving):
            bucket = self._leaving[current.next]
            if bucket.missing or bucket.waits:
                break
            current.next += 1
            if self._failure is None:
                try:
                    self._send(current, bucket)
                except Exception as error:  # Not through the autograd engine: `flush` raises it.
                    self._failure = error

    def _send(self, current: _Pass, bucket: Bucket) -> None:
        self._fill(bucket, current.step, current.scale)
        current.send(_of_step(bucket.flats, current.step))

    def _fill(self, bucket: Bucket, step: int, scale: float) -> None:
        used = _of_step(bucket.used, step).fill_(1.0)
        with torch.no_grad():
            views = _of_step(bucket.views, step)
            for number, (param, view) in enumerate(zip(bucket.params, views, strict=True)):
                if param.grad is None:
                    view.zero_()
                    used[number] = 0.0
                elif param.grad.layout != torch.strided:
                    raise ConfigError(
                        f"elastic: the gradient of {self._name(param)} is sparse, and members sum "
                        "dense ones",
                        hint="use sparse=False, as in nn.Embedding(..., sparse=False)",
                    )
                else:
                    torch.mul(param.grad, scale, out=view)

    def _name(self, param: Tensor) -> str:
        return self._names.get(param, f"a parameter of shape {list(param.shape)}")


def _split(params: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Return the parameters, last first, in groups of about `bucket_bytes`."""
    groups: list[list[Tensor]] = []
    filled = 0
    for param in reversed(params):
        limit = _FIRST_BYTES if len(groups) == 1 else bucket_bytes
        last = groups[-1][0] if groups else None
        alike = last is not None and (last.dtype, last.device) == (param.dtype, param.device)
        if not alike or filled >= limit:
            groups.append([])
            filled = 0
        groups[-1].append(param)
        filled += param.nbytes
    return groups


def _of_step(sets: tuple[Any, ...], step: int) -> Any:
    return sets[step % len(sets)]


def _make_bucket(params: list[Tensor], sets: int, rider: int) -> Bucket:
    sizes = [p.numel() for p in params]
    more, first = len(params) + rider, params[0]
    total = sum(sizes) + more
    flats = tuple(torch.zeros(total, dtype=first.dtype, device=first.device) for _ in range(sets))
    cut = [torch.split(flat[: total - more], sizes) for flat in flats]
    views = tuple([_lay_out(part, p) for part, p in zip(c, params, strict=True)] for c in cut)
    used = tuple(flat[total - more : total - rider] for flat in flats)
    return Bucket(params, flats, views, used)


def _lay_out(part: Tensor, param: Tensor) -> Tensor:
    """Return `part` in the shape of `param`, and in its order in memory: so fused kernels pair."""
    if is_dense(list(param.shape), list(param.stride())):
        return part.as_strided(param.shape, param.stride())
    return part.view_as(param)


Compute = Callable[[int, int], Tensor]
"""(step, micro-batch) -> the loss"""


class Work(ABC):
    """One member's part of the step under way."""

    def __init__(
        self, buckets: Buckets, tally: Tally, trees: dict[int, GradientTree], seed: int
    ) -> None:
        """Have done nothing yet; `trees` are where gradients go in one order, if they do."""
        self.buckets, self.tally, self._trees, self._seed = buckets, tally, trees, seed
        self.done: list[int] = []
        """What the gradients contain."""

    @abstractmethod
    def reduce(self, step: int, group: Group, note_work: Callable[[], object]) -> None:
        """Compute what is missing of `step`, and reduce it; `note_work` hears of progress.

        Raises:
            Broken: the world has changed; what was finished is kept.
        """

    @abstractmethod
    def give_out(self, members: tuple[int, ...]) -> None:
        """Take this member's share of an undisturbed step."""

    @abstractmethod
    def drop_unfinished(self) -> None:
        """Keep what was finished of an attempt, and nothing else."""

    def seed_update(self, step: int, part: object = None) -> None:
        """Seed the generators for a step's update: members with the same `part` draw alike."""
        seed_all(derive_seed(self._seed, "update", step, part))

    def clear(self) -> None:
        """Begin a step of which nothing is done."""
        self.buckets.drop()
        self.done.clear()
        self.tally.clear()
        for tree in self._trees.values():
            tree.clear()


class Accumulation(Work):
    """One rank's micro-batches of the step under way."""

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
        tally = Tally(1, count, riders=buckets.riders if whole else ())
        super().__init__(buckets, tally, {0: GradientTree(count)} if exact else {}, seed)
        self._tree = self._trees.get(0)
        self._compute, self._backward = compute, backward
        self._count, self._counts_first = count, whole
        self._me, self._beside = -1, tuple[int, ...]()
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

    def fit(self, buckets: Buckets) -> None:
        """Have room for the gradients of other parameters; nothing of a step is done."""
        self.buckets.close()
        self.buckets.drop()
        self.buckets = buckets
        self.tally.ride(buckets.riders)

    def recompute(self, step: int, micro_batch: int) -> Tensor:
        """Return the loss of a micro-batch once more."""
        seed_all(derive_seed(self._seed, "micro-batch", step, micro_batch))
        return self._compute(step, micro_batch)

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
        kept = [p for p in self.buckets.params if p.grad is not None]
        loss = self._compute(step, micro_batch)
        if any(p.grad is None for p in kept):
            raise ConfigError(
                f"elastic: micro-batch {micro_batch} of step {step} drops the gradients of those "
                "before it",
                hint="call no zero_grad(): perdure drops gradients after each update",
            )
        if counts:
            self.tally.note(micro_batch, loss)
            if last:
                self._begin_reducing(step, group)
        self._backward(loss, counts)
        if counts and self._tree is not None:
            self._tree.add(
                (0, micro_batch), [flat.clone() for flat in self.buckets.copy(step, 1.0)]
            )
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
                self.tally.forget(micro_batch)
