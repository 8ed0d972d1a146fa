"""Compilations by torch are busy phases, without a line of the script.

A rank that compiles makes no step and enters no collective, for seconds or minutes, and others wait
for it: it looks like a hang from outside. torch says when a compilation begins and ends (of a
frame, of its backward pass, of a graph that is captured); meanwhile the rank is in the busy phase
`compile`, as it is while what compiles is imported. `torch._dynamo.reset()` forgets whoever
listens, so perdure listens anew after it. How long it took altogether is counted as well, since
the ledger tells the first steps' part of it from training.
"""

import contextlib
import threading
import time
from types import ModuleType
from typing import Any

from perdure.worker.busy import Busy
from perdure.worker.start.cold import after_import, while_importing
from perdure.worker.system.forking import free_in_child

AT_MOST_S = 600.0
"""A compilation that takes longer is told of, as any silence is: its workers may hang, too."""

_COMPILERS = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "functorch",
    "torch._subclasses", "torch.fx.experimental",
)  # fmt: skip
"""Whichever of them a script needs first imports hundreds of modules, some before the others."""


class Compilation(Busy):
    """A busy phase whose time is counted."""

    def __init__(self) -> None:
        """Declare nothing before it is entered."""
        super().__init__(b"compile", AT_MOST_S)

    def __enter__(self) -> None:
        """Begin it, in whichever thread."""
        tally.begin()
        super().__enter__()

    def __exit__(self, *ended: Any) -> None:
        """End it, however it has ended."""
        tally.end()
        super().__exit__(*ended)


class Tally:
    """How long training has waited for compilations so far; what overlaps counts once.

    A thread of the script's own that compiles beside training delays no step. Autograd's threads
    are none of Python's: who steps waits for what they compile.
    """

    def __init__(self) -> None:
        """Begin at nothing."""
        self._lock = free_in_child(threading.RLock())  # A signal's handler may come in the middle.
        self._depth = self._since = self._spent = 0
        self._stepping = threading.main_thread().ident

    def follow(self) -> None:
        """Note that the calling thread is the one that makes steps."""
        self._stepping = threading.get_ident()

    def begin(self) -> None:
        """Note that a compilation begins in the calling thread."""
        if self._is_beside():
            return
        with self._lock:
            if not self._depth:
                self._since = time.monotonic_ns()
            self._depth += 1

    def end(self) -> None:
        """Note that one ends; an end without a beginning is none."""
        if self._is_beside():
            return
        with self._lock:
            if self._depth == 1:
                self._spent += time.monotonic_ns() - self._since
            self._depth = max(0, self._depth - 1)

    def read_ns(self) -> int:
        """Return nanoseconds of those that ended: one whose end is never told costs nothing."""
        return self._spent

    def _is_beside(self) -> bool:
        own = threading.get_ident()
        return own != self._stepping and any(
            each.ident == own and not isinstance(each, threading._DummyThread)
            for each in threading.enumerate()
        )


tally = Tally()
"""This process's."""


def watch_compilations() -> None:
    """Declare compilations as soon as the script is ready to compile, and the imports before."""
    while_importing(_COMPILERS, Compilation())
    after_import("torch._dynamo", lambda dynamo: declare_compilations(dynamo.callback))


def declare_compilations(callbacks: ModuleType) -> None:
    """Declare each compilation from now on; `callbacks` is `torch._dynamo.callback`.

    What torch lacks of it (an older or newer one) leaves compilations undeclared.
    """
    phase = Compilation()

    def begin(*_: Any) -> None:
        with contextlib.suppress(Exception):  # No error of this may end a compilation.
            phase.__enter__()

    def end(*_: Any) -> None:
        with contextlib.suppress(Exception):
            phase.__exit__(None, None, None)

    def listen() -> None:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)

    handler: Any = getattr(callbacks, "callback_handler", None)
    if all(
        hasattr(handler, name)
        for name in ("register_start_callback", "register_end_callback", "clear")
    ):
        clear = handler.clear

        def clear_others() -> None:
            try:
                clear()
            finally:
                listen()

        handler.clear = clear_others
        listen()
