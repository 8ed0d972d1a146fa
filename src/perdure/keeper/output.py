"""The keeper's end of its ranks' output: a pipe for each stream, and the process that copies them.

The keeper has every pipe open for reading and writing. If the copier dies, ranks get no SIGPIPE and
the next copier goes on. It may lose at most the 64 KiB that the dead one had read last.
"""

import errno
import os
import resource
import signal
import socket
from collections.abc import Callable, Container

from perdure.adapters.host import send_signal
from perdure.keeper.execution import start_copier

_DRAIN_S = 2.0
"""Seconds to wait for the copier, whose disk may hang."""
_COPIER_FILES = 12
"""Files that a copier has open besides a pipe and a log for each stream."""


class RankOutput:
    """The pipes of one keeper's ranks, by the files that they are copied to."""

    def __init__(self, log: Callable[[str], None]) -> None:
        """Open no pipe yet."""
        self._log = log
        self._pipes: dict[str, int] = {}
        self._orders: socket.socket | None = None
        self.pid = 0
        """The copier; 0 if there is none."""
        self._asked = self._answered = 0

    def start(self) -> None:
        """Start a copier and give it all pipes."""
        if self._orders is not None:
            self._orders.close()
        self._asked = self._answered = 0
        try:
            self.pid, self._orders = start_copier()
            self._orders.settimeout(_DRAIN_S)
            for path in self._pipes:
                self._hand_over(path)
        except OSError as error:  # The next tick tries again.
            self._log(f"the ranks' output waits: {error}")
            self._end_copier()

    def open(self, path: str) -> None:
        """Have a pipe for the file at `path`.

        Raises:
            OSError: the file cannot be opened, or there is no file descriptor left.
        """
        if path in self._pipes:
            return
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if 0 <= files_max < 2 * len(self._pipes) + 2 + _COPIER_FILES:
            why = f"these ranks need more open files than ulimit -n allows ({files_max})"
            raise OSError(errno.EMFILE, why)
        if not self.pid:
            self.start()
        read, write = os.pipe()
        try:
            self._pipes[path] = os.open(f"/proc/self/fd/{read}", os.O_RDWR)
        finally:
            os.close(read)
            os.close(write)
        try:
            self._hand_over(path)
        except OSError:
            os.close(self._pipes.pop(path))
            raise

    def name_pipe(self, path: str) -> str:
        """Return the name under which a rank opens the pipe for the file at `path`."""
        return f"/proc/{os.getpid()}/fd/{self._pipes[path]}"

    def drain(self) -> None:
        """Wait until all that was written before has been copied.

        If the copier is late already, nothing waits for it again.
        """
        for _ in range(2):
            if self._orders is None:
                return
            late = self._answered < self._asked
            self._asked += 1
            try:
                self._orders.settimeout(0.0 if late else _DRAIN_S)
                self._orders.send(str(self._asked).encode())
                while self._answered < self._asked:
                    answer = self._orders.recv(64)
                    if not answer:
                        raise ConnectionResetError
                    self._answered = int(answer)
                return
            except (TimeoutError, BlockingIOError):
                return
            except OSError:  # It has died.
                self.start()

    def close_all_but(self, paths: Container[str]) -> None:
        """Close the pipes of ranks that have ended; the copier goes on until they are empty."""
        for path in [path for path in self._pipes if path not in paths]:
            os.close(self._pipes.pop(path))

    def tick(self) -> None:
        """Replace a copier that has died: ranks would wait for it."""
        if not self.pid:
            self.start()

    def note_reaped(self, pid: int) -> None:
        """Note that process `pid` was waited for."""
        if pid == self.pid:
            self.pid = 0

    def close(self) -> None:
        """Close all pipes; the copier leaves once it has copied the rest."""
        self.drain()
        self.close_all_but(())
        if self._orders is not None:
            self._orders.close()

    def _hand_over(self, path: str) -> None:
        assert self._orders is not None
        pipe = os.open(f"/proc/self/fd/{self._pipes[path]}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                socket.send_fds(self._orders, [b"+"], [pipe, file])
            finally:
                os.close(file)
        finally:
            os.close(pipe)

    def _end_copier(self) -> None:
        if self.pid:
            send_signal(self.pid, signal.SIGKILL)
