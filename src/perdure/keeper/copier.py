"""The process that copies the output of a node's ranks from their pipes to their files.

A rank writes into pipes. In the place of a file, a child that opens `/dev/stderr` by its name would
empty it. The copier outlives the keeper until the last pipe is empty, so a killed rank's last line
is kept. It ignores the signals that a site sends to all processes. Standard library only.
"""

import contextlib
import os
import resource
import select
import signal
import socket

from perdure.worker.start.streams import LossyFile

_CHUNK = 1 << 16
"""Bytes that one read takes, which are all that a pipe holds."""
_IGNORED = signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


def main(fd: int) -> None:
    """Serve the keeper at the other end of `fd`; leave when it is gone and every pipe is empty."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    orders = socket.socket(fileno=fd)
    files: dict[int, LossyFile] = {}
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    served = True

    def copy(pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe, _CHUNK)
            if data:
                with contextlib.suppress(OSError):
                    files[pipe].write(data)
                return
            poll.unregister(pipe)
            files.pop(pipe).close()
            os.close(pipe)

    while served or files:
        ready = [number for number, _ in poll.poll()]
        for each in files.keys() & ready:
            copy(each)
        if fd in ready:
            order, fds = b"", list[int]()
            with contextlib.suppress(ConnectionResetError):  # The keeper died before an answer.
                order, fds, _, _ = socket.recv_fds(orders, 64, 2)
            if order == b"+":
                pipe, file = fds  # If one is missing for want of room, the next copier gets both.
                files[pipe] = LossyFile(file, "wb")
                poll.register(pipe, select.POLLIN)
            elif order:
                for each in list(files):
                    copy(each)
                with contextlib.suppress(OSError):
                    orders.send(order)
            else:
                served = False
                poll.unregister(fd)
