"""Standard streams of a rank: a full disk below them is no reason to end a training.

A script's output lies in files of the job's folder. Where their disk is full, its quota spent or
its server away, `print` would raise what no script expects, and at the end the interpreter would
turn success into exit code 120. What does not fit is dropped instead, counted, and said to be as
soon as there is room. Standard library only: `worker.cold` uses it in scripts that want no more.
"""

import errno
import io
import sys
from typing import Any

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE})


class LossyFile(io.FileIO):
    """A descriptor that takes whatever its disk does not."""

    lost = 0
    """Bytes not yet said to be."""

    def write(self, data: Any, /) -> int:
        """Write `data` or drop it, and return how much of it was taken.

        Raises:
            OSError: the fault is not the disk's.
        """
        try:
            if self.lost:
                super().write(f"\nperdure: {self.lost:,} bytes did not fit on the disk\n".encode())
                self.lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _DISK:
                raise
            size: int = memoryview(data).nbytes
            self.lost += size
            return size


def survive_full_disks() -> None:
    """Put streams that survive a full disk in the place of standard output and error."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if not isinstance(before, io.TextIOWrapper) or before.fileno() != fd:
            continue
        before.flush()
        raw = LossyFile(fd, "wb", closefd=False)
        raw.name = f"<{name}>"
        unbuffered = isinstance(before.buffer, io.FileIO)  # python -u
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        stream.__dict__["mode"] = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
