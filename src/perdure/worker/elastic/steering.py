"""An elastic rank's part in what all members do at one step: set, checkpoint, stop, pause, drain.

The agreement is the one of every depth (`worker.boundary`); what is added here is that members
come and go meanwhile. Who is asked is in the newest epoch. Three rules keep all of them alike:

1. A member answers only once it has a state: before, it cannot know whether step S is past.
2. Who comes in later learns what was agreed without it from the order that makes it a member,
   and which of that is in force already from those who send it the state.
3. A decision that was made without a lost member is heard with the order of the epoch that
   leaves it out, and not before: nobody acts on it beside one who was not asked.

A newer epoch is formed before anything that the rank waits for here; it comes back afterwards.
"""

import threading
from typing import Any

from perdure.model.actions import ResumeRanks, SendBoundary
from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError
from perdure.model.events import BoundaryReached, CheckpointFailed, KeysDeclared
from perdure.model.settings import KeySpec
from perdure.worker.boundary import Agreed, BoundaryGate, Interrupted
from perdure.worker.config import Config
from perdure.worker.elastic.group import Broken, Group, wait_for
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.progress import Progress
from perdure.worker.elastic.saving.checkpoints import Saving
from perdure.worker.settings import declare_own_keys, plan_steering
from perdure.worker.signals import SignalForwarding
from perdure.worker.stderr import say

_SAVES = ("checkpoint", "stop", "drain")


