"""The compiled recorder inside a rank: loaded by ctypes, attached to the rank's ring.

Everything that costs something for each collective is in `recorder.cpp`. A thread here sleeps
until a communicator is seen for the first time, and then says which global ranks are in it.
"""

import contextlib
import ctypes
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.model import ring as layout
from perdure.worker.native.build import find_library
from perdure.worker.recording.groups import read_group_timeout_s
from perdure.worker.recording.recorder import Members, Recorder
from perdure.worker.ring import RingWriter, pack_ranks

_RETRY_S = 0.05
_TRIES_MAX = 40
"""A group's first collective may come before torch has noted who is in it."""

_BEFORE = ctypes.CFUNCTYPE(ctypes.c_int)


class NativeLibrary:
    """The loaded library; its kernels are registered once for the life of the process."""

    def __init__(self, path: Path) -> None:
        """Load `path` and register its kernel for every operator of c10d.

        Raises:
            OSError: it cannot be loaded.
            RuntimeError: it was not made for this torch after all.
        """
        self._calls = calls = ctypes.CDLL(str(path))
        # A call of nanoseconds is not worth giving up the GIL for.
        quick = ctypes.PyDLL(str(path))
        calls.perdure_attach.argtypes = [ctypes.c_char_p]
        calls.perdure_attach.restype = ctypes.c_int
        calls.perdure_set_ranks.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        calls.perdure_set_before.argtypes = [ctypes.c_void_p]
        calls.perdure_set_raised.argtypes = [ctypes.c_void_p]
        calls.perdure_lost.restype = ctypes.c_int64
        self.blocked_ns: Callable[[], int] = quick.perdure_blocked_ns
        quick.perdure_blocked_ns.restype = ctypes.c_int64
        self.begin_backward: Callable[[], object] = quick.perdure_begin_backward
        quick.perdure_begin_backward.restype = None
        self.end_backward: Callable[[int], int] = quick.perdure_end_backward
        quick.perdure_end_backward.argtypes = [ctypes.c_int64]
        quick.perdure_end_backward.restype = ctypes.c_int64
        self._before: Any = None
        self._raised: BaseException | None = None
        names = list_operators()
        ops = [name.strip("_") for name in names]
        codes = [layout.OP_INDEX.get(op, layout.OP_INDEX["other"]) for op in ops]
        texts = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        numbers = (ctypes.c_int64 * len(names))(*codes)
        p2p = bytes(op in layout.POINT_TO_POINT for op in ops)
        if calls.perdure_register(texts, numbers, p2p, len(names)) <= 0:
            raise RuntimeError("no operator of c10d could be taken over")

    def attach(self, path: str) -> int:
        """Record into the ring at `path`; return a descriptor that tells of new communicators.

        Raises:
            OSError: the ring cannot be mapped.
        """
        descriptor = int(self._calls.perdure_attach(os.fsencode(path)))
        if descriptor < 0:
            raise OSError(f"{path} cannot be mapped")
        return descriptor

    def detach(self) -> None:
        """Record no more."""
        self._calls.perdure_detach()

    def stop_asking(self) -> None:
        """Let go of what runs on a device: the process is about to end."""
        self._calls.perdure_stop_asking()

    def forget_groups(self) -> None:
        """Forget the process groups, which were destroyed; new ones may have the same names."""
        self._calls.perdure_forget()

    def set_ranks(self, slot: int, ranks: tuple[int, ...]) -> None:
        """Say which global ranks are in the communicator of `slot`."""
        packed = pack_ranks(ranks)
        self._calls.perdure_set_ranks(slot, packed, len(packed) // 2)

    def set_before(self, before: Callable[[], None] | None) -> None:
        """Have `before` called in front of each collective.

        What it raises is raised in the main thread, once the collective was handed over: no
        exception passes the dispatcher and autograd's threads unchanged.
        """
        if before is None:
            self._calls.perdure_set_before(None)
            return  # The last callback is kept: a thread may be in it.

        def call() -> int:
            try:
                before()
            except BaseException as error:
                self._raised = error
                self._calls.perdure_set_raised(id(error))
                return 1
            return 0

        self._before = _BEFORE(call)
        self._calls.perdure_set_before(ctypes.cast(self._before, ctypes.c_void_p))

    def lost(self) -> int:
        """Return of how many collectives something could not be recorded."""
        return int(self._calls.perdure_lost())


class CompiledRecorder(Recorder):
    """Has the library record into a rank's ring, and names the ranks of communicators."""

    kind = "compiled"

    def __init__(self, ring: RingWriter, members: Members, library: NativeLibrary) -> None:
        """Record into `ring`.

        Raises:
            OSError: the library cannot map it.
        """
        self.library = library
        self._descriptor = library.attach(ring.path)
        super().__init__(ring, members)

    def stop(self) -> bool:
        """End the thread, and say once more who is in each communicator."""
        self._stop.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._descriptor, 1)
        ended = super().stop()
        self._name_all()
        self.library.stop_asking()
        return ended

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        tries = 0
        while not self._stop.is_set():
            if poller.poll(_RETRY_S * 1000 if tries else None):
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._descriptor)
                tries = _TRIES_MAX
            tries = 0 if not self._ring.attached or self._name_all() else tries - 1

    def _name_all(self) -> bool:
        """Say who is in each communicator of which that is not said yet; True if all is said."""
        known = True
        for slot, name in self._ring.list_unnamed_communicators():
            _, ranks = self._members(name.removesuffix(layout.P2P_SUFFIX))
            if ranks:
                self.library.set_ranks(slot, ranks)
                self._ring.set_comm_timeout(slot, read_group_timeout_s(name))
            else:
                known = False
        return known


_library: NativeLibrary | None = None
_why_not = ""


def load_library() -> NativeLibrary | None:
    """Return the library, loaded once; None where it is not built, or does not load."""
    global _library, _why_not
    if _library is None and not _why_not:
        path = find_library()
        if path is None:
            return None
        try:
            _library = NativeLibrary(path)
        except (OSError, RuntimeError, AttributeError) as error:
            _why_not = str(error)
    return _library


def why_not_loaded() -> str:
    """Return why a library that is there could not be loaded; empty if that was not tried."""
    return _why_not


def list_operators() -> list[str]:
    """Return the names of the c10d operators that this torch has."""
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))
