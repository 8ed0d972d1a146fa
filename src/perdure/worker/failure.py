"""A script's last exception, kept beside its output for the exit record.

Standard library only: this is also imported by `inject/sitecustomize.py`, before a script that
may want nothing else of perdure.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

ENV = "PERDURE_TRACEBACK"
"""Path of the file, in the environment of a rank that was started cold."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def save_failure(path: str, value: BaseException, trace: TracebackType | None) -> None:
    """Write `value` to `path`; a disk that is full or gone must not hide the exception."""
    try:
        lines = traceback.format_exception_only(type(value), value)
        error = lines[-1] if isinstance(value, SyntaxError) else lines[0]
        text = "".join(traceback.format_exception(type(value), value, trace))
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"error": error.strip().split("\n")[0], "traceback": text}, file)
    except (OSError, RecursionError, MemoryError, ValueError):
        return


def install_hook(path: str, pid: int) -> None:
    """Have exceptions that nobody catches saved as well, only in process `pid`.

    A script that puts its own hook in this one's place loses nothing but the copy.
    """
    before: Hook = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:
            save_failure(path, value, trace)
        before(kind, value, trace)

    sys.excepthook = hook
