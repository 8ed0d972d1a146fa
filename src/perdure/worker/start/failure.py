"""A script's last exception, kept beside its output for the exit record.

Standard library only: this is also imported by `inject/sitecustomize.py`, before a script that
may want nothing else of perdure.
"""

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

ENV = "PERDURE_TRACEBACK"
"""Path of the file, in the environment of a rank that was started cold."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_ERROR_MAX = 4096
_TRACEBACK_MAX = 65_536
_SHORT_MAX = 4096
RESERVED_BYTES = 131_072
"""Of the file, kept for it before the script begins: its disk may be full when it ends."""


def _make_text(text: str, limit: int) -> str:
    """Return `text` as it can be encoded, of a long one a quarter from its beginning, then its end.

    Half of a surrogate pair (of a file name that is not UTF-8, or of cut JSON) becomes its escape.
    """
    if len(text) > limit:
        mark = f" … [{len(text):,} characters, cut] … "
        text = f"{text[: limit // 4]}{mark}{text[len(text) - limit + limit // 4 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def save_failure(path: str, value: BaseException, trace: TracebackType | None) -> None:
    """Write `value` to `path`; nothing that goes wrong here may hide the exception."""
    try:
        lines = traceback.format_exception_only(type(value), value)
        error = lines[-1] if isinstance(value, SyntaxError) else lines[0]
        text = "".join(traceback.format_exception(type(value), value, trace))
        first = _make_text(error.strip().split("\n")[0], _ERROR_MAX)
        _write(path, first, text)
        if not isinstance(value, Exception):
            return  # At code made by exec, Python forgets that it has to end by SIGINT.
        # Looking at files may take long, or never end; the exception is saved by then.
        from perdure.worker.start.unloadable import find_unloadable

        torn, why = find_unloadable(value, trace)
        if torn:
            _write(path, first, text, torn=torn, torn_why=why)
    except Exception:  # A full disk, no memory, an exception of somebody's that cannot be told.
        return


def _write(path: str, first: str, text: str, **more: str) -> None:
    data = b""
    for limit in (_TRACEBACK_MAX, _SHORT_MAX):
        told = {"error": first, "traceback": _make_text(text, limit)}
        told |= {name: _make_text(value, _SHORT_MAX) for name, value in more.items()}
        data = json.dumps(told).encode()
        if len(data) <= RESERVED_BYTES:
            break
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    with open(fd, "wb", buffering=0) as file:  # Over what is reserved, which stays so.
        file.write(data)
        file.truncate()


def install_hook(path: str, pid: int) -> None:
    """Have exceptions that nobody catches saved as well, only in process `pid`.

    A script that puts its own hook in this one's place loses nothing but the copy.
    """
    before: Hook = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        main = threading.current_thread() is threading.main_thread()
        if os.getpid() == pid and main:  # A thread's exception does not end the process.
            save_failure(path, value, trace)
        before(kind, value, trace)
        if os.getpid() == pid:
            leave_without_device(value)

    sys.excepthook = hook


def leave_without_device(value: BaseException) -> None:
    """Leave at once where `value` says that this process has lost its device.

    The interpreter would clear up first, and what is on the device might be waited for for ever.
    """
    code: int = getattr(value, "leaves_at_once", 0)
    if not code:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # It may be closed, its pipe or its disk full.
            stream.flush()
    os._exit(code)
