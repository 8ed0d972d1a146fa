"""What happens around each step of a rank that has joined its job.

The accounts are made so that they prove something: every record covers the time since the
record before, split into step, checkpoint, boundary and overhead, so their sum is exactly
`last_step - first_step`. Where nothing is due a boundary is one record in the ring and three
comparisons of integers.
"""

import time
from typing import Any, Protocol

from perdure.model.errors import PerdureError
from perdure.model.events import BoundaryReached, KeysDeclared
from perdure.model.ring import PHASE_INDEX
from perdure.model.signals.progress import Phase
from perdure.worker.attach import Attachment
from perdure.worker.boundary import Agreed, BoundaryGate
from perdure.worker.config import Config
from perdure.worker.metrics import MetricsBuffer
from perdure.worker.settings import plan_steering, read_steering
from perdure.worker.signals import SignalForwarding

_STEP = PHASE_INDEX["step"]
_SAVES = ("checkpoint", "stop", "drain")


class Saver(Protocol):
    """What the loop needs of `perdure.worker.checkpoint.Checkpointer`."""

    gate_s: float
    """Seconds waited in gates so far."""

    def find(self) -> tuple[int, dict[str, Any]]:
        """Return step and objects' states of the checkpoint that `restore` will load."""

    def restore(self, extra: dict[str, Any]) -> int:
        """Restore all objects, fill `extra`, return the committed step."""

    def save(self, step: int, *, reason: str, extra: dict[str, Any], wait: bool = False) -> float:
        """Begin a checkpoint of `step`; return the seconds it stalled."""

    def close(self) -> None:
        """Wait until everything begun is written."""


