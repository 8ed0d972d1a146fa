"""Where each step of a rank goes: data, forward, backward, optimizer, blocked, other.

Seen without a line in the script, by thin stamps around a DataLoader's `__next__`, the call of
the autograd engine, and an optimizer's step (torch's own global hooks). Time passes from one
stamp to the next, so the parts add up to the step by construction, and what a rank was blocked
for in collectives, as its recorder counts it, is taken out of whichever stage it fell into.

Without `run.steps` a step ends with the step of the optimizer that was seen first: others, as a
GAN has, add to it. Host times: of a rank that trains on a device, whose host runs ahead of it and
waits for it wherever a value is asked for, they say nothing of its work, and none are written.
What another thread does is not looked at, nor what dynamo traces.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from perdure.worker.ring import RingWriter

DATA, FORWARD, BACKWARD, OPTIMIZER, WAIT, OTHER = range(6)
_OTHERS_MAX = 64
"""The first optimizer is forgotten after so many steps of others without one of its own."""


class Blocking(Protocol):
    """What is compiled of a recorder: it knows for how long the training was blocked."""

    def blocked_ns(self) -> int:
        """Return nanoseconds blocked in collectives so far."""

    def begin_backward(self) -> object:
        """Count what autograd's threads are blocked for as well."""

    def end_backward(self, began: int) -> int:
        """Count what the end of the backward pass that began at `began` was held up for."""


