"""What the ring says of a rank whose steps are known: how far it is, and what its time went on.

The accounts are made so that they prove something: every record covers the time since the
record before, split into step, checkpoint, boundary, overhead and pause, so their sum is exactly
`last_step - first_step`. The time from a broken attempt at a step until the new world is formed
counts as overhead, and what is redone afterwards as part of the step.
"""

import time
from typing import Literal

from perdure.model.ring import PHASE_INDEX
from perdure.model.signals.progress import Phase
from perdure.worker.attach import Attachment, stand_alone
from perdure.worker.compiling import tally

Spent = Literal["step", "checkpoint", "boundary", "overhead", "paused"]
"""What time was spent on."""
_KINDS = ("step", "checkpoint", "boundary", "overhead")
_STEP = PHASE_INDEX["step"]


class Progress:
    """Writes the ring of `attachment`; without one, a ring that nobody reads."""

    def __init__(self, attachment: Attachment | None) -> None:
        """Begin before the first world."""
        self._attachment = attachment or stand_alone()
        self._ring, self._faults = self._attachment.ring, self._attachment.faults
        self._started = False
        self._accounted = 0
        """Monotonic ns up to which the accounts are complete; 0 before the first step."""
        self._begin = 0
        self._stalled_at = 0
        self._stalled = 0
        self._step = 0
        self._compiled: int | None = 0
        """What torch had compiled for when the step before ended, ns; None once a step went by
        without a compilation: what comes later is training's own."""

    def enter_restore(self) -> None:
        """The rank is about to load a checkpoint."""
        self._attachment.started = True
        self._ring.set_phase("restore")

    def stall(self) -> None:
        """The rank is between two worlds."""
        self._stalled_at = self._stalled_at or time.monotonic_ns()

    def resume(self, step: int) -> None:
        """The rank is in a world, at `step`."""
        now = time.monotonic_ns()
        if self._stalled_at:
            self._stalled += now - self._stalled_at
            self._stalled_at = 0
        self._faults.step = step
        if self._started:
            return
        self._started = True
        self.enter_restore()
        self._ring.start_steps(step)
        self._ring.stamp("restored")
        self._step = step

    def start(self, now: int) -> None:
        """The accounts begin, with the first step or with what is due before it."""
        self._accounted = now
        tally.follow()
        self._compiled = tally.read_ns()
        self._ring.stamp("first_step", now)
        self._ring.set_phase("step", now)

    def begin(self, step: int) -> None:
        """A step begins: nothing between here and `commit` is perdure's."""
        now = time.monotonic_ns()
        if not self._accounted:
            self.start(now)
        self._begin, self._stalled = now, 0
        stages = self._attachment.stages
        if stages is not None:
            stages.begin_declared(now)
        if step >= self._faults.next_step:
            self._faults.act(step)

    def repeat(self) -> None:
        """Count the step under way as no progress: it was taken before and undone."""
        self._stalled = time.monotonic_ns() - self._begin

    def account(self, kind: Spent, phase: Phase = "step") -> None:
        """Note what the time since the last record was spent on; the rank is in `phase` now.

        Before the first step there are no accounts.
        """
        if not self._accounted:
            self._ring.set_phase(phase)
            return
        now = time.monotonic_ns()
        stalled = self._stalled
        if self._stalled_at:
            stalled, self._stalled_at = stalled + now - self._stalled_at, now
        spent = now - self._accounted - stalled
        parts = [spent if kind == each else 0 for each in _KINDS]
        parts[_KINDS.index("overhead")] += stalled
        self._ring.commit(
            self._step,
            self._accounted,
            now,
            (parts[0], parts[1], parts[2], parts[3]),
            phase=PHASE_INDEX[phase],
            paused=spent if kind == "paused" else 0,
        )
        self._accounted = self._begin = now
        self._stalled = 0

    def mark_work(self) -> None:
        """A micro-batch was done: progress, though no step, and a unit of the step's work."""
        self._ring.set_phase("step")
        self.add_units(1.0)

    def add_units(self, amount: float) -> None:
        """Count what is known of the step's work; what its script declares comes before it."""
        stages = self._attachment.stages
        if stages is not None:
            stages.add_units(amount)

    def commit(self, step: int, saving_ns: int = 0) -> None:
        """The step is applied; `step` are. Within it a checkpoint was waited for `saving_ns`."""
        end = time.monotonic_ns()
        self._step = step
        stages = self._attachment.stages
        if stages is not None:
            stages.end_declared(step, end, saving_ns)
        stalled = self._stalled
        step_ns = end - self._begin - stalled - saving_ns
        spent = (step_ns, saving_ns, 0, self._begin - self._accounted + stalled)
        if self._compiled is not None:
            self._count_compilation(step_ns)
        self._ring.commit(step, self._accounted, end, spent, phase=_STEP)
        self._faults.step = step
        self._accounted = end

    def _count_compilation(self, step_ns: int) -> None:
        """Put down what torch has compiled for in a step of the first ones."""
        before, now = self._compiled or 0, tally.read_ns()
        self._compiled = now if now > before else None
        if now > before:
            self._ring.add_compilation(max(0, min(now - before, step_ns)))

    def finish(self) -> None:
        """The loop has ended in good order."""
        self._faults.step = -1
        self._ring.stamp("finished")
        self._ring.set_phase("finished")
