"""Compilations by torch are busy phases, without a line of the script.

A rank that compiles makes no step and enters no collective, for seconds or minutes, and others wait
for it: it looks like a hang from outside. torch says when a compilation begins and ends (of a
frame, of its backward pass, of a graph that is captured); meanwhile the rank is in the busy phase
`compile`. A script that calls `torch._dynamo.reset()` removes whoever listens, perdure too.
"""

import contextlib
from types import ModuleType
from typing import Any

from perdure.worker.busy import declare_busy

AT_MOST_S = 600.0
"""A compilation that takes longer is told of, as any silence is: its workers may hang, too."""


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

    handler: Any = getattr(callbacks, "callback_handler", None)
    if hasattr(handler, "register_start_callback") and hasattr(handler, "register_end_callback"):
        handler.register_start_callback(begin)
        handler.register_end_callback(end)
