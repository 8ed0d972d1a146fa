"""Finds what an import makes in a process beside its module: ranks of one image may not share it.

A fresh Python makes such a thing in each rank: an open file, a random state, a lock between
processes, a signal handler. A package that makes one at its import stays out of the image.
"""

import contextlib
import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing.synchronize
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings

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
        self._state = _read_state()
        gc.freeze()

    def find_change(self) -> str:
        """Return what ranks would share that has been made since; an empty string if nothing."""
        if tempfile.__dict__["_name_sequence"] is not None:
            return "makes a temporary file or folder"
        for one in gc.get_objects():
            kind = type(one)
            if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
                return "makes a random state"
            if str(kind.__module__).startswith("numpy.random") and hasattr(kind, "random"):
                return "makes a random state of numpy"
            if issubclass(kind, multiprocessing.synchronize.SemLock):
                return "makes a lock between processes"
        now = _read_state()
        return next((what for what in now if now[what] != self._state[what]), "")


class PatchWatch:
    """What modules and classes hold, to find a package whose import changes those of another.

    A rank that never imports that package would meet the change. A new attribute is none: it
    changes nothing that others have.
    """

    def __init__(self) -> None:
        """Read the modules that there are."""
        self._known: set[str] = set()
        self._parts: list[tuple[str, object, dict[str, object]]] = []
        self.find_change("")

    def find_change(self, package: str) -> str:
        """Return what the import of `package` has changed elsewhere; an empty string if nothing."""
        change = ""
        for index, (name, owner, before) in enumerate(self._parts):
            with contextlib.suppress(Exception):  # Values may have any `__eq__`.
                if before == vars(owner):
                    continue
            now = dict(vars(owner))
            self._parts[index] = name, owner, now
            inherited = owner.__mro__[1:] if type(owner) is type else ()
            keys = [
                key
                for key in now
                if before.get(key, before) is not now[key]
                and (key in before or any(key in vars(base) for base in inherited))
            ]
            patched = sorted(key for key in keys if _is_patch(key, now[key], package))
            if patched and name.partition(".")[0] != package:
                change = change or f"changes {name}.{patched[0]}"
        for name in sys.modules.keys() - self._known:
            self._known.add(name)
            parts = getattr(sys.modules[name], "__dict__", None)
            if type(parts) is not dict or name == "__main__":
                continue
            self._parts.append((name, sys.modules[name], dict(parts)))
            for each in list(parts.values()):
                if type(each) is type and each.__module__ == name:
                    self._parts.append((f"{name}.{each.__name__}", each, dict(vars(each))))
        return change


def _is_patch(key: str, value: object, package: str) -> bool:
    """Return whether the import of `package` has given `value` to an attribute of another one."""
    if isinstance(value, types.ModuleType):
        return False
    if isinstance(value, types.FunctionType | type):
        return str(value.__module__).partition(".")[0] == package
    kind = type(value).__module__.partition(".")[0]
    return kind == package or (kind == "builtins" and not key.startswith("_"))


def _read_state() -> dict[str, object]:
    root, numpy = logging.getLogger(), sys.modules["numpy"]
    return {
        "opens a file": _list_files(),
        "starts a process": list_children(os.getpid()),
        "changes the folder": os.getcwd(),
        "changes the umask": [
            line for line in read_text("/proc/self/status").splitlines() if line[:6] == "Umask:"
        ],
        "handles a signal": [signal.getsignal(number) for number in signal.valid_signals()],
        "changes a hook": (
            sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook,
            warnings.showwarning, faulthandler.is_enabled(),
        ),
        "changes sys.path": list(sys.path),
        "changes the finders": (sys.meta_path[:1], list(sys.path_hooks)),
        "changes a limit of Python": (
            sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(), gc.get_threshold(),
            sys.get_int_max_str_digits(), socket.getdefaulttimeout(), decimal.getcontext().prec,
        ),
        "changes a limit": [resource.getrlimit(number) for number in _LIMITS],
        "changes the locale": locale.setlocale(locale.LC_ALL),
        "changes the root logger": (root.level, list(root.handlers)),
        "draws random numbers": (random.getstate(), numpy.random.get_state()[1].tobytes()),
        "changes the default folder of temporary files": tempfile.tempdir,
        "changes a default of numpy": (numpy.geterr(), repr(numpy.get_printoptions())),
        "changes a default of torch": _read_torch(),
    }  # fmt: skip


def _read_torch() -> object:
    torch = sys.modules["torch"]
    return [
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.backends.cudnn.benchmark,
        torch.initial_seed(),
        torch.is_anomaly_enabled(),
        torch.get_default_device(),
        torch.multiprocessing.get_sharing_strategy(),
        torch.multiprocessing.get_start_method(allow_none=True),
        vars(torch._tensor_str.PRINT_OPTS).copy(),
    ]


def _list_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(one for one in found if not one.startswith("/proc/"))
