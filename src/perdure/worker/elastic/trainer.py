"""One rank of an elastic world: steps that survive the loss of others.

A step is: compute what is mine of it, reduce copies of the gradients, apply. Until `_commit`
nothing that matters has been altered, so a broken attempt is left by an exception and made again
in a new world: what was finished is kept, and what the lost rank owed is given out again.
`_commit` contains no collective and cannot be interrupted.

Where everyone has the whole state, the reduced gradients themselves prove that all take part.
Where nobody needs to have it (shards, pipeline stages) the counts are reduced last:

- A member that has applied a step knows from them that every other has the step's reduced
  gradients, of its own part at least, and can apply them by itself.
- A new world may have other parts. A member keeps those that it had until all have reduced a step
  in the new world: who is lost before that takes nothing along that others have given up.
- Where the last living copy of a part is lost, all go back to the newest step that is whole in
  the peer checkpoint, else to the checkpoint on disk.

Votes on what all do together after a step ride along with its counts: for a checkpoint on disk,
where one is enough, and for a snapshot, where one against it is. Before a checkpoint is made, all
members compare their states (`comparing`).
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsFloat

import msgspec
import torch
import torch.distributed as dist
from msgspec import structs

from perdure.failpoints import failpoint
from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError, PlatformError, ProtocolError
from perdure.model.events import WorldReformed
from perdure.plan.elastic.commit import FRESH
from perdure.plan.training_plan import (
    TrainingPlan,
    describe_changes,
    digest_plan,
    find_strangers,
)
from perdure.worker.busy import Busy, declare_busy
from perdure.worker.elastic.communicators import Connect
from perdure.worker.elastic.communicators.split import choose_engine
from perdure.worker.elastic.comparing import Comparison
from perdure.worker.elastic.group import (
    Broken,
    Group,
    breaking,
    exchange_progress,
    read_keys,
)
from perdure.worker.elastic.joining import CatchUp, Donor
from perdure.worker.elastic.membership import Membership, read_host_address
from perdure.worker.elastic.state import Plan, Source, State
from perdure.worker.elastic.steering import Saving, Steering
from perdure.worker.progress import Progress
from perdure.worker.steering.config import Config
from perdure.worker.system.stderr import say
from perdure.worker.torchft.manager import warm_up
from perdure.worker.work import declare_work

FOLLOW_TRIES_MAX = 3
_RETRY_S = 0.2
_LEAVES_S = 10.0
"""Seconds for which members wait for word that a rank with another plan has ended."""
_LOOK_S = 0.01
_LINES = 1_000_000
"""Epochs that a generation may have, for lines to be told apart."""
_HashStore: Any = vars(dist)["HashStore"]


def _reaching_store() -> contextlib.AbstractContextManager[None]:
    """Turn the loss of the member that serves the store into `Broken`."""
    return breaking(dist.DistNetworkError, dist.DistStoreError, what="the store is gone: ")


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
    """The loop of one rank: each micro-batch of every step, once in the world."""

    def __init__(
        self,
        state: State,
        *,
        membership: Membership,
        config: Config | None = None,
        connect: Connect | None = None,
        plan: TrainingPlan | None = None,
    ) -> None:
        """Train `state` as a member of `membership`'s worlds, with the live settings `config`.

        Members `connect` by where the parameters are: over gloo, and for a GPU over NCCL beside
        it. Tests give another engine. Members have the same `plan`, and so has a checkpoint.
        """
        self.plan: TrainingPlan = {} if plan is None else plan
        self.state, self._connect = state, connect
        self._membership = membership
        self._progress = Progress(membership.attachment)
        self._saving = Saving(membership, state, self._hand_over, self.plan)
        config = config if config is not None else Config()
        self._comparison = Comparison(state.list_units)
        self._steering = Steering(membership, config, self._saving, self._progress)
        self._steering.meet = self._meet
        self._donor = Donor(membership.generation, state.followed)
        membership.on_join = self._donor.open
        self._catching = CatchUp(membership, state.followed)
        self._group: Group | None = None
        self._furthest = 0
        """The most steps that were ever applied."""
        self._finished: deque[Step] = deque()
        self._due = False
        """All members take a snapshot of the newest step, once their scripts have seen it."""
        self._total = 0
        self._over = False
        self._waited_s = 0.0
        """Monotonic time since which this rank has waited for the collective that broke, if so."""
        self._connected_s = 0.0

    @property
    def model(self) -> torch.nn.Module:
        """Return what is trained."""
        model: torch.nn.Module = self.state.replica.model
        return model

    @property
    def applied(self) -> int:
        """Return how many steps the parameters contain."""
        return max(self.state.applied, 0)

    def busy(self, name: str, *, at_most_s: float) -> Busy:
        """Declare that this rank is about to do something long, as `perdure.Run.busy` does.

        Raises:
            ConfigError: `name` is no text, or `at_most_s` no time between 0 and a week.
        """
        return declare_busy(name, at_most_s=at_most_s)

    def work(self, amount: SupportsFloat) -> None:
        """Declare how much this rank does in the step under way, as `perdure.Run.work` does.

        Where nothing is declared, the micro-batches that it has done count.
        """
        declare_work(amount)

    def before_break(self, destroy: Callable[[], object]) -> None:
        """Have `destroy` called once, in any thread, when the world of now is left.

        It is for a CUDA graph that has captured collectives of this world (`graph.reset`): they
        could not be aborted while it lives, and this process would lose its device. The next
        world's graph is captured anew. Before there is a world, nothing can be captured.
        """
        assert self._group is not None, "there is no world yet"
        self._group.captures.add(destroy)

    def steps(self, total: int) -> Iterator[Step]:
        """Yield each step once it is committed, up to `total` steps.

        A rank that has joined begins where the others are. The loop ends when every member of
        the world has applied the last step: until then they may need what this rank holds.
        """
        self._total, self._over, self.plan["steps"] = total, False, str(total)
        self._membership.break_groups = self._break  # An order may come before the first world.
        self._membership.attachment.ring.aim(self._steering.executor.aim(total))
        self._steering.executor.gate.reopen()
        warm_up()  # What the first optimizer step costs is paid before others wait for it.
        if self.state.whole and self.state.applied == FRESH:
            extra: dict[str, Any] = {}
            restored = self._saving.restore(extra)
            if restored:
                self._steering.load(extra)
                self.state.start_at(restored)
        self._announce()
        if self._membership.joins:
            self._membership.attachment.ring.set_phase("paused")  # Until the world has a place.
            self._join()
        why = ""
        while self._group is None:  # What this takes belongs to the start, and to no step.
            why = self._reform(why)
        while not self._over:
            self._progress.begin(self.applied)
            self._keep_trying()
            while self._finished:
                yield self._finished.popleft()
        self._steering.executor.end(self.applied)
        self._report(time.monotonic(), self._membership.now(), None, finished=True)
        self._donor.close()
        self._saving.close()
        self.state.snapshots.close()
        self._progress.finish()

    # --- one step -----------------------------------------------------------------------------

    def _keep_trying(self) -> None:
        """Advance by a step, in a new world each time that the old one broke."""
        why = ""
        if self._due and self._group is not None:
            self._take_snapshot(self._group.members)
        self._due = False
        while True:
            if self._group is None or self._membership.overtaken():
                why = self._reform(why)
                if why:
                    continue
                if self._finished:  # The script is to see this step before the next one begins.
                    return
            assert self._group is not None
            try:
                with self._group.captures.breaking():
                    self._advance(self._group)
                return
            except Broken as error:
                why = str(error)
                since_s = [group.waits_since_s for group in self._list_groups()]
                self._waited_s = self._waited_s or max(since_s, default=0.0)
                self._leave()

    def _advance(self, group: Group) -> None:
        """Commit one step; after the last one, see that everyone has.

        Raises:
            Broken: the world has changed; what was finished is kept.
        """
        state, applied = self.state, self.applied
        self._steering.pass_boundary(applied, group)
        if applied >= self._total or self._steering.executor.stopping:
            self._steering.finish_stop(applied, group)
            self._meet(applied, group)
            self._over = True
            return
        state.begin_step()
        self._donor.stand(applied, state.line)
        self._comparison.begin(applied, group)
        state.work.tally.mine.votes[0] = float(self._saving.wants(applied, group.members))
        state.work.reduce(applied, group, self._progress.mark_work)
        if not state.whole:
            self._prove(group)
        counts: list[float] = state.work.tally.read(applied).counts.flatten().tolist()
        if any(count != 1.0 for count in counts):
            raise ProtocolError(f"step {applied}: micro-batches were counted {counts}")
        state.check_step()
        self._compare(applied, group, wanted=bool(state.work.tally.read(applied).votes[0] > 0))
        self._commit(group)
        state.work.give_out(group.members)

    def _meet(self, step: int, group: Group) -> None:
        """Compare the states of all members at `step`, and wait until all have done so.

        Raises:
            Broken: a member was lost.
            PlatformError: members differ.
        """
        self._compare(step, group, wanted=True)
        group.meet()  # Before one leaves, and takes the store along.

    def _compare(self, step: int, group: Group, *, wanted: bool) -> None:
        try:
            with _reaching_store():
                self._comparison.finish(step, group, wanted=wanted)
        except PlatformError as error:
            self.state.snapshots.forget(FRESH)  # They are newer than what all agreed on.
            if group.index == 0:
                say(f"hint: {error.hint}")
            raise

    def _prove(self, group: Group) -> None:
        """Reduce the counts, which say that each member has reduced its part, and the votes.

        Raises:
            Broken: a member was lost. Whether others know that all are ready shows in what they
                have applied.
        """
        state = self.state
        state.ready = self._make_line()
        state.work.tally.mine.votes[1] = state.snapshots.vote()
        state.work.tally.mine.votes[2] = float(state.wants_rerun())
        state.work.tally.send(state.applied, group)
        group.wait()

    def _commit(self, group: Group, source: Source = "reduced") -> None:
        """Apply the reduced gradients of this step: it is committed on this rank.

        Gradients that were `sent` are those of a member that has applied, and so clipped, them
        before.
        """
        state, step = self.state, self.applied
        if source == "sent":
            self._donor.cut()
        else:
            self._donor.release(step, state.ready)
        if step < self._furthest:
            self._progress.repeat()
        sums = state.work.tally.read(step)
        losses: list[float] = sums.losses.tolist()
        checkpoint, snapshot, _ = sums.votes.tolist()
        self._saving.agreed = checkpoint > 0.0
        self._steering.save_if_due(step, group)
        state.update(source)
        self._finished.append(
            Step(
                step=step,
                loss=sum(losses) / len(losses),
                losses=tuple(losses),
                world=group.members,
                epoch=self._membership.epoch,
                first=group.members[0] == self._membership.me,
            )
        )
        self._furthest = max(self._furthest, self.applied)
        self._progress.commit(self.applied)
        self._due = state.snapshots.is_due(self.applied, snapshot)

    # --- what outlives a loss -----------------------------------------------------------------

    def _take_snapshot(self, members: tuple[int, ...]) -> None:
        """Begin this step's snapshot."""
        named, content = self.state.snapshot(self._steering.state() | {"plan": self.plan})
        self.state.snapshots.take(named, content, members)

    def _hand_over(self, members: tuple[int, ...]) -> None:
        """Have this very step in memory, also on a neighbour's node, before anyone leaves."""
        state = self.state
        if state.snapshots.every:
            if state.snapshots.newest != (state.applied, state.line):
                self._take_snapshot(members)
            state.snapshots.finish()

    def _load_checkpoint(self, group: Group) -> None:
        """Take the newest checkpoint's state in the place of the initial one.

        Raises:
            Broken: a member was lost.
            PlatformError: members do not find the same one.
        """
        extra: dict[str, Any] = {}
        with breaking(RuntimeError):
            found = self._saving.read_newest()
            if group.index == 0:
                group.store.set("checkpoint", str(found))
            chosen = int(group.read(["checkpoint"])[0])
            if found != chosen:
                raise PlatformError(
                    f"rank {group.me} finds the checkpoint of step {found}, and the first "
                    f"rank that of step {chosen}",
                    hint="all nodes have to see the same checkpoints",
                )
            restored = self._saving.restore(extra)
        if restored:
            self._steering.load(extra)
            self.state.start_at(restored)
            self._furthest = restored
            self._saving.enter(*self.state.part(group))

    # --- the world ----------------------------------------------------------------------------

    def _announce(self) -> None:
        """Say that this rank is ready, where others may follow it, and the bytes of its state."""
        offered, supervised = self.state.followed, self._membership.supervised
        if supervised or not self.state.whole:
            self.state.prepare(joins=self._membership.joins)
        if supervised:  # A spare has it when it is called.
            self._connect = self._connect or choose_engine(self.state.replica.device)
        self._membership.announce(
            self._donor.reserve(read_host_address()) if supervised else "",
            offered.replica.nbytes if offered is not None else 0,
        )

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
            if self._catching.follow(order):
                continue
            if tries >= FOLLOW_TRIES_MAX:
                followed = order.epoch
                self._catching.give_up()
            else:
                time.sleep(_RETRY_S)

    def _reform(self, why: str) -> str:
        """Form the newest world; return why that failed, or an empty string."""
        began_s = self._membership.now()
        self._progress.stall()
        self._leave()
        order = self._membership.wait(why)
        ordered = time.monotonic()
        failpoint("elastic/ordered")
        try:
            with _reaching_store():
                plan = self._form(order.ranks)
        except Broken as error:
            self._leave()
            self._membership.drop_store()
            return str(error)
        failpoint("elastic/formed")
        self._progress.resume(self.applied)
        self._steering.begin(self.applied, order.ranks)
        self._report(ordered, began_s, plan)
        self._waited_s = 0.0
        return ""

    def _form(self, members: tuple[int, ...]) -> Plan:
        """Tell how far this rank is, decide what all decide, and be at the same step.

        Raises:
            Broken: a member was lost, or a newer epoch was ordered.
            PlatformError: no whole state is left.
        """
        state, membership, line = self.state, self._membership, self._make_line()
        store = membership.store() if len(members) > 1 else _HashStore()
        if len(members) > 1:
            self._connect = self._connect or choose_engine(self.state.replica.device)
        self._catching.finish(store, members)
        me, overtaken = membership.me, membership.overtaken
        met = self._comparison.has_met(members)
        stand = structs.replace(state.stand(), plan=digest_plan(self.plan), met=met)
        if state.followed is not None and not met:
            stand = structs.replace(stand, settings=state.followed.hash_settings())
        progress = exchange_progress(store, members, me, stand, overtaken)
        self._compare_plans(store, progress)
        self._comparison.enter(members, met=all(one.met for one in progress.values()))
        plan = state.decide(progress, line)
        self._group = group = Group(members, me, store, self._connect, overtaken)
        membership.attachment.enter("group")
        self._connected_s = membership.now()
        self._bring_together(plan, group)
        state.enter(plan, group, progress, line)
        if state.snapshots.every:
            state.snapshots.enter(group, {m: one.node for m, one in progress.items()})
        self._saving.enter(*state.part(group))
        if not state.whole and plan.step == 0:  # Nobody has trained anything yet.
            self._load_checkpoint(group)
            if state.snapshots.every:  # To go back to, before there is a newer one.
                self._take_snapshot(members)
        return plan

    def _compare_plans(self, store: Any, progress: Mapping[int, Any]) -> None:
        """Refuse this rank if it has another plan than the members.

        Raises:
            ConfigError: it has.
            Broken: another member has, and is about to leave.
        """
        known, strangers = find_strangers(progress)
        if not strangers:
            return
        me, overtaken = self._membership.me, self._membership.overtaken
        store.set(f"plan/{me}", encode(self.plan))
        if me not in strangers:
            deadline = time.monotonic() + _LEAVES_S
            while not overtaken() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            raise Broken(f"ranks {strangers} have another plan of training")
        theirs: TrainingPlan = decode(read_keys(store, [f"plan/{known}"], overtaken)[0], dict)
        words = describe_changes(
            self.plan,
            theirs,
            f"{{0}} differs: {{1}} here, {{2}} on rank {known}",
            members=True,
        )
        raise ConfigError(
            f"elastic: {words}",
            hint="the script or its data was changed: put it back, or start the whole job again",
        )

    def _bring_together(self, plan: Plan, group: Group) -> None:
        """Have who is one step behind roll forward, and give a state to who lacks it.

        Raises:
            Broken: a member was lost.
        """
        state = self.state
        reduced = state.list_reduced(plan.step - 1)
        if group.me == plan.holder:
            for rank in plan.forward:
                for tag, tensor in enumerate(reduced):
                    group.send(tensor, rank, tag)
        elif group.me in plan.forward:
            for tag, tensor in enumerate(reduced):
                group.receive(tensor, plan.holder, tag)
        group.wait()
        if group.me in plan.forward:
            self._commit(group, "sent" if state.whole else "reduced")
        taken = state.take(plan, group, self._steering.state())
        if taken.changed:
            self._donor.cut()
        if taken.plain is not None:  # What this member had of later steps is undone.
            self._steering.load(taken.plain)
            state.snapshots.forget(plan.step)
            self._due = False
        self._steering.share(group.store, group.members)

    def _make_line(self) -> int:
        return self._membership.generation * _LINES + self._membership.epoch

    def _list_groups(self) -> list[Group]:
        group = self._group
        return [*self.state.groups, *([group] if group is not None else [])]

    def _break(self) -> None:
        """Break this world. Called in another thread."""
        for group in self._list_groups():
            group.break_()
        self.state.snapshots.break_()

    def _leave(self) -> None:
        self.state.leave()
        for group in self._list_groups():
            group.give_up()
        self.state.groups, self._group = (), None
        self.state.snapshots.leave()

    def _report(
        self, ordered: float, began_s: float, plan: Plan | None, *, finished: bool = False
    ) -> None:
        membership = self._membership
        now_s = membership.now()
        redo = len(plan.todo[membership.me]) if plan is not None and plan.redone else 0
        membership.emit(
            WorldReformed(
                generation=membership.generation,
                epoch=membership.epoch,
                rank=membership.me,
                step=self.applied,
                began_s=began_s,
                ordered_s=now_s - (time.monotonic() - ordered),
                formed_s=now_s,
                redo=redo,
                waited_s=now_s - time.monotonic() + self._waited_s if self._waited_s else 0.0,
                connected_s=self._connected_s,
                reason=plan.reason if plan is not None else "",
                finished=finished,
                **(self.state.describe(plan) if plan is not None else {}),
            )
        )
