"""Standard streams that nobody has to read: a program that watches over a job never waits for them.

A pipe whose reader sleeps, or a terminal after Ctrl-S, takes what fits and then blocks whoever
writes. Here a thread writes, and what it is behind with is bounded: further lines are dropped and
counted, and how many they were is said in their place once the reader is back. Everything that a
rank prints is in its log file anyway. A reader that is gone (EPIPE, EIO) is written to no more.
"""

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TextIO

PENDING_MAX_BYTES = 1 << 20
STALL_S = 2.0
"""At the end, a reader that takes nothing for so long is left without the rest."""
_CHUNK = 1 << 16
_LOST = (
    "[perdure] {} lines are not shown: nobody read them; what ranks print is in their log files\n"
)


class UnreadStream(io.TextIOBase):
    """Stands in for `stream`; `write` never blocks."""

    def __init__(self, stream: TextIO, *, pending_max: int = PENDING_MAX_BYTES) -> None:
        """Write to the descriptor of `stream` from now on.

        Raises:
            OSError: it has none.
        """
        self._stream = stream
        self._fd = os.dup(stream.fileno())
        self.pending_max = pending_max
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._pending = self._written = self._dropped = 0
        self._at_line_start, self._skipping, self._gone, self._closing = True, False, False, False
        self._thread = threading.Thread(target=self._run, name="perdure output", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding of the stream behind it."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream behind it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream behind it, whose writer may block."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def flush(self) -> None:
        """Do nothing: what is written is on its way already."""

    def write(self, text: str) -> int:
        """Take `text`, or drop whole lines of it; return its length."""
        self._take(text.encode(self.encoding, "backslashreplace"))
        return len(text)

    def _take(self, data: bytes) -> None:
        with self._changed:
            if self._gone or not data:
                return
            if self._at_line_start:
                full = self._pending > 0 and self._pending + len(data) > self.pending_max
                self._skipping = full or (self._dropped > 0 and self._pending > 0)
                if self._closing:
                    self._skipping = False
            self._at_line_start = data.endswith(b"\n")
            if self._skipping:
                self._dropped += data.count(b"\n")
                return
            self._say_dropped()
            self._put(data)

    def keep_all(self) -> None:
        """Drop nothing any more: what is said at the end is short, and worth most."""
        with self._changed:
            self._closing = True

    def finish(self, stall_s: float = STALL_S) -> bool:
        """Wait until all is written; return False where the reader takes nothing for `stall_s`."""
        self.keep_all()
        with self._changed:
            self._say_dropped()
            written, since_s = self._written, time.monotonic()
            while self._pending and not self._gone:
                if self._written != written:
                    written, since_s = self._written, time.monotonic()
                left_s = since_s + stall_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, 0.2))
            return not self._gone

    def _say_dropped(self) -> None:
        if self._dropped:
            self._put(_LOST.format(self._dropped).encode())
            self._dropped = 0

    def _put(self, data: bytes) -> None:
        self._queue.append(data)
        self._pending += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                data = self._queue.popleft()
            try:
                for start in range(0, len(data), _CHUNK):
                    self._write_all(data[start : start + _CHUNK])
            except OSError:
                with self._changed:
                    self._gone, self._pending = True, 0
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._queue and not self._skipping:
                    self._say_dropped()

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                count = os.write(self._fd, data)
            except BlockingIOError:  # Somebody else made the descriptor non-blocking.
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
                continue
            data = data[count:]
            with self._changed:
                self._pending -= count
                self._written += count
                self._changed.notify_all()


@contextlib.contextmanager
def unread_streams() -> Iterator[None]:
    """Let standard output and error block nobody meanwhile; wait for their readers at the end."""
    before = sys.stdout, sys.stderr
    standing: list[UnreadStream] = []

    def stand_in(stream: TextIO) -> TextIO:
        try:
            stream.flush()
            standing.append(UnreadStream(stream))
        except (OSError, ValueError, AttributeError):  # None, closed, or not a file at all
            return stream
        return standing[-1]  # type: ignore[return-value]

    sys.stdout, sys.stderr = stand_in(sys.stdout), stand_in(sys.stderr)
    try:
        yield
    finally:
        for stream in standing:
            with contextlib.suppress(KeyboardInterrupt):
                stream.finish()
        sys.stdout, sys.stderr = before