class Steering:
    """The agreements of one rank. Without perdure there are none."""

    def __init__(
        self, membership: Membership, config: Config, saving: Saving, progress: Progress
    ) -> None:
        """Answer once `begin` says what state this rank has."""
        self._membership, self._saving, self._progress = membership, saving, progress
        self.config = config
        control = membership.attachment.control if membership.attachment is not None else None
        self._gate = BoundaryGate(
            rank=membership.me,
            emit=membership.emit,
            ask=control.query if control is not None else lambda id_: None,
            check=config.find_veto,
            now=membership.now,
            interrupted=membership.overtaken,
        )
        self._signals = SignalForwarding(control.signal if control is not None else lambda n: None)
        self._lock = threading.Lock()
        self._early: list[SendBoundary | ResumeRanks] = []
        """Orders that cannot be taken yet."""
        self._begun = False
        self._declared = False
        self._due: list[Agreed] = []
        """Agreed for this step, and not carried out."""
        self._together = -1
        """A step that every member is known to have come to."""
        self._applied = 0
        self._drains: dict[str, tuple[int, ...]] = {}
        """Drains in which this rank stands, until it is in a world without those who leave."""
        self.stopping = False
        declare_own_keys(config, saving.config, saving)
        config.declare_own(
            KeySpec(name="checkpoint.every_s", type="float", default=saving.every_s, min=0),
            saving.set_every_s,
        )
        if membership.attachment is not None and membership.supervised:
            membership.attachment.on_boundary = self.handle
            membership.on_order = self._look_again
            self._signals.install()

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

    def _take_ready(self) -> None:
        if not self._begun:
            return
        orders, self._early = self._early, []
        for order in orders:
            if isinstance(order, SendBoundary) and order.epoch > self._membership.ordered:
                self._early.append(order)
            else:
                self._gate.handle(order)

    def reopen(self) -> None:
        """Another loop begins."""
        self._gate.reopen()

    def begin(self, applied: int, members: tuple[int, ...]) -> None:
        """This rank is at step `applied`, in a world whose members all are."""
        self._together = applied
        self._go_on(members)
        if self._begun and applied >= self._applied:
            return  # Else steps are made again, with what was agreed for them.
        # What is agreed for this very step may not be done yet where the state came from.
        plan_steering(self._gate, self.config, applied - 1, self._membership.steering)
        self._gate.advance(applied)
        self._signals.active = True
        with self._lock:
            self._begun = True
            self._take_ready()

    def end(self, applied: int) -> None:
        """The loop is over: promises that cannot be kept are answered."""
        self._signals.active = False
        why = f"the loop has ended at step {applied}"
        for broken in self._gate.close(why):
            self._reach(broken, applied, f"{why}, before step {broken.step}")

    def pass_boundary(self, applied: int, group: Group) -> None:
        """Do what is agreed for step `applied`, before anything of it is computed.

        Raises:
            Broken: a newer epoch has to be formed first; what is left is done afterwards.
        """
        self._applied = applied
        if self._gate.advance(applied) or self._due or self._gate.holds:
            self._stop_at(applied, group)
        if not self._declared and group.index == 0:
            self._declared = True
            self._declare()
            self.config.when_declared(self._declare)

    def _stop_at(self, applied: int, group: Group) -> None:
        progress = self._progress
        progress.account("overhead", "boundary")
        try:
            self._due += self._gate.arrive(applied)
            self._carry_out(applied, group)
            progress.account("boundary")
            while self._gate.holds and not self.stopping:
                progress.account("overhead", "paused")
                try:
                    self._due += self._gate.hold(applied, self._account_pause)
                finally:
                    progress.account("paused")
                self._carry_out(applied, group)
                progress.account("boundary")
        except Interrupted:
            raise Broken("a newer epoch was ordered") from None

    def _account_pause(self) -> None:
        self._progress.account("paused", "paused")

    def _carry_out(self, applied: int, group: Group) -> None:
        """Change, then save: a checkpoint of this step holds the values of this step."""
        for one in [one for one in self._due if one.change is not None]:
            assert one.change is not None
            self.config.apply(one.change)
            self._reach(one, applied)
        drains = [one for one in self._due if one.kind == "drain"]
        saves = [one for one in self._due if one.kind in _SAVES and not one.leaves]
        error = ""
        if saves or drains:
            self._come_together(applied, group)
        if any(one.leaves for one in drains):
            self._saving.hand_over(group.members)
        if saves:
            self._progress.account("boundary", "checkpoint")
            error = self._save(applied, group, saves[0].kind)
            self._progress.account("checkpoint", "boundary")
            self.stopping |= any(one.kind == "stop" for one in saves)
        for one in list(self._due):
            self._reach(one, applied, error if one in saves else "")
        for one in drains:
            if not set(group.members) - set(one.leaves):
                self._gate.drop_hold(one.id)  # The others have died meanwhile: nobody leaves.
            elif one.leaves:
                self._drains[one.id] = one.leaves
        self._go_on(group.members)
        if any(self._membership.me in leaves for leaves in self._drains.values()):
            self._leave(applied)

    def _go_on(self, members: tuple[int, ...]) -> None:
        """Who was to leave has left: nobody stands still for that any more."""
        for id_, leaves in list(self._drains.items()):
            if not set(leaves) & set(members):
                del self._drains[id_]
                self._gate.drop_hold(id_)

    def _leave(self, applied: int) -> None:
        """End this process in good order: every member is at this step, and needs nothing of it."""
        self._signals.active = False
        self._gate.close(f"this rank has left at step {applied}")
        self._saving.leave()
        self._progress.finish()
        say(f"rank {self._membership.me} leaves at step {applied}: its node is drained")
        raise SystemExit(0)

    def _come_together(self, applied: int, group: Group) -> None:
        """See that every member has come to this step: then nobody computes its state again.

        A member that saw it before the world broke has gone on, and does not wait here any more;
        but a world that is formed anew begins with all members at one step, which proves the same.
        """
        if self._together < applied:
            group.meet()
            self._together = applied

    def save_if_due(self, applied: int, group: Group) -> None:
        """Save at the job's interval, which needs nobody's agreement."""
        if self._saving.is_due(applied, group.members):
            error = self._save(applied, group, "interval")
            if error:
                say(f"checkpoint of step {applied}: {error}")

    def finish_stop(self, applied: int, group: Group) -> None:
        """After a stop: see that its checkpoint is written, whoever began to, before all leave."""
        if self.stopping:
            error = self._save(applied, group, "stop")
            self._saving.close()
            if error:
                say(f"checkpoint of step {applied}: {error}")

    def _save(self, applied: int, group: Group, reason: str) -> str:
        """Begin a checkpoint, if that is ours to do; return why it failed."""
        try:
            self._saving.save(applied, group.members, reason, self.state())
        except (OSError, PerdureError) as error:
            membership = self._membership
            if group.index == 0:
                failed = CheckpointFailed(
                    generation=membership.generation, step=applied, error=str(error),
                    at_s=membership.now(),
                )  # fmt: skip
                membership.emit(failed)
            return str(error)
        return ""

    def _reach(self, agreed: Agreed, applied: int, error: str = "") -> None:
        if agreed in self._due:
            self._due.remove(agreed)
        membership = self._membership
        at_s = membership.now()
        membership.emit(
            BoundaryReached(id=agreed.id, rank=membership.me, step=applied, at_s=at_s, error=error)
        )

    # --- settings -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, and what a member that comes in takes over."""
        return {"config": self.config.state()}

    def share(self, store: Any, first: int) -> None:
        """Have who comes in take over the settings of member `first`, an old one.

        Raises:
            Broken: a newer epoch was ordered.
        """
        membership = self._membership
        if membership.me == first:
            store.set("settings", encode(self.state()))
        elif membership.joins and not self._begun:
            wait_for(store, ["settings"], membership.overtaken)
            self.load(decode(store.get("settings"), dict[str, Any]))

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` said; the replica's state is there already."""
        config = state.get("config")
        if isinstance(config, dict):
            self.config.restore(config)

    def _declare(self) -> None:
        """Tell which keys there are: the first member speaks for all, and any may veto."""
        self._membership.emit(
            KeysDeclared(
                generation=self._membership.generation,
                keys=self.config.specs(),
                epoch=self.config.epoch,
                values=dict(self.config),
                step=self._applied,
            )
        )
