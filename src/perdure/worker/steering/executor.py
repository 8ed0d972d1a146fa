"""What all ranks do at one step, carried out in one of them, in every depth alike.

The agreement (`worker.steering.boundary`) says what is due at a step. It is done in one order:
values change first, so that a checkpoint of a step holds the values of that step; then it is saved;
then the controller hears that the step was reached. After a pause or a drain no step is made until
the rank is resumed, and meanwhile more may be agreed for this very step. All of it stalls training,
and is accounted so.

How the depths differ is named by `Depth`.

SIGTERM and SIGUSR1 in a rank are noted in the handler, and acted upon at a step all ranks agree on.
A rank that stopped by itself would leave the others waiting in a collective. So the handler only
passes the signal on to the agent; the controller makes an agreement of it. Before there is a
loop and after its end there is nothing to agree on, and the signal does what it did before.
"""

import contextlib
import math
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal, Protocol

from perdure.model.errors import PerdureError, PlatformError
from perdure.model.events import AnyEvent, BoundaryReached, CheckpointFailed, KeysDeclared
from perdure.model.signals.progress import Phase
from perdure.model.steering import Change
from perdure.worker.attach import attach_ring
from perdure.worker.busy import AT_MOST_S_MAX, declare_busy
from perdure.worker.control import Control
from perdure.worker.progress import Spent
from perdure.worker.steering.boundary import ORPHAN_S, PLANS, Agreed, BoundaryGate
from perdure.worker.steering.cells import Cells
from perdure.worker.steering.config import Config
from perdure.worker.system.stderr import say

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
_NUM_STEPS_MAX = 1 << 53
"""Who asks for more means that there is no end."""


