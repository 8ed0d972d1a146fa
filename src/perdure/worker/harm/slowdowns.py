"""Slow stages on purpose: extra time inside forward, backward or the data loader of every step.

The time is spent where a slow kernel or disk would spend it, so that whoever measures stages
measures it in the right one: before the first module's forward of a step, inside the autograd
engine at the root of a backward pass, and where a DataLoader's iterator makes its batch. Nothing
is patched until a fault is asked for, and everything is put back when it ends.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

STAGES = {"slow-forward": "forward", "slow-backward": "backward", "slow-data": "data"}


def arm_forward(before: Callable[[], None]) -> bool:
    """Have `before` called once, in the thread of the next forward pass; False without torch."""
    if "torch" not in sys.modules:
        return False
    from torch.nn.modules.module import register_module_forward_pre_hook

    lock = threading.Lock()
    handles: list[Any] = []

    def strike(module: Any, args: Any) -> None:
        with lock:
            mine = handles.pop() if handles else None
        if mine is not None:
            mine.remove()
            before()

    with lock:
        handles.append(register_module_forward_pre_hook(strike))
    return True


class Slowdown:
    """One stage of this process made slower, until `end`."""

    def __init__(self, stage: str, *, extra_s: float = 0.0, factor: float = 0.0) -> None:
        """Add `extra_s` a step to `stage`, or (`factor` - 1) times the usual step."""
        self._stage, self._extra_s, self._factor = stage, extra_s, factor
        self._undo: list[Callable[[], None]] = []
        self._slept = False
        self._slept_s = 0.0
        self._step_began = 0.0
        self._steps = 0
        self.over = False

    def begin(self) -> None:
        """Take effect from the next step on.

        Raises:
            ImportError: there is no torch in this process.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        hook = register_optimizer_step_post_hook(lambda *_: self._end_step())
        self._undo.append(hook.remove)
        match self._stage:
            case "forward":
                self._slow_forward()
            case "backward":
                self._slow_backward()
            case _:
                self._slow_data()

    def end(self) -> None:
        """Put everything back."""
        self.over = True
        while self._undo:
            self._undo.pop()()

    def _end_step(self) -> None:
        now = time.monotonic()
        if self._step_began and self._factor:
            usual_s = now - self._step_began - self._slept_s
            extra_s = (self._factor - 1) * usual_s
            self._extra_s = 0.5 * (self._extra_s + extra_s) if self._extra_s else extra_s
        self._step_began, self._slept_s, self._slept = now, 0.0, False
        self._steps += 1

    def _wait(self) -> None:
        """Spend the extra time, once a step."""
        if not self._slept and not self.over:
            self._slept = True
            self._slept_s += self._extra_s
            time.sleep(self._extra_s)

    def _slow_forward(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._undo.append(register_module_forward_pre_hook(lambda *_: self._wait()).remove)

    def _slow_backward(self) -> None:
        import torch.autograd

        module: Any = torch.autograd
        original = module._engine_run_backward

        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            root = next((r for r in roots if hasattr(r, "register_hook") and r.requires_grad), None)
            if root is None:
                self._wait()
                return original(roots, *args, **kwargs)
            handle = root.register_hook(lambda _: self._wait())
            try:
                return original(roots, *args, **kwargs)
            finally:
                handle.remove()

        module._engine_run_backward = run
        self._undo.append(lambda: setattr(module, "_engine_run_backward", original))

    def _slow_data(self) -> None:
        from torch.utils.data import dataloader

        names = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
        for kind in (vars(dataloader)[name] for name in names):
            original = kind._next_data

            def next_data(loader: Any, original: Any = original) -> Any:
                self._wait()
                return original(loader)

            kind._next_data = next_data
            self._undo.append(lambda k=kind, o=original: setattr(k, "_next_data", o))  # type: ignore[misc]


def call_wrongly(kind: str) -> None:
    """Call a collective that no other rank calls now: `wrong-op`, or else `wrong-size`."""
    import torch
    import torch.distributed as dist

    if kind == "wrong-op":
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.ones(1))
    else:
        dist.all_reduce(torch.ones(3))
