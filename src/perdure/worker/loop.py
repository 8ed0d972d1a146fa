"""What happens around each step of a rank that has joined its job.

Where nothing is due a boundary is one record in the ring and three comparisons of integers.
"""

import time
from typing import TYPE_CHECKING, Any

from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.worker.attach import Attachment
from perdure.worker.metrics import MetricsBuffer
from perdure.worker.progress import Progress
from perdure.worker.settings import plan_steering, read_spec, read_steering
from perdure.worker.steering.cells import open_cells
from perdure.worker.steering.config import Config
from perdure.worker.steering.executor import Depth, Executor

if TYPE_CHECKING:  # It imports torch.
    from perdure.worker.checkpoint import Checkpointer


class StepLoop(Depth):
    """The steps of one rank in one generation."""

    def __init__(
        self, attachment: Attachment, saver: "Checkpointer", metrics: MetricsBuffer, config: Config
    ) -> None:
        """Join `attachment`'s job; nothing is restored before `begin`."""
        self.config = config
        self._attachment = attachment
        self._ring = attachment.ring
        self._saver = saver
        self._metrics = metrics
        self.progress = Progress(attachment)
        self._executor = Executor(
            self,
            rank=self._ring.rank,
            generation=self._ring.generation,
            emit=attachment.emit,
            now=attachment.now,
            line=attachment.control,
            cells=open_cells() if attachment.control is not None else None,
            orphan_s=read_spec().bus.orphan_s,
        )
        self._gate = self._executor.gate
        attachment.obey(self._gate.handle, SendBoundary, ResumeRanks)
        self._executor.forward_signals()  # They count once the loop runs.
        self.every_steps = 0
        self.save_at_end = False
        self.committed = 0
        self.stopping = False
        """Whether all ranks have agreed to stop here."""
        self.save_requested = False
        self._begun = False
        self._gate_s = 0.0
        """Seconds that steps up to this one have waited for checkpoints."""
        self._saved_step = -1
        self._restored = -1
        """Step of the checkpoint that was restored."""
        self._is_behind = False
        """Whether all loops so far have ended before that step."""

    def read_newest(self) -> tuple[int, dict[str, Any]]:
        """Return what `begin` will restore: its step (0 for none), the states of its objects.

        For trainers that must know where they go on before there is anything to restore into.
        """
        self.progress.enter_restore()
        return self._saver.read_newest()

    def begin(self, total: int | None = None) -> None:
        """Restore; every object has been registered by now. The loop ends at step `total`.

        If earlier loops have ended before the step of the checkpoint, what the script did after
        them is in the checkpoint: it is restored again, before the first loop that goes further.
        """
        if self._is_behind and (total is None or total >= self.committed):
            self.progress.enter_restore()
            self._saver.restore({})
            self.progress.resume(self.committed)
        if not self._begun:
            self._begun = True
            self._saver.check()
            self.progress.enter_restore()
            extra: dict[str, Any] = {}
            self.committed = self._saver.restore(extra)
            self.config.restore(extra.get("config", {}))
            self._saved_step = self.committed
            self.progress.resume(self.committed)
            plan_steering(self._gate, self.config, self.committed, read_steering())
            self._gate.advance(self.committed)
            self._executor.declare()
            self._restored = self.committed
        fresh = self.committed == self._restored
        self._is_behind = fresh and total is not None and total < self.committed
        self._gate_s = self._saver.gate_s
        self._gate.reopen()
        self._attachment.faults.step = self.committed
        self._executor.forward_signals(active=True)
        if self._gate.advance(self.committed):
            self.progress.start(time.monotonic_ns())
            self._stop_at_boundary(every=False)

    def aim(self, num_steps: int) -> None:
        """Tell how many steps this loop is to make, counted over the whole run; 0: not known."""
        self._ring.aim(self._executor.aim(num_steps))

    @property
    def speaks(self) -> bool:
        """Whether this is rank 0."""
        return self._ring.rank == 0

    def enter_step(self) -> None:
        """Begin a step: nothing between here and `commit_step` is perdure's."""
        self._saver.begin_step()
        self.progress.begin(self.committed)

    def commit_step(self) -> None:
        """Account for a finished step, and do what is due at its boundary."""
        self.committed += 1
        gate_s, before_s = self._saver.gate_s, self._gate_s
        self._gate_s = gate_s
        saving_ns = 0 if gate_s == before_s else int((gate_s - before_s) * 1e9)
        self.progress.commit(self.committed, saving_ns)
        agreed = self._gate.advance(self.committed)
        every = self.every_steps and self.committed % self.every_steps == 0
        if agreed or every or self.save_requested:
            self._stop_at_boundary(every=bool(every))

    def leave(self) -> None:
        """End the loop in good order: last checkpoint, writers done, promises answered."""
        self._attachment.faults.step = -1
        self._executor.end(self.committed)
        self._metrics.flush()
        self.account("overhead", "checkpoint")
        is_saved = self._saved_step == self.committed
        if is_saved:
            self._saver.close()
            is_saved = self._saver.unbegun != self.committed  # Else a rank had to skip it.
        if self.save_at_end and not is_saved:
            self._executor.save(self.committed, "end")
        self._saver.close()
        self.account("checkpoint")
        self.progress.finish()

    def abandon(self) -> None:
        """Note that the script left the loop by itself; what it is up to is not known."""
        self._saver.settle()
        self._executor.leave(f"the script left its loop at step {self.committed}")
        self._metrics.flush()

    def _stop_at_boundary(self, *, every: bool) -> None:
        """Do what is agreed for this step, and save where that is due `every` so many steps."""
        asked = "interval" if every else "asked" if self.save_requested else ""
        self._executor.stop_at(self.committed, asked)
        self.stopping, self.save_requested = self._executor.stopping, False
        self._gate_s = self._saver.gate_s

    def save(self, step: int, reason: str) -> None:
        """Begin a checkpoint of `step`; values that were logged up to it are sent first."""
        self._metrics.flush()
        extra = {"config": self.config.state(), "metrics": self._metrics.last}
        self._saved_step = step  # Also if this rank skips it: all ranks decide alike at the end.
        self._saver.save(step, reason=reason, extra=extra)
        self._ring.add_mark(step)  # What was done up to it is safe once it is written.