class SignalForwarding:
    """Handlers that chain to whatever the script had installed."""

    def __init__(self, forward: Callable[[int], None]) -> None:
        """Pass signal numbers to `forward`, which must take no lock."""
        self._forward = forward
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self.active = False
        """Whether a loop is there to end in good order."""

    def install(self) -> None:
        """Take the signals over, also again after the script has set its own handlers.

        Only the main thread may; elsewhere nothing is installed.
        """
        for number in FORWARDED:
            current = signal.getsignal(number)
            if current == self._handle:
                continue
            with contextlib.suppress(ValueError):
                self._before[number] = current
                signal.signal(number, self._handle)
        attachment = attach_ring()
        if attachment is not None:
            attachment.ring.set_alone(
                number
                for number in FORWARDED
                if signal.getsignal(number) == self._handle
                and not callable(self._before.get(number))
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        ours = self.active and os.getpid() == self._pid
        if ours:
            self._forward(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not ours:
            # A data loader's child, or no loop: as if perdure were not there.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_SAVES = ("checkpoint", "stop", "drain")
REPEATED = ("interval", "asked")
"""Reasons of saves that nobody waits for an answer to."""


class SaveSkipped(PlatformError):
    """A save was not begun, because the checkpoint before it is still being written."""

    def __init__(self, message: str, *, writing: int, again: bool) -> None:
        """Note the step that is being `writing`, and whether saves were skipped for it `again`."""
        super().__init__(message)
        self.writing, self.again = writing, again


class Depth(Protocol):
    """The part of an agreement that each depth does in its own way."""

    config: Config
    """The rank's live settings."""
    progress: Any = None
    """Where time is accounted for (`Progress`); None where the whole stop is
    taken for a wait (see `ReplicaAccount.add_gate`)."""

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what is the same on all that make a step together."""

    def account(self, kind: Spent, phase: Phase = "step") -> None:
        """Note what the time since the last record was spent on; the rank is in `phase` now."""
        if self.progress is not None:
            self.progress.account(kind, phase)

    def apply(self, change: Change) -> bool:
        """Put `change` in force; False where it came with a state that the rank has taken over."""
        self.config.apply(change)
        return True

    def come_together(self, step: int, leaves: tuple[int, ...]) -> None:
        """See that every rank has come to `step`, which is about to be saved.

        Or about to be left, by the ranks in `leaves`, who hand over what the others lack.
        """
        return

    def save(self, step: int, reason: str) -> None:
        """Begin a checkpoint of `step`, where it is this rank's to write.

        Raises:
            SaveSkipped: the one before is still being written.
            OSError, PerdureError: it cannot be begun.
        """

    def part(self) -> None:
        """Go on without those who leave; who leaves ends here."""
        return


class Executor:
    """Does what is agreed with one rank, when its training thread comes to a step."""

    def __init__(
        self,
        depth: Depth,
        *,
        rank: int,
        generation: int,
        emit: Callable[[AnyEvent], object],
        now: Callable[[], float],
        line: Control | None = None,
        plans: tuple[str, ...] = PLANS,
        interrupted: Callable[[], bool] = lambda: False,
        cells: Cells | None = None,
        members: Callable[[], Sequence[int]] | None = None,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        """Answer as `rank` through `emit`; ask, and pass on signals, through `line`.

        For `plans` and what follows see `BoundaryGate`.
        """
        self._depth = depth
        self._rank, self._generation = rank, generation
        self._emit, self._now = emit, now
        self.gate = BoundaryGate(
            rank=rank,
            emit=emit,
            ask=line.query if line is not None else lambda boundary_id: None,
            check=depth.config.find_veto,
            now=now,
            plans=plans,
            interrupted=interrupted,
            cells=cells,
            members=members,
            orphan_s=orphan_s,
            excuse=lambda most_s: declare_busy("decision", at_most_s=min(most_s, AT_MOST_S_MAX)),
        )
        self._signals = SignalForwarding(line.signal) if line is not None else None
        self._due: list[Agreed] = []
        """What is agreed for this step and not done yet, as where the rank was interrupted."""
        self.stopping = False
        """Whether all ranks have agreed to stop."""
        self._num_steps = 0
        self._declared = False

    def forward_signals(self, *, active: bool = False) -> None:
        """Take over SIGTERM and SIGUSR1; once `active` they are for all ranks to agree upon."""
        if self._signals is not None:
            self._signals.install()
            self._signals.active |= active

    def is_due(self, step: int) -> bool:
        """Note that `step` steps are committed; return whether there is anything to do here."""
        return self.gate.advance(step) or bool(self._due or self.gate.holds)

    def stop_at(self, step: int, asked: str = "") -> None:
        """Wait for what is agreed for `step`, and do it; `asked` is why to save in any case.

        Raises:
            Interrupted: the rank has to leave; what is left is done when it comes again.
        """
        self._depth.account("overhead", "boundary")
        self._due += self.gate.arrive(step)
        self._carry_out(step, asked)
        while self.gate.holds and not self.stopping:
            self._hold(step)
            self._carry_out(step)

    def _carry_out(self, step: int, asked: str = "") -> None:
        """Do what is due at `step`, each once: what was told is due no more, whatever ends this.

        A rank that was interrupted may come back at another step than it left, and does there
        nothing alone that was for all at that one.
        """
        for one in list(self._due):
            if one.change is not None:
                if self._depth.apply(one.change):
                    self._reach(one, step)
                self._due.remove(one)
            elif one.step != step:
                self.gate.drop_hold(one.id)
                self._reach(one, step, f"the rank has come back at step {step}")
                self._due.remove(one)
        leaves = tuple(rank for one in self._due for rank in one.leaves)
        saves = [one for one in self._due if one.kind in _SAVES and not one.leaves]
        if saves or leaves:
            self._depth.come_together(step, leaves)
        error = ""
        if saves or asked:
            self._depth.account("boundary", "checkpoint")
            error = self.save(step, saves[0].kind if saves else asked)
            self._depth.account("checkpoint", "boundary")
            self.stopping |= any(one.kind == "stop" for one in saves)
        for one in list(self._due):
            if error and one.kind == "drain":
                self.gate.drop_hold(one.id)
            self._reach(one, step, error if one in saves else "")
            self._due.remove(one)
        self._depth.part()
        self._depth.account("boundary")

    def save(self, step: int, reason: str) -> str:
        """Begin a checkpoint; tell and return why it could not be begun: training goes on.

        A disk that hangs is told of once, and then only to who asks for a checkpoint.
        """
        try:
            self._depth.save(step, reason)
        except SaveSkipped as error:
            if error.again and reason in REPEATED:
                return ""
            self.tell_failed(step, str(error), writing=error.writing)
            return str(error)
        except (OSError, PerdureError) as error:
            self.tell_failed(step, str(error))
            return str(error)
        return ""

    def tell_failed(self, step: int, error: str, *, writing: int = -1) -> None:
        """Tell that there will be no checkpoint of `step`."""
        if not self._depth.speaks:
            return
        say(f"checkpoint of step {step} failed: {error}")
        failed = CheckpointFailed(
            generation=self._generation, step=step, error=error, at_s=self._now(), writing=writing
        )
        self._emit(failed)

    def _hold(self, step: int) -> None:
        """Make no step until resumed, or until more is agreed for this one.

        Who is to be moved off its node waits for its checkpoint; everybody else just waits.
        """
        saving = all(
            one.kind == "drain" and not one.leaves for one in list(self.gate.holds.values())
        )
        kind: Literal["checkpoint", "paused"] = "checkpoint" if saving else "paused"
        self._depth.account("boundary", kind)
        try:
            self._due += self.gate.hold(step, lambda: self._depth.account(kind, kind))
        finally:
            self._depth.account(kind, "boundary")

    def aim(self, num_steps: float) -> int:
        """Tell how many steps the loop is to make, and return that; 0: not known.

        A script may well count in what is no int: `1e3`, a NumPy number, infinity.
        """
        known = math.ceil(num_steps) if 0 < num_steps <= _NUM_STEPS_MAX else 0
        changed, self._num_steps = known != self._num_steps, known
        if changed and self._declared:
            self.declare(again=False)
        return known

    def declare(self, *, again: bool = True) -> None:
        """Tell which keys there are, `again` whenever one is added; any rank may veto a value."""
        config = self._depth.config
        self._declared = True
        if again:
            config.when_declared(lambda: self.declare(again=False))
        if self._depth.speaks:
            self._emit(
                KeysDeclared(
                    generation=self._generation,
                    keys=config.specs(),
                    epoch=config.epoch,
                    values=dict(config),
                    step=self.gate.committed,
                    num_steps=self._num_steps,
                )
            )

    def end(self, step: int) -> None:
        """Agree to nothing more, as the loop has ended at `step`; tell which promises it breaks."""
        why = f"the loop has ended at step {step}"
        for broken in self.leave(why):
            self._reach(broken, step, f"{why}, before step {broken.step}")

    def leave(self, why: str) -> list[Agreed]:
        """Agree to nothing from now on, because of `why`; return what was promised before."""
        if self._signals is not None:
            self._signals.active = False
        return self.gate.close(why)

    def _reach(self, agreed: Agreed, step: int, error: str = "") -> None:
        self._emit(
            BoundaryReached(id=agreed.id, rank=self._rank, step=step, at_s=self._now(), error=error)
        )
