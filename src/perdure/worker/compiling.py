"""Compilations by torch are busy phases, without a line of the script.

A rank that compiles makes no step and enters no collective, for seconds or minutes, and others wait
for it: it looks like a hang from outside. torch says when a compilation begins and ends (of a
frame, of its backward pass, of a graph that is captured); meanwhile the rank is in the busy phase
`compile`, as it is while what compiles is imported. `torch._dynamo.reset()` forgets whoever
listens, so perdure listens anew after it.
"""

import contextlib
from types import ModuleType
from typing import Any

from perdure.worker.busy import declare_busy
from perdure.worker.start.cold import after_import

AT_MOST_S = 600.0
"""A compilation that takes longer is told of, as any silence is: its workers may hang, too."""


def watch_compilations() -> None:
    """Declare compilations as soon as the script is ready to compile, and the import before."""
    after_import(
        "torch._dynamo",
        lambda dynamo: declare_compilations(dynamo.callback),
        within=declare_busy("compile", at_most_s=AT_MOST_S),
    )


def declare_compilations(callbacks: ModuleType) -> None:
    """Declare each compilation from now on; `callbacks` is `torch._dynamo.callback`.

    What torch lacks of it (an older or newer one) leaves compilations undeclared.
    """
    phase = declare_busy("compile", at_most_s=AT_MOST_S)

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
