"""What another program says, read to a bound in bytes: whoever floods is ended and named.

A login profile that prints without end, a disk full of names or a broken tool must not fill the
memory of whoever asks. The bound is far above any answer of ours.
"""

import contextlib
import io
import os
import select
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, AnyStr

from perdure.model.errors import PlatformError

SAID_MAX = 64 << 20
"""Bytes of an answer, with what was said beside it."""
LINE_MAX = 16 << 20
"""Bytes of one line; a longer one comes in pieces."""
_CHUNK = 1 << 16


def last_line(text: str, otherwise: str = "") -> str:
    r"""Return the last line of what a program said that is not blank, or else `otherwise`.

    >>> last_line("Traceback:\nKeyError: 7\n\n"), last_line("", "it said nothing")
    ('KeyError: 7', 'it said nothing')
    """
    return next((line for line in reversed(text.splitlines()) if line.strip()), otherwise)


class UnreachedError(PlatformError):
    """The connection was not made, or broke: nothing is known of what it was for."""


class UnfinishedError(UnreachedError):
    """A connection was made, and what was asked there did not end in time: the machine lives."""


class FloodError(UnfinishedError):
    """Whoever was asked says more than anybody wants to hear; asked again, it would again."""


def make_flood(name: str, bytes_max: int) -> FloodError:
    """Return what to raise where `name` has said more than `bytes_max`."""
    return FloodError(
        f"{name} says more than {bytes_max >> 20} MiB: not read on",
        hint="does something there, such as a login profile, print without end?",
    )


def exchange(
    process: "subprocess.Popen[bytes]",
    stdin: bytes,
    *,
    name: str,
    timeout_s: float,
    bytes_max: int = SAID_MAX,
) -> tuple[bytes, bytes]:
    """Tell a process `stdin`; return what it says on both streams until it closes them.

    All three are pipes. The process is the caller's to end, however this ends.

    Raises:
        subprocess.TimeoutExpired: it goes on for longer than `timeout_s`.
        FloodError: it says more than `bytes_max`; the message calls it `name`.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + timeout_s
    said: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): []}
    left, count = memoryview(stdin), 0
    with selectors.DefaultSelector() as selector:
        for out in said:
            selector.register(out, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin.fileno(), selectors.EVENT_WRITE)
        while selector.get_map():
            remaining_s = deadline - time.monotonic()
            ready = selector.select(remaining_s) if remaining_s > 0 else []
            if not ready:
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            for key, _ in ready:
                if key.fd not in said:
                    left = left[_write(key.fd, left) :]
                    if not left:
                        selector.unregister(key.fd)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fd)
                count += len(chunk)
                if count > bytes_max:
                    raise make_flood(name, bytes_max)
                said[key.fd].append(chunk)
    answer, complaints = (b"".join(chunks) for chunks in said.values())
    return answer, complaints


def _write(fd: int, data: memoryview) -> int:
    """Return how much of `data` was taken; all of it by one that reads no more."""
    try:
        return os.write(fd, data[:_CHUNK])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def run_bounded(
    command: Sequence[str],
    *,
    name: str,
    timeout_s: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """Run a program of this machine to its end; return how it ended.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it does not end in time.
        FloodError: it says more than `SAID_MAX`.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    try:
        out, err = exchange(process, stdin, name=name, timeout_s=timeout_s)
        return subprocess.CompletedProcess(command, process.wait(timeout_s), out, err)
    finally:
        process.kill()
        process.wait()
        close_pipes(process)


def close_pipes(process: "subprocess.Popen[bytes]") -> None:
    """Close this end of a process's pipes."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def read_lines(pipe: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of a pipe as they come; one of more than `LINE_MAX` comes in pieces."""
    while line := pipe.readline(LINE_MAX):
        yield line


def listen(pipe: IO[bytes], silence_s: float | None) -> IO[bytes]:
    """Return what reads `pipe`, and raises `TimeoutExpired` after `silence_s` without a byte.

    Only its own waits count: whoever reads it may take their time with what has come.
    """
    return io.BufferedReader(_Listener(pipe.fileno(), silence_s))


class _Listener(io.RawIOBase):
    def __init__(self, fd: int, silence_s: float | None) -> None:
        self._fd, self._silence_s = fd, silence_s

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not select.select([self._fd], [], [], self._silence_s)[0]:
            raise subprocess.TimeoutExpired("", self._silence_s or 0.0)
        return os.readv(self._fd, [into])