class StepLoop:
    """The steps of one rank in one generation."""

    def __init__(
        self, attachment: Attachment, saver: Saver, metrics: MetricsBuffer, config: Config
    ) -> None:
        """Join `attachment`'s job; nothing is restored before `begin`."""
        self._attachment = attachment
        self._ring = attachment.ring
        self._faults = attachment.faults
        self._stages = attachment.stages
        self._saver = saver
        self._metrics = metrics
        self._config = config
        control = attachment.control
        self._gate = BoundaryGate(
            rank=self._ring.rank,
            emit=attachment.emit,
            ask=control.query if control is not None else lambda boundary_id: None,
            check=config.find_veto,
            now=attachment.now,
        )
        self._signals = SignalForwarding(control.signal if control is not None else lambda n: None)
        attachment.on_boundary = self._gate.handle
        self.every_steps = 0
        self.save_at_end = False
        self.committed = 0
        self.stopping = False
        self.save_requested = False
        self._begun = False
        self._accounted = 0
        """Monotonic ns up to which the accounts are complete; 0 before the first step."""
        self._step_begin = 0
        self._gate_s = 0.0
        self._saved_step = -1

    def install_signals(self) -> None:
        """Take over SIGTERM and SIGUSR1; they count once the loop runs."""
        if self._attachment.control is not None:
            self._signals.install()

    def find(self) -> tuple[int, dict[str, Any]]:
        """Return what `begin` will restore: its step (0 for none), the states of its objects.

        For trainers that must know where they go on before there is anything to restore into.
        """
        self._attachment.leave_startup()
        self._ring.set_phase("restore")
        return self._saver.find()

    def begin(self) -> None:
        """Restore, once; every object has been registered by now."""
        if not self._begun:
            self._begun = True
            self._attachment.leave_startup()
            self._ring.set_phase("restore")
            extra: dict[str, Any] = {}
            self.committed = self._saver.restore(extra)
            self._config.restore(extra.get("config", {}))
            self._saved_step = self.committed
            self._ring.start_steps(self.committed)
            self._ring.stamp("restored")
            plan_steering(self._gate, self._config, self.committed, read_steering())
            self._declare_keys()
            self._config.when_declared(self._declare_keys)
        self._gate.reopen()
        self._faults.step = self.committed
        self.install_signals()
        self._signals.active = True
        if self._gate.advance(self.committed):
            self._start_accounts(time.monotonic_ns())
            self._stop_at_boundary(True, False)

    def _declare_keys(self) -> None:
        """Tell which keys there are; rank 0 speaks for all, and any rank may veto."""
        if self._ring.rank == 0:
            event = KeysDeclared(
                generation=self._ring.generation,
                keys=self._config.specs(),
                epoch=self._config.epoch,
                values=dict(self._config),
                step=self.committed,
            )
            self._attachment.emit(event)

    def _start_accounts(self, now: int) -> None:
        self._ring.stamp("first_step", now)
        self._accounted = now
        self._gate_s = self._saver.gate_s
        self._ring.set_phase("step", now)

    def enter_step(self) -> None:
        """Begin a step: nothing between here and `commit_step` is perdure's."""
        now = time.monotonic_ns()
        if not self._accounted:
            self._start_accounts(now)
        self._step_begin = now
        if self._stages is not None:
            self._stages.begin_declared(now)
        if self.committed >= self._faults.next_step:
            self._faults.act(self.committed)

    def commit_step(self) -> None:
        """Account for a finished step, and do what is due at its boundary."""
        end = time.monotonic_ns()
        self.committed += 1
        gate_ns = self._take_gate_ns()
        overhead_ns = self._step_begin - self._accounted
        step_ns = end - self._step_begin - gate_ns
        if self._stages is not None:
            self._stages.end_declared(self.committed, end, gate_ns)
        spent = (step_ns, gate_ns, 0, overhead_ns)
        self._ring.commit(self.committed, self._accounted, end, spent, phase=_STEP)
        self._accounted = end
        self._faults.step = self.committed
        agreed = self._gate.advance(self.committed)
        every = self.every_steps and self.committed % self.every_steps == 0
        if agreed or every or self.save_requested:
            self._stop_at_boundary(agreed, bool(every))

    def leave(self) -> None:
        """End the loop in good order: last checkpoint, writers done, promises answered."""
        self._signals.active = False
        self._faults.step = -1
        why = f"the loop has ended at step {self.committed}"
        for broken in self._gate.close(why):
            self._reached(broken, error=f"{why}, before step {broken.step}")
        self._metrics.flush()
        began = time.monotonic_ns()
        self._ring.set_phase("checkpoint", began)
        if self.save_at_end and self._saved_step != self.committed:
            self._save("end")
        self._saver.close()
        if self._accounted:
            now = time.monotonic_ns()
            spent = (0, now - began, 0, began - self._accounted)
            self._ring.commit(self.committed, self._accounted, now, spent, phase=_STEP)
            self._accounted = now
        self._ring.stamp("finished")
        self._ring.set_phase("finished")

    def abandon(self) -> None:
        """Note that the script left the loop by itself; what it is up to is not known."""
        self._signals.active = False
        self._gate.close(f"the script left its loop at step {self.committed}")
        self._metrics.flush()

    def _stop_at_boundary(self, agreed: bool, every: bool) -> None:
        """Wait for agreements and carry them out: all of it stalls training, and is accounted so.

        In a pause more may be agreed for this very step.
        """
        began = time.monotonic_ns()
        due: list[Agreed] = []
        if agreed:
            self._ring.set_phase("boundary", began)
            due = self._gate.arrive(self.committed)
        self._carry_out(due, every, began)
        while self._gate.holds and not self.stopping:
            due = self._hold()
            if due:
                self._carry_out(due, False, self._accounted)

    def _carry_out(self, due: list[Agreed], every: bool, began: int) -> None:
        """Change, save, stop. A checkpoint of this step holds the values of this step."""
        reached = time.monotonic_ns()
        for one in due:
            if one.change is not None:
                self._config.apply(one.change)
        saves = [one.kind for one in due if one.kind in _SAVES]
        self.stopping = self.stopping or "stop" in saves
        saved, error = reached, ""
        if saves or every or self.save_requested:
            self._ring.set_phase("checkpoint", reached)
            error = self._save(saves[0] if saves else "interval" if every else "asked")
            self.save_requested = False
            saved = time.monotonic_ns()
        for one in due:
            if error and one.kind == "drain":
                self._gate.holds.pop(one.id, None)
            self._reached(one, error=error if one.kind in _SAVES else "")
        now = time.monotonic_ns()
        overhead_ns = began - self._accounted + now - saved
        spent = (0, saved - reached, reached - began, overhead_ns)
        self._ring.commit(self.committed, self._accounted, now, spent, phase=_STEP)
        self._accounted = now
        self._take_gate_ns()

    def _hold(self) -> list[Agreed]:
        """Make no step until resumed; return what is agreed meanwhile."""
        paused = "pause" in self._gate.holds.values()
        phase: Phase = "paused" if paused else "checkpoint"

        def account(index: int = PHASE_INDEX[phase]) -> None:
            now = time.monotonic_ns()
            held_ns = now - self._accounted
            spent = (0, 0 if paused else held_ns, 0, 0)
            paused_ns = held_ns if paused else 0
            self._ring.commit(
                self.committed, self._accounted, now, spent, phase=index, paused=paused_ns
            )
            self._accounted = now

        self._ring.set_phase(phase)
        due = self._gate.hold(self.committed, account)
        account(_STEP)
        self._take_gate_ns()
        return due

    def _save(self, reason: str) -> str:
        """Begin a checkpoint; return what went wrong, because training goes on without it."""
        self._metrics.flush()
        extra = {"config": self._config.state(), "metrics": self._metrics.last}
        try:
            self._saver.save(self.committed, reason=reason, extra=extra)
        except (OSError, PerdureError) as error:
            return str(error)
        self._saved_step = self.committed
        self._ring.add_mark(self.committed)
        return ""

    def _reached(self, agreed: Agreed, *, error: str) -> None:
        event = BoundaryReached(
            id=agreed.id,
            rank=self._ring.rank,
            step=self.committed,
            at_s=self._attachment.now(),
            error=error,
        )
        self._attachment.emit(event)

    def _take_gate_ns(self) -> int:
        gate_s, self._gate_s = self._gate_s, self._saver.gate_s
        return int((self._gate_s - gate_s) * 1e9)
