"""A file's memory, mapped, and known to a device that copies to it.

A device copies by itself, and at full speed, only to memory that is registered with it. Where it
cannot be, copies are merely slower. It is registered until just before it is unmapped: an address
that is still registered when it is mapped anew could be used no more.
"""

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class MappedFile:
    """A file that stays mapped; all of it is there before it is written."""

    def __init__(self, path: Path, size: int) -> None:
        """Make `path` anew with `size` bytes.

        Raises:
            OSError: there is no room. Writing would be a SIGBUS.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
            self._memory = mmap.mmap(descriptor, max(size, 1))
        finally:
            os.close(descriptor)
        self.size = size
        self._known = False
        self._unregister: Callable[[], object] = lambda: None

    def view(self) -> Tensor:
        """Return its bytes; the file is unmapped once no such view is left."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)[: self.size]

    def register(self, device: torch.device) -> None:
        """Have `device` copy to it by itself, if that can be; it is tried once."""
        if self._known:
            return
        self._known = True
        address, size = self.view().data_ptr(), len(self._memory)
        if _call(device, lambda runtime: runtime.cudaHostRegister(address, size, 0)):
            # Where nobody calls `close`, it is called before this object lets go of the memory.
            self._unregister = last = weakref.finalize(self, _unregister, device, address)
            last.atexit = False  # Then the device's driver goes as well.

    def close(self) -> None:
        """Unregister it; whoever still has a view may go on using that."""
        self._unregister()


def _unregister(device: torch.device, address: int) -> None:
    _call(device, lambda runtime: runtime.cudaHostUnregister(address))


def _call(device: torch.device, call: Callable[[Any], Any]) -> bool:
    """Return whether a call of CUDA's runtime has succeeded.

    It has a thread of its own, since CUDA keeps an error for the next of its thread's kernels.
    """
    succeeded = []

    def run() -> None:
        # Torch without CUDA, or a build or a platform without such calls, refuses. Without the
        # device named, CUDA would begin to use the first one.
        refused = contextlib.suppress(RuntimeError, AssertionError, AttributeError)
        with refused, torch.cuda.device(device):
            succeeded.append(int(call(torch.cuda.cudart())) == 0)  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=run, name="perdure-register", daemon=True)
    thread.start()
    thread.join()
    return succeeded == [True]
