"""Finds what an import makes in a process beside its module: ranks of one image may not share it.

A fresh Python makes such a thing in each rank: an open file, a random state, a lock between
processes, a signal handler. A package that makes one at its import stays out of the image.
"""

import contextlib
import gc
import locale
import logging
import multiprocessing.synchronize
import os
import random
import resource
import signal
import sys
import tempfile
import threading

from perdure.adapters.host import list_children, read_text

_LIMITS = sorted(value for name, value in vars(resource).items() if name[:7] == "RLIMIT_")


def find_obstacle() -> str:
    """Return why this process may not be forked any more; an empty string if it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"runs {threads - 1} thread(s) of its own"
    for target in _list_files():
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            return f"opened {target}"
    return ""


class Footprint:
    """The state of the process at one moment; objects are counted from then on."""

    def __init__(self) -> None:
        """Read the state of the process."""
        tempfile.__dict__["_name_sequence"] = None
        gc.freeze()
        self._state = _read_state()

    def find_change(self) -> str:
        """Return what ranks would share that has been made since; an empty string if nothing."""
        if tempfile.__dict__["_name_sequence"] is not None:
            return "makes a temporary file or folder"
        for one in gc.get_objects():
            kind = type(one)
            if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
                return "makes a random state"
            if kind.__module__.startswith("numpy.random") and hasattr(kind, "random"):
                return "makes a random state of numpy"
            if issubclass(kind, multiprocessing.synchronize.SemLock):
                return "makes a lock between processes"
        now = _read_state()
        return next((what for what in now if now[what] != self._state[what]), "")


def _read_state() -> dict[str, object]:
    root = logging.getLogger()
    return {
        "opens a file": _list_files(),
        "starts a process": list_children(os.getpid()),
        "changes the folder": os.getcwd(),
        "changes the umask": [
            line for line in read_text("/proc/self/status").splitlines() if line[:6] == "Umask:"
        ],
        "handles a signal": [signal.getsignal(number) for number in signal.valid_signals()],
        "changes a hook": (sys.excepthook, sys.displayhook, threading.excepthook),
        "changes sys.path": list(sys.path),
        "changes a limit of Python": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "changes a limit": [resource.getrlimit(number) for number in _LIMITS],
        "changes the locale": locale.setlocale(locale.LC_ALL),
        "changes the root logger": (root.level, list(root.handlers)),
        "draws random numbers": random.getstate(),
        "changes the default folder of temporary files": tempfile.tempdir,
    }


def _list_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(one for one in found if not one.startswith("/proc/"))
