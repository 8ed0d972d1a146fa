"""One rank of an elastic world: steps that survive the loss of others.

A step is: compute the micro-batches that are mine, reduce copies of the gradients, apply. Until
`apply` nothing that matters has been altered, so a broken attempt is left by an exception and
made again in a new world: what was finished stays in `p.grad` (or in the tree), and what the lost
rank owed is given out again. `apply` contains no collective and cannot be interrupted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from perdure.model.errors import ProtocolError
from perdure.model.events import WorldReformed
from perdure.plan.elastic.commit import FRESH, Reformation, Standing, decide_reformation
from perdure.plan.elastic.microbatches import assign
from perdure.worker.busy import Busy, declare_busy
from perdure.worker.config import Config
from perdure.worker.data import derive_seed, seed_all
from perdure.worker.elastic.gradients.buckets import Buckets
from perdure.worker.elastic.gradients.tree import GradientTree
from perdure.worker.elastic.group import (
    Broken,
    Group,
    exchange_standings,
    make_device,
    reaching_store,
    read_standings,
)
from perdure.worker.elastic.joining.donor import Feed
from perdure.worker.elastic.joining.follower import CatchUp, ReplicaPupil
from perdure.worker.elastic.membership import Membership, find_host
from perdure.worker.elastic.moving.packing import (
    open_state,
    pack_state,
    receive_state,
    restore_state,
    send_state,
)
from perdure.worker.elastic.saving.checkpoints import Saving
from perdure.worker.elastic.state.replicated import Replica
from perdure.worker.elastic.steering import Steering
from perdure.worker.progress import Progress
from perdure.worker.torchft.manager import warm_up

BUCKET_BYTES = 8 << 20
FOLLOW_TRIES_MAX = 3
_RETRY_S = 0.2


class Step(msgspec.Struct, frozen=True):
    """A committed step; but for `first`, the same on every rank."""

    step: int
    loss: float
    """Mean over the global batch."""
    losses: tuple[float, ...]
    """Of each micro-batch; of a loss in float64 the first 32 bits, unless `exact`."""
    world: tuple[int, ...]
    """Who was there."""
    epoch: int
    first: bool
    """Whether this rank is the first of that world: the one to print and to log."""


class Trainer:
    """Runs `compute(step, micro_batch) -> loss` for every micro-batch of every step, once."""

    def __init__(
        self,
        replica: Replica,
        compute: Callable[[int, int], Tensor],
        *,
        count: int,
        seed: int,
        exact: bool,
        membership: Membership,
        config: Config | None = None,
        saving: Saving | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        buckets: Buckets | None = None,
    ) -> None:
        """Train `replica` with `count` micro-batches a step and the live settings `config`."""
        self._replica, self._compute = replica, compute
        self._count, self._seed = count, seed
        self._membership = membership
        self._progress = Progress(membership.attachment)
        self._saving = saving or Saving(membership, replica)
        config = config if config is not None else Config()
        self._steering = Steering(membership, config, self._saving, self._progress)
        self._buckets = buckets or Buckets(
            replica.parameters, bucket_bytes, rider=0 if exact else 2 * count
        )
        self._tree = GradientTree(count) if exact else None
        self._feed = Feed(membership.generation)
        self._catching = CatchUp(ReplicaPupil(replica, self._buckets))
        self._group: Group | None = None
        self._device: Any = None
        self._waited_s = 0.0
        """Monotonic time since which this rank has waited for the collective that broke."""
        self._fresh = True
        self._holds = False
        """The buffers of the step before have its reduced gradients."""
        self._applied = 0
        self._done: list[int] = []
        self._todo: list[int] = []
        self._owner: dict[int, int] = {}
        self._tally = torch.zeros(2, count, dtype=torch.float64)
        """How often each micro-batch was done here, and its loss."""
        riders = [rider.view(2, count) for rider in self._buckets.riders]
        self._sums = tuple(riders or (torch.zeros_like(self._tally) for _ in range(2)))
        """The same over all ranks, for even and odd steps: with the first bucket, or apart."""
        self._finished: deque[Step] = deque()
        self._total = 0
        self._over = False
        self._connected_s = 0.0
        self._checked = False

    @property
    def model(self) -> torch.nn.Module:
        """Return what is trained."""
        return self._replica.model

    @property
    def applied(self) -> int:
        """Return how many steps the parameters contain."""
        return self._applied

    def busy(self, name: str, *, at_most_s: float) -> Busy:
        """Declare that this rank is about to do something long, as `perdure.Run.busy` does.

        Raises:
            ConfigError: `name` is no text, or `at_most_s` no time between 0 and a week.
        """
        return declare_busy(name, at_most_s=at_most_s)

    def start_at(self, step: int) -> None:
        """The replica's state was restored from a checkpoint of `step`."""
        self._applied, self._fresh = step, False

    def steps(self, total: int) -> Iterator[Step]:
        """Yield each step once it is committed, up to `total` steps.

        A rank that has joined begins where the others are. The loop ends when every member of
        the world has applied the last step: until then they may need what this rank holds.
        """
        self._total, self._over = total, False
        self._membership.abandon = self._abandon  # An order may come while the trainer is made.
        self._steering.reopen()
        warm_up()  # What the first optimizer step costs is paid before others wait for it.
        extra: dict[str, Any] = {}
        restored = self._saving.restore(extra) if self._fresh else 0
        if restored:
            self._steering.load(extra)
            self.start_at(restored)
        self._announce()
        if self._membership.joins:
            self._progress.hold()
            self._join()
        self._form_first()
        while not self._over:
            self._progress.begin(self._applied)
            self._keep_trying()
            while self._finished:
                yield self._finished.popleft()
        self._steering.end(self._applied)
        self._report(time.monotonic(), self._membership.now(), None, finished=True)
        self._saving.close()
        self._progress.finish()

    # --- one step -----------------------------------------------------------------------------

    def _announce(self) -> None:
        if self._membership.supervised:
            self._rehearse()
            self._device = self._device or make_device()  # A spare has it when it is called.
        self._membership.announce(*self._offer())

    def _offer(self) -> tuple[str, int]:
        """Return where others may follow this rank, and the bytes of its state."""
        feed = self._feed.open(find_host()) if self._membership.supervised else ""
        return feed, self._replica.nbytes

    def _rehearse(self) -> None:
        """Do once what a join does with a state: the first time takes a tenth of a second."""
        packed, tensors = pack_state(self._replica.state())
        if self._membership.joins:
            self._replica.load(restore_state(open_state(packed)[0], tensors))

    def _join(self) -> None:
        """Wait until the world has a place, and come into it: no step begins before.

        Called upon to follow it, this rank first takes the members' state while they train on.
        """
        followed, tries, why = -1, 0, ""
        while self._group is None:
            order = None if why else self._membership.wait_call(followed)
            if order is None:
                why = self._reform(why)
                continue
            tries += 1
            follows = self._catching.follow(order, self._membership)
            self._note_followed()
            if follows:
                continue
            if tries >= FOLLOW_TRIES_MAX:
                followed = order.epoch
                self._catching.give_up(self._membership)
            else:
                time.sleep(_RETRY_S)

    def _note_followed(self) -> None:
        """Take note of how far this rank has come by following."""
        self._applied, self._fresh = max(self._catching.applied, 0), self._catching.fresh

    def _form_first(self) -> None:
        """Come into the first world: what that takes belongs to the start, and to no step."""
        why = ""
        while self._group is None:
            why = self._reform(why)

    def _keep_trying(self) -> None:
        """Advance by a step, in a new world each time that the old one broke."""
        why = ""
        while True:
            if self._group is None or self._membership.overtaken():
                why = self._reform(why)
                if why:
                    continue
            assert self._group is not None
            try:
                self._advance(self._group)
                return
            except Broken as error:
                why = str(error)
                self._waited_s = self._waited_s or self._find_wait()
                self._buckets.disarm()
                self._drop_unfinished()
                self._leave()

    def _advance(self, group: Group) -> None:
        """Commit one step; after the last one, see that everyone has.

        Raises:
            Broken: the world has changed; what was finished is kept.
        """
        self._steering.pass_boundary(self._applied, group)
        if self._applied >= self._total or self._steering.stopping:
            self._steering.finish_stop(self._applied, group)
            group.meet()
            self._over = True
            return
        self._feed.stand(self._applied, self._find_line(), self._replica)
        self._reduce(group)
        counts = self._read_counts()
        if any(count != 1.0 for count in counts):
            raise ProtocolError(f"step {self._applied}: micro-batches were counted {counts}")
        self._apply(group)
        self._give_out(group.members)

    def _give_out(self, members: tuple[int, ...]) -> None:
        """Take this rank's share of an undisturbed step."""
        shares = assign(self._count, members)
        self._todo = list(shares[self._membership.me])
        self._owner = {m: rank for rank, mine in shares.items() for m in mine}

    def _read_counts(self) -> list[float]:
        """Return how often each micro-batch of this step was done, over all ranks."""
        counts: list[float] = self._sums[self._applied % 2][0].tolist()
        return counts

    def _read_losses(self) -> list[float]:
        """Return the loss of each micro-batch of this step."""
        losses: list[float] = self._sums[self._applied % 2][1].tolist()
        return losses

    def _reduce(self, group: Group) -> None:
        """Compute what is missing, and reduce: afterwards the step's buffers have its sum."""
        armed = False
        while self._todo:
            if self._membership.overtaken():
                raise Broken("a new world was ordered")
            armed = len(self._todo) == 1 and self._tree is None
            self._run(group, self._todo[0], reduce=armed)
            self._done.append(self._todo.pop(0))
            self._progress.mark_work()
        if not armed:
            self._send_tally(group)
        scale = 1.0 / self._count
        if self._tree is not None:
            self._add_up(self._tree, group, scale)
        elif not armed:
            self._buckets.arm(self._applied, scale, group.all_reduce)
        self._buckets.flush()
        group.wait()

    def _run(self, group: Group, micro_batch: int, *, reduce: bool) -> None:
        """One micro-batch, forward and backward; with `reduce`, buckets leave as they fill."""
        seed_all(derive_seed(self._seed, "micro-batch", self._applied, micro_batch))
        loss = self._compute(self._applied, micro_batch)
        self._tally[0, micro_batch] = 1.0
        self._tally[1, micro_batch] = loss.detach().item()
        if reduce:
            self._send_tally(group)
            self._buckets.arm(self._applied, 1.0 / self._count, group.all_reduce)
        self._replica.scale(loss).backward()  # type: ignore[no-untyped-call]
        if not self._checked:
            self._checked = True
            self._replica.refuse_buffers()
        self._keep_apart(micro_batch)

    def _keep_apart(self, micro_batch: int) -> None:
        """With `exact`, put what a micro-batch has left in `p.grad` into the tree."""
        if self._tree is not None:
            flats = [flat.clone() for flat in self._buckets.copy(self._applied, 1.0)]
            self._tree.add((0, micro_batch), flats)
            self._buckets.drop()

    def _add_up(self, tree: GradientTree, group: Group, scale: float) -> None:
        """With `exact`, make the step's gradients of everyone's."""
        flats = self._buckets.flats(self._applied)
        tree.reduce(group, self._owner, self._membership.me, flats)
        for flat in flats:
            flat.mul_(scale)

    def _send_tally(self, group: Group) -> None:
        total = self._sums[self._applied % 2]
        total.copy_(self._tally)
        if not self._buckets.riders:
            group.all_reduce(total)

    def _drop_unfinished(self) -> None:
        """A micro-batch whose backward pass has not begun was not done."""
        for micro_batch in range(self._count):
            if micro_batch not in self._done:
                self._tally[:, micro_batch] = 0.0

    def _apply(self, group: Group, *, sent: bool = False) -> None:
        """Apply the reduced gradients of this step: it is committed on this rank.

        `sent` are those of a member that has applied, and so clipped, them before.
        """
        if sent:
            self._feed.cut()
        else:
            self._feed.release(self._applied, self._find_line(sent=True), self._catching.pupil)
        losses = self._read_losses()
        self._steering.save_if_due(self._applied, group)
        self._buckets.expose(self._applied)
        self._replica.update(clipped=sent)
        self._buckets.drop()
        step = Step(
            step=self._applied,
            loss=sum(losses) / self._count,
            losses=tuple(losses),
            world=group.members,
            epoch=self._membership.epoch,
            first=group.members[0] == self._membership.me,
        )
        self._finished.append(step)
        self._applied += 1
        self._holds = True
        self._forget()
        self._progress.commit(self._applied)

    def _find_line(self, *, sent: bool = False) -> int:
        """Return the epoch that made the state, or the gradients that are `sent`."""
        return self._membership.epoch

    def _forget(self) -> None:
        self._done.clear()
        self._tally.zero_()
        if self._tree is not None:
            self._tree.clear()

    # --- the world ----------------------------------------------------------------------------

    def _leave(self) -> None:
        group = self._group
        if group is not None:
            group.give_up()
        self._group = None

    def _find_wait(self) -> float:
        """Return since when this rank has waited for what broke; 0 where it did not wait."""
        return self._group.waits_since_s if self._group is not None else 0.0

    def _abandon(self) -> None:
        group = self._group
        if group is not None:
            group.abandon()

    def _reform(self, why: str) -> str:
        """Form the newest world; return why that failed, or an empty string."""
        began_s = self._membership.now()
        self._progress.stall()
        self._leave()
        order = self._membership.wait(why)
        ordered = time.monotonic()
        try:
            with reaching_store():
                plan = self._form(order.ranks)
        except Broken as error:
            self._leave()
            self._membership.drop_store()
            return str(error)
        self._fresh = False
        self._todo = list(plan.todo[self._membership.me])
        self._progress.resume(self._applied)
        self._steering.begin(self._applied, order.ranks)
        self._report(ordered, began_s, plan)
        self._waited_s = 0.0
        return ""

    def _form(self, members: tuple[int, ...]) -> Reformation:
        membership = self._membership
        me = membership.me
        store = None
        if len(members) > 1:
            self._device = self._device or make_device()
            store = membership.store()
            self._catch_up_last(store, members)
        applied = FRESH if self._fresh else self._applied
        mine = Standing(applied, tuple(self._done), self._holds)
        standings = {me: mine}
        if store is not None:
            standings = exchange_standings(store, members, me, mine, membership.overtaken)
        plan = decide_reformation(self._count, standings)
        self._group = Group(members, me, store, self._device, membership.overtaken)
        self._note_connected()
        self._bring_together(plan, self._group)
        if store is not None:
            self._steering.share(store, members[0])
        kept = {m: r for r in plan.donors for m in standings[r].done}
        self._owner = kept | {m: rank for rank, todo in plan.todo.items() for m in todo}
        return plan

    def _note_connected(self) -> None:
        self._progress.enter_group()
        self._connected_s = self._membership.now()

    def _catch_up_last(self, store: Any, members: tuple[int, ...], kind: Any = Standing) -> None:
        """A rank that has followed takes what is still on its way: the members stand still."""
        if self._catching.follows:
            donors = [donor for donor in self._catching.donors if donor in members]
            standings = read_standings(store, donors, kind, self._membership.overtaken)
            self._catching.finish([standing.applied for standing in standings.values()])
            self._note_followed()

    def _bring_together(self, plan: Reformation, group: Group) -> None:
        """Roll forward who is one step behind, and give a state to who has none."""
        me = self._membership.me
        before = plan.step - 1
        reduced = [*self._buckets.flats(before), self._sums[before % 2]]
        if me == plan.holder:
            for rank in plan.forward:
                for tag, tensor in enumerate(reduced):
                    group.send(tensor, rank, tag)
            group.wait()
        elif me in plan.forward:
            for tag, tensor in enumerate(reduced):
                group.receive(tensor, plan.holder, tag)
            group.wait()
            self._apply(group, sent=True)
        if me in plan.donors:
            for rank in plan.fresh:
                state = self._replica.state()
                send_state(group, state, me, plan.donors, rank)
        elif me in plan.fresh:
            overtaken = self._membership.overtaken
            state, _ = receive_state(group, me, plan.donors, overtaken)
            self._feed.cut()
            self._replica.load(state)
            self._applied, self._holds, self._fresh = plan.step, False, False
            self._buckets.drop()
            self._forget()

    def _report(
        self, ordered: float, began_s: float, plan: Reformation | None, *, finished: bool = False
    ) -> None:
        membership = self._membership
        now_s = membership.now()
        membership.emit(
            WorldReformed(
                generation=membership.generation,
                epoch=membership.epoch,
                rank=membership.me,
                step=self._applied,
                began_s=began_s,
                ordered_s=now_s - (time.monotonic() - ordered),
                formed_s=now_s,
                redo=len(self._todo) if plan is not None and plan.redone else 0,
                waited_s=now_s - time.monotonic() + self._waited_s if self._waited_s else 0.0,
                connected_s=self._connected_s,
                reason=plan.reason if plan is not None else "",
                finished=finished,
                **(self._describe(plan) if plan is not None else {}),
            )
        )

    def _describe(self, plan: Any) -> dict[str, Any]:
        """Return what else there is to be said of a new world."""
        return {}
