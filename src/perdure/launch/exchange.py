"""What another program says, read to a bound in bytes: whoever floods is ended and named.

A login profile that prints without end, a disk full of names or a broken tool must not fill the
memory of whoever asks. The bound is far above any answer of ours.

What is followed comes over as many connections as it takes, each of which tells it from the
beginning; whoever shows its lines knows which were shown.
"""

import contextlib
import io
import os
import re
import select
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, AnyStr, Protocol

import msgspec

from perdure.model.errors import PlatformError
from perdure.model.input.plain import show_controls, show_output

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


FOLLOWS = {"-f", "--follow", "--watch"}
SILENCE_S = 60.0
"""Without a byte for so long, a place that has all it is asked for by now is given up."""
_LEFT_OUT = 60
"""Characters that are shown of a line that cannot be read."""


def print_output(line: str, prefix: str = "") -> None:
    """Print one line past a stream that has no colours; whole, also between threads."""
    write = getattr(sys.stdout, "write_exact", sys.stdout.write)
    write(f"{show_controls(prefix)}{show_output(line)}\n")
    sys.stdout.flush()


def name_first(names: Sequence[str], count: int = 3, between: str = ", ") -> str:
    """Return the first of some names, and how many more there are.

    >>> name_first(["a", "b", "c", "d", "e"]), name_first(["a"])
    ('a, b, c and 2 more', 'a')
    """
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{between.join(names[:count])}{more}"


def show_lines(
    command: Sequence[str], silence_s: float | None, env: Mapping[str, str] | None = None
) -> int:
    """Run a command of this machine, show its lines as they come, and return its exit code.

    Raises:
        UnfinishedError: for `silence_s` nothing came, neither a byte nor the end.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    try:
        for data in read_lines(listen(process.stdout, silence_s)):
            print_output(data.decode(errors="replace").removesuffix("\n"))
        return process.wait(silence_s)
    except subprocess.TimeoutExpired:
        raise UnfinishedError(
            f"{command[0]} says nothing, and does not end, for {silence_s:g} s",
            hint="this says nothing about the job; kubectl cluster-info says how the cluster is",
        ) from None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Lines(Protocol):
    """What takes the lines of a stream, each once."""

    shown: int
    """Lines that were new."""

    def begin(self) -> None:
        """Take what follows for the stream's beginning: a new connection tells it again."""

    def __call__(self, line: str) -> None:
        """Take a line."""


def make_lines(argv: Sequence[str], turn: threading.Event | None = None) -> Lines:
    """Return what shows the lines of a command that follows; those of ranks not before `turn`."""
    one = any(word.split("=")[0] == "--rank" for word in argv)
    return _LogLines("--json" in argv, one, turn) if argv[0] == "logs" else _Numbered()


class _LogLines:
    """Lines of ranks, each shown once: the n-th of a stream is the same on every connection."""

    def __init__(self, as_json: bool, one: bool, turn: threading.Event | None) -> None:
        self.shown = 0
        self._as_json, self._one, self._turn = as_json, one, turn
        self._seen: Counter[tuple[int, int, str]] = Counter()
        self._now: Counter[tuple[int, int, str]] = Counter()

    def begin(self) -> None:
        """A new connection tells everything from the beginning."""
        self._now.clear()

    def __call__(self, line: str) -> None:
        if self._turn is not None:
            self._turn.wait()
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:  # Of a line that is too long to be one; or none of ours.
            print(f"left out: {line[:_LEFT_OUT]!r}", file=sys.stderr, flush=True)
            return
        if "generation" not in row:  # The command's own error: there is no such job there.
            if self._as_json:
                print(line, end="", flush=True)
                return
            hint = f"\nhint: {row['hint']}" if row.get("hint") else ""
            print(f"perdure: error: {row.get('error')}{hint}", file=sys.stderr, flush=True)
            return
        stream = (row["generation"], row["rank"], row["stream"])
        self._now[stream] += 1
        if self._now[stream] <= self._seen[stream]:
            return
        self._seen[stream] += 1
        self.shown += 1
        if self._as_json:
            print(line, end="", flush=True)
        else:
            prefix = "" if self._one or row["rank"] < 0 else f"[rank {row['rank']}] "
            print_output(row["text"], prefix)  # Whole, also between threads.


class _Numbered:
    """Lines that begin with a sequence number, each shown once; others as they come."""

    _NUMBER = re.compile(r'\s*(?:\{"seq":)?(\d+)\b')

    def __init__(self) -> None:
        self.shown = 0
        self._last = 0

    def begin(self) -> None:
        """Numbers go on."""

    def __call__(self, line: str) -> None:
        match = self._NUMBER.match(line)
        if match:
            if int(match[1]) <= self._last:
                return
            self._last = int(match[1])
        self.shown += 1
        print(line, end="", flush=True)
