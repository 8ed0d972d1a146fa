"""What the ring says of an elastic rank: steps, and what a re-formation cost of them.

The time from a broken attempt until the new world is formed counts as overhead, and what is
redone afterwards as part of the step.
"""

import time
from typing import Literal

from perdure.model.ring import PHASE_INDEX
from perdure.model.signals.progress import Phase
from perdure.worker.attach import Attachment

_STEP = PHASE_INDEX["step"]
_KINDS = ("step", "checkpoint", "boundary", "overhead")


class Progress:
    """Writes the ring of `attachment`; without one, nothing."""

    def __init__(self, attachment: Attachment | None) -> None:
        """Begin before the first world."""
        self._attachment = attachment
        self._started = False
        self._accounted = 0
        self._begin = 0
        self._stalled_at = 0
        self._stalled = 0
        self._step = 0

    def enter_group(self) -> None:
        """The first world's process group is there."""
        if self._attachment is not None and not self._started:
            self._attachment.enter("group")

    def hold(self) -> None:
        """It is ready, and waits until the world has a place for it."""
        if self._attachment is not None:
            self._attachment.ring.set_phase("paused")

    def stall(self) -> None:
        """The rank is between two worlds."""
        self._stalled_at = self._stalled_at or time.monotonic_ns()

    def resume(self, step: int) -> None:
        """It is in a world, at `step`."""
        now = time.monotonic_ns()
        if self._stalled_at:
            self._stalled += now - self._stalled_at
            self._stalled_at = 0
        if self._attachment is None or self._started:
            return
        self._started = True
        self._attachment.leave_startup()
        ring = self._attachment.ring
        ring.set_phase("restore")
        ring.start_steps(step)
        ring.stamp("restored")
        self._step = step

    def begin(self, step: int) -> None:
        """A step begins."""
        now = time.monotonic_ns()
        attachment = self._attachment
        if attachment is not None:
            if not self._accounted:
                attachment.ring.stamp("first_step", now)
                attachment.ring.set_phase("step", now)
            attachment.faults.step = step
            if step >= attachment.faults.next_step:
                attachment.faults.act(step)
            if attachment.stages is not None:
                attachment.stages.begin_declared(now)
        self._accounted = self._accounted or now
        self._begin, self._stalled = now, 0

    def repeat(self) -> None:
        """The step under way was taken before and undone: its time is no progress."""
        self._stalled = time.monotonic_ns() - self._begin

    def enter(self, phase: Phase) -> None:
        """The rank does something else than the step under way."""
        if self._attachment is not None:
            self._attachment.ring.set_phase(phase)

    def account(
        self,
        kind: Literal["step", "checkpoint", "boundary", "overhead", "paused"],
        phase: Phase = "step",
    ) -> None:
        """Note what the time since the last record was spent on; the rank is in `phase`."""
        now = time.monotonic_ns()
        stalled = self._stalled
        if self._stalled_at:
            stalled, self._stalled_at = stalled + now - self._stalled_at, now
        spent = now - self._accounted - stalled
        parts = [spent if kind == each else 0 for each in _KINDS]
        parts[_KINDS.index("overhead")] += stalled
        if self._attachment is not None:
            self._attachment.ring.commit(
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
        """A micro-batch was done: progress, though no step."""
        if self._attachment is not None:
            self._attachment.ring.set_phase("step")

    def commit(self, step: int) -> None:
        """The step is applied; `step` are."""
        end = time.monotonic_ns()
        self._step = step
        attachment = self._attachment
        if attachment is not None:
            if attachment.stages is not None:
                attachment.stages.end_declared(step, end, 0)
            overhead = self._begin - self._accounted + self._stalled
            spent = (end - self._begin - self._stalled, 0, 0, overhead)
            attachment.ring.commit(step, self._accounted, end, spent, phase=_STEP)
        self._accounted = end

    def finish(self) -> None:
        """The loop has ended in good order."""
        if self._attachment is not None:
            self._attachment.faults.step = -1
            self._attachment.ring.stamp("finished")
            self._attachment.ring.set_phase("finished")
