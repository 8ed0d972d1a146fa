"""An elastic rank's part in what all members do at one step: set, checkpoint, stop, pause, drain.

The agreement and what is done of it are those of every depth (`worker.steering.boundary`,
`worker.steering.executor`); what is added here is that members come and go meanwhile. Who is asked
is in the newest epoch. Three rules keep all of them alike:

1. A member answers only once it has a state: before, it cannot know whether step S is past.
2. Who comes in later learns what was agreed without it from the order that makes it a member,
   and which of that is in force already from those who send it the state.
3. A decision that was made without a lost member is heard with the order of the epoch that
   leaves it out, and not before: nobody acts on it beside one who was not asked.

A newer epoch is formed before anything that the rank waits for here; it comes back afterwards.

Checkpoints of an elastic world (`Saving`) are for the day on which nobody is left to take the state
from. Where everyone has the whole state, the first living member saves for all, and nobody has to
agree with it. It saves step *s* when step *s+1* has been reduced and is not yet applied: that every
member took part in it proves that all have applied *s*, and what lies on disk was everyone's state.

Of a state that lies in parts, members who together have everything save it together, in a format
that is read into any number of parts. When one is due is the first member's to say; it says so
with the counts of the step, so that all save the same one.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.model.steering import KeySpec
from perdure.plan.training_plan import TrainingPlan, describe_changes
from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic.group import Broken, Group, read_keys
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.state import State
from perdure.worker.progress import Progress
from perdure.worker.settings import (
    declare_own_keys,
    plan_steering,
    read_checkpoint_url,
    read_spec,
)
from perdure.worker.steering.boundary import Interrupted
from perdure.worker.steering.cells import StoreCells
from perdure.worker.steering.config import Config
from perdure.worker.steering.executor import Depth, Executor, SaveSkipped
from perdure.worker.system.stderr import say

EVERY_S = 60.0
"""Where the job says nothing: only a restart of the whole world ever reads one."""


class Saving:
    """One rank's part; without perdure, nothing."""

    def __init__(
        self,
        membership: Membership,
        state: State,
        hand_over: Callable[[tuple[int, ...]], object] = lambda members: None,
        plan: TrainingPlan | None = None,
    ) -> None:
        """Save nothing yet; `hand_over` sees to it that members that leave take nothing along.

        The `plan` is kept with each checkpoint.
        """
        self._plan = {} if plan is None else plan
        self._membership, self._state = membership, state
        self.hand_over = hand_over
        self.config = read_spec().checkpoint
        self.every_steps = self.config.every_steps
        self.every_s = self.config.every_s
        self._wanted = membership.attachment.control is not None
        self._saver: Checkpointer | None = None
        self._saved = (-1, time.monotonic())
        self._mine = False
        """This member's part is the one of its kind that is saved."""
        self.agreed = False
        """All have heard that the newest state is to be saved; or it is this rank's to say."""

    def enter(self, mine: bool, number: int, count: int) -> None:
        """Enter a world in which this member has part `number` of `count`.

        It is `mine` to save where other members have the same part.
        """
        self._mine = mine
        if self._wanted and not self._state.whole:
            if self._saver is not None:
                self._saver.settle()
            self._saver = self._open(number, count)

    def read_newest(self) -> int:
        """Return the step of the newest usable checkpoint, 0 where there is none."""
        return self._saver.read_newest()[0] if self._saver is not None else 0

    def restore(self, extra: dict[str, Any]) -> int:
        """Load the newest checkpoint, fill `extra`; return its step, 0 where there is none.

        A part is restored with the others, in a world.
        """
        saver = self._saver
        if self._wanted and self._state.whole and not self._membership.joins:
            saver = self._open(self._membership.me, 1)
        if saver is None:
            return 0
        step = saver.restore(extra)
        self._saved = (step, time.monotonic())
        return step

    def check_plan(self, saved: TrainingPlan) -> None:
        """Compare the plan of a checkpoint, or of what members have in memory, with this one.

        Raises:
            ConfigError: it is another one, and nobody has consented to that.
        """
        changes = describe_changes(saved, self._plan)
        if changes and not self.config.allow_other_plan:
            raise ConfigError(
                f"elastic: what this job goes on from has another plan: {changes}; set "
                "checkpoint.allow_other_plan to go on with it",
                hint="allow_other_plan = true under [checkpoint] in the job file, or put the plan "
                "back; another --name begins anew",
            )
        if changes and self._membership.me == 0:
            say(f"not exact from here on: {changes}")

    def wants(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether this is the first member, and a checkpoint of `applied` steps is due."""
        if not self._wanted or self._membership.me != members[0]:
            return False
        step, at = self._saved
        every = self.every_steps
        elapsed_s = time.monotonic() - at
        due = applied % every == 0 if every else elapsed_s >= (self.every_s or EVERY_S)
        return due and applied not in (0, step)

    def save(
        self, applied: int, members: tuple[int, ...], reason: str, extra: dict[str, Any]
    ) -> None:
        """Begin to save, if it is ours to do and was not done.

        Raises:
            OSError, PerdureError: it cannot be begun.
        """
        if not self._wanted or self._saved[0] == applied or (self._state.whole and not self._mine):
            return
        self._saver = self._saver or self._open(0, 1)
        before, self._saved = self._saved[0], (applied, time.monotonic())
        if self._mine:
            try:
                self._saver.save(applied, reason=reason, extra=extra | {"plan": self._plan})
            except SaveSkipped:
                if self._state.whole:  # Else members that save other parts have not skipped it.
                    self._saved = (before, time.monotonic())
                raise

    def close(self) -> None:
        """Wait until what was begun is written."""
        if self._saver is not None:
            self._saver.close()

    def _open(self, number: int, count: int) -> Checkpointer:
        membership = self._membership
        saver = Checkpointer(
            url=read_checkpoint_url(self.config),
            config=self.config,
            rank=number,
            world_size=count,
            generation=membership.generation,
            world="" if self._state.whole else f"e{membership.epoch}",
            registry=self._state.make_registry(number, count),
            emit=membership.emit,
            now=membership.now,
            open_cells=lambda: StoreCells(membership.find_store),
        )
        for name, value in self._state.list_saved().items():
            saver.register(name, value)
        return saver


class Steering(Depth):
    """The agreements of one rank. Without perdure there are none."""

    def __init__(
        self, membership: Membership, config: Config, saving: Saving, progress: Progress
    ) -> None:
        """Answer once `begin` says what state this rank has."""
        self._membership, self._saving, self.progress = membership, saving, progress
        self.config, attachment = config, membership.attachment
        self.executor = Executor(
            self,
            rank=membership.me,
            generation=membership.generation,
            emit=membership.emit,
            now=membership.now,
            line=attachment.control,
            interrupted=membership.overtaken,
            cells=StoreCells(membership.find_store) if membership.supervised else None,
            members=lambda: self._group.members,
            orphan_s=read_spec().bus.orphan_s,
        )
        self._gate = self.executor.gate
        self._lock = threading.Lock()
        self._early: list[SendBoundary | ResumeRanks] = []
        """Orders that cannot be taken yet."""
        self._begun = False
        self._declared = False
        self._group: Any = None
        """The world in which this rank has come to a boundary."""
        self._together = -1
        """A step that every member is known to have come to."""
        self._applied = 0
        self.meet: Callable[[int, Group], object] = lambda step, group: group.meet()
        """Waits until every member of a world has come to a step."""
        declare_own_keys(config, saving.config, saving)
        config.declare_own(
            KeySpec(name="checkpoint.every_s", type="float", default=saving.every_s, min=0),
            functools.partial(setattr, saving, "every_s"),
        )
        attachment.obey(self.handle, SendBoundary, ResumeRanks)
        membership.on_order = self._look_again
        self.executor.forward_signals()

    def handle(self, order: SendBoundary | ResumeRanks) -> None:
        """Take one move of an agreement. Called in the control thread; never waits."""
        with self._lock:
            self._early.append(order)
            self._take_ready()

    def _look_again(self) -> None:
        """A newer epoch was ordered."""
        with self._lock:
            self._take_ready()
        self._gate.wake()

    def _take_ready(self, *, late: bool = False) -> None:
        if not self._begun:
            return
        orders, self._early = self._early, []
        for order in orders:
            if isinstance(order, SendBoundary) and order.epoch > self._membership.ordered:
                self._early.append(order)
            else:
                self._gate.handle(order, late=late)

    def begin(self, applied: int, members: tuple[int, ...]) -> None:
        """Note that this rank is at step `applied`, in a world whose members all are."""
        self._together = applied
        self._go_on(members)
        if self._begun and applied >= self._applied:
            return  # Else steps are made again, with what was agreed for them.
        # What is agreed for this very step may not be done yet where the state came from.
        plan_steering(self._gate, self.config, applied - 1, self._membership.steering)
        self._gate.advance(applied)
        self.executor.forward_signals(active=True)
        with self._lock:
            self._begun = True
            self._take_ready(late=self._membership.joins)

    def pass_boundary(self, applied: int, group: Group) -> None:
        """Do what is agreed for step `applied`, before anything of it is computed.

        Raises:
            Broken: a newer epoch has to be formed first; what is left is done afterwards.
        """
        self._applied, self._group = applied, group
        if self.executor.is_due(applied):
            try:
                self.executor.stop_at(applied)
            except Interrupted:
                raise Broken("a newer epoch was ordered") from None
        if not self._declared and self.speaks:
            self._declared = True
            self.executor.declare()

    # --- as a depth ---------------------------------------------------------------------------

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first member of its world."""
        return bool(self._group.index == 0)

    def come_together(self, step: int, leaves: tuple[int, ...]) -> None:
        """See that every member has come to this step: then nobody computes its state again.

        A member that saw it before the world broke has gone on, and does not wait here any more;
        but a world that is formed anew begins with all members at one step, which proves the same.
        """
        if self._together < step:
            self.meet(step, self._group)
            self._together = step
        if leaves:
            self._saving.hand_over(self._group.members)

    def part(self) -> None:
        """Let those of a drain leave: every member is at this step, and needs nothing of them."""
        self._go_on(self._group.members)
        me = self._membership.me
        if any(me in one.leaves for one in list(self._gate.holds.values())):
            self.executor.leave(f"this rank has left at step {self._applied}")
            self._saving.close()
            self.progress.finish()
            say(f"rank {me} leaves at step {self._applied}: its node is drained")
            raise SystemExit(0)

    def _go_on(self, members: tuple[int, ...]) -> None:
        """Stand still no longer for those who were to leave and have, or if nobody would stay."""
        for one in list(self._gate.holds.values()):
            gone = one.leaves and not set(one.leaves) & set(members)
            if gone or not set(members) - set(one.leaves):
                self._gate.drop_hold(one.id)

    def save_if_due(self, applied: int, group: Group) -> None:
        """Save at the job's interval, which needs nobody's agreement."""
        if self._saving.agreed and applied > 0:
            self._save(applied, group, "interval")

    def finish_stop(self, applied: int, group: Group) -> None:
        """After a stop: see that its checkpoint is written, whoever began to, before all leave."""
        if self.executor.stopping:
            self._save(applied, group, "stop")
            self._saving.close()

    def _save(self, applied: int, group: Group, reason: str) -> None:
        self._group = group
        self.executor.save(applied, reason)

    def save(self, step: int, reason: str) -> None:
        """Begin a checkpoint, if that is ours to do."""
        self._saving.save(step, self._group.members, reason, self.state())

    # --- settings -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, and what a member that comes in takes over."""
        return {"config": self.config.state()}

    def share(self, store: Any, members: tuple[int, ...]) -> None:
        """Have who comes in take over the settings of the first of `members` that has any.

        That need not be the first member: a spare may have a lower number than who is there.

        Raises:
            Broken: a newer epoch was ordered.
        """
        membership = self._membership
        comes_in = membership.joins and not self._begun
        store.set(f"settings/{membership.me}", encode({} if comes_in else self.state()))
        if comes_in:
            keys = [f"settings/{member}" for member in members]
            told: list[dict[str, Any]] = [
                decode(one, dict) for one in read_keys(store, keys, membership.overtaken)
            ]
            self.load(next(filter(None, told), {}))

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` said; the replica's state is there already.

        Raises:
            ConfigError: it is of another plan of training.
        """
        if "plan" in state:
            self._saving.check_plan(state["plan"])
        config = state.get("config")
        if isinstance(config, dict):
            self.config.restore(config)