class StepStamps:
    """The stages of the step under way. Only the thread that made it counts."""

    def __init__(self, ring: RingWriter, recorder: Blocking) -> None:
        """Write steps that end into `ring`."""
        self._ring = ring
        self._recorder = recorder
        self._blocked_ns = recorder.blocked_ns
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._parts = [0] * 6
        self._mark = self._begin = 0
        """Up to where time is accounted for, and where the step began; 0 before the first."""
        self._blocked = 0
        self._depth = 0
        self._in_optimizer = 0
        self._first: weakref.ref[Any] | None = None
        self._others = 0
        self._step = 0
        self._ahead = False
        """Whether this rank trains on a device."""
        self._work = self._units = 0.0
        """What the script has declared for the step, and units of work that perdure has counted."""
        self._declared = False
        """Whether `run.steps` says where steps begin and end."""
        self._suspended = 0
        """Since when time counts for no step, ns; 0 where it counts."""
        self._phases = 0
        """Busy phases that the training thread is in."""

    @property
    def here(self) -> bool:
        """Whether this is the training thread, not inside a stage already."""
        return threading.get_ident() == self._thread and os.getpid() == self._pid

    def begin_declared(self, now: int) -> None:
        """Begin a step of `run.steps` at `now`."""
        self._declared = True
        self._restart(now)

    def end_declared(self, step: int, now: int, stalled_ns: int) -> None:
        """End it at `now`: `step` steps are committed, `stalled_ns` of it was a checkpoint's."""
        self._advance(OTHER, now)
        stalled = min(stalled_ns, self._parts[OPTIMIZER])
        self._parts[OPTIMIZER] -= stalled
        self._parts[OTHER] += stalled
        self._finish(step, now)

    def add_work(self, amount: float) -> None:
        """Add what the script declares for the step under way; nan where it cannot be told."""
        self._work += amount

    def add_units(self, amount: float) -> None:
        """Count what perdure itself knows of the step's work; what is declared comes before it."""
        self._units += amount

    def suspend(self) -> None:
        """Begin a declared busy phase, such as an evaluation: its time is no part of a step."""
        if self.here:
            now = time.monotonic_ns()
            self._advance(OTHER, now)
            self._suspended = self._suspended or now
            self._phases += 1

    def resume(self) -> None:
        """End a declared busy phase; the step goes on as if it had begun later by so much."""
        if not self.here:
            return
        self._phases -= 1
        if self._suspended and self._phases <= 0:
            now, since = time.monotonic_ns(), self._suspended
            self._suspended = 0
            self._begin += now - since if self._begin else 0
            self._mark, self._blocked = now, self._blocked_ns()

    def mark(self, stage: int) -> None:
        """Count the time since the last mark as `stage`'s: a stage begins or ends here."""
        self._advance(stage, time.monotonic_ns())

    def run_backward(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the engine; a pass within a pass (activation checkpoints) is part of it."""
        if self._depth or not self.here:
            return run(*args, **kwargs)
        began = time.monotonic_ns()
        self._advance(FORWARD, began)
        self._depth += 1
        self._recorder.begin_backward()
        try:
            return run(*args, **kwargs)
        finally:
            self._depth -= 1
            self._recorder.end_backward(began)
            self._advance(BACKWARD, time.monotonic_ns())

    def before_optimizer(self, optimizer: Any) -> None:
        """Begin an optimizer's step; one inside a backward pass is part of that pass."""
        if self._depth or not self.here:
            return
        self._in_optimizer = id(optimizer)
        self._ahead = self._ahead or runs_ahead(optimizer)
        self._advance(OTHER, time.monotonic_ns())

    def after_optimizer(self, optimizer: Any) -> None:
        """End an optimizer's step and, with the first optimizer's, the training step."""
        if self._depth or self._in_optimizer != id(optimizer) or not self.here:
            return
        self._in_optimizer = 0
        now = time.monotonic_ns()
        self._advance(OPTIMIZER, now)
        if self._declared:
            return
        first = self._first() if self._first is not None else None
        if first is not optimizer:
            self._others += 1
            if first is not None and self._others < _OTHERS_MAX:
                return
            self._first = weakref.ref(optimizer)
        self._others = 0
        self._step += 1
        self._finish(self._step, now)

    def _advance(self, part: int, now: int) -> None:
        """Give the time since the last stamp to `part`, but for what was blocked."""
        if self._suspended:
            return
        blocked = self._blocked_ns()
        if self._mark:
            elapsed = now - self._mark
            waited = min(blocked - self._blocked, elapsed)
            self._parts[WAIT] += waited
            self._parts[part] += elapsed - waited
        self._mark, self._blocked = now, blocked

    def _finish(self, step: int, now: int) -> None:
        now = self._suspended or now
        if self._begin and not self._ahead:
            work = self._work or self._units
            self._ring.add_stages(step, self._begin, now, tuple(self._parts), work)
        self._restart(now)

    def _restart(self, now: int) -> None:
        self._parts = [0] * 6
        self._work = self._units = 0.0
        self._begin = self._mark = now
        self._blocked = self._blocked_ns()


def runs_ahead(optimizer: Any) -> bool:
    """Return whether the host runs ahead of what `optimizer` updates, or of CUDA at all."""
    import torch

    with contextlib.suppress(Exception):  # Whatever an optimizer of somebody's own has there.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return True
        return any(not each.is_cpu for each in optimizer.param_groups[0]["params"][:1])
    return False


def install_stages(ring: RingWriter, recorder: Blocking | None) -> StepStamps | None:
    """Begin to stamp stages into `ring`; None where it is turned off or cannot be done.

    Without a recorder that knows what was blocked there are none: they would name the all-reduce
    of a slow rank as its peers' slow backward pass.
    """
    if os.environ.get("PERDURE_STAGES", "") == "off" or recorder is None:
        return None
    import torch

    stamps = StepStamps(ring, recorder)
    _stamp_backward(torch.autograd, stamps)
    _stamp_optimizers(stamps)
    loader = sys.modules.get("torch.utils.data.dataloader")
    if loader is not None:
        _stamp_loader(loader, stamps)
    return stamps


def _stamp_backward(autograd: Any, stamps: StepStamps) -> None:
    """Wrap what `backward` and `grad` call: the public functions stay the same objects."""
    run = getattr(autograd, "_engine_run_backward", None)
    if run is None:
        return

    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        return stamps.run_backward(run, args, kwargs)

    autograd._engine_run_backward = run_backward


def _stamp_optimizers(stamps: StepStamps) -> None:
    import torch
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def make_hook(stamp: Callable[[Any], None]) -> Callable[..., None]:
        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not torch.compiler.is_compiling():
                stamp(optimizer)

        return hook

    register_optimizer_step_pre_hook(make_hook(stamps.before_optimizer))
    register_optimizer_step_post_hook(make_hook(stamps.after_optimizer))


def _stamp_loader(module: Any, stamps: StepStamps) -> None:
    iterator = module._BaseDataLoaderIter
    fetch = iterator.__next__

    @functools.wraps(fetch)
    def fetch_next(self: Any) -> Any:
        if not stamps.here:
            return fetch(self)
        stamps.mark(OTHER)
        try:
            return fetch(self)
        finally:
            stamps.mark(DATA)

    iterator.__next__ = fetch_next
