"""What the parts of a job have in common as processes: log, signals, exit code, tasks, lines.

A message is checked once, where it comes in. One that cannot be read there is dropped with a line
in the log, and the next one is taken.

A part is cancelled by SIGTERM, and told when the `perdure run` that it belongs to is gone. Lines of
a socket may be of whatever length the other side makes them.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from perdure.model.errors import PerdureError, PlatformError
from perdure.model.input.plain import make_plain

log = logging.getLogger("perdure.part")

T = TypeVar("T")
RETRY_S_MAX = 60.0
"""Between two looks at what cannot be looked at."""


class Tasks:
    """Work beside the loop: kept until it has ended, and cancelled at the end."""

    def __init__(self) -> None:
        """Begin with none."""
        self._running: set[asyncio.Future[Any]] = set()

    def spawn(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Begin `work`."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def end(self) -> None:
        """Cancel what has not ended, and wait for it; how it ends is nobody's concern any more."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def wait_event(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Return whether `event` is set, which is waited for, but not for longer than `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(event.wait(), timeout_s)
    return False


async def run_until(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns; None once `event` is set before, which cancels it."""
    task, over = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        over.cancel()
        await asyncio.gather(task, over, return_exceptions=True)


async def keep_looking(
    look: Callable[[], Awaitable[float]],
    pause: Callable[[float], Awaitable[None]],
    *,
    failed: str,
    well: str,
) -> None:
    """Call `look` until cancelled, after each time pausing for as long as it says.

    What cannot be looked at is said to have `failed` once, and asked ever less often.
    """
    failures = 0
    while True:
        try:
            wait_s = await look()
        except PlatformError as error:
            failures += 1
            if failures == 1:
                log.warning("%s: %s%s", failed, error, error.hint and f" ({error.hint})")
            wait_s = min(RETRY_S_MAX, 2.0 ** min(failures, 10))
        else:
            if failures:
                log.info(well)
            failures = 0
        await pause(wait_s)


def set_up_log() -> None:
    """Have what is logged go to standard error, which is the part's log file."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )


def run_part(work: Coroutine[Any, Any, None], log: logging.Logger, leaving: str) -> int:
    """Do `work` as a process until it ends, or SIGTERM cancels it; return the exit code.

    `leaving` is said on SIGTERM: what goes on without this part.
    """
    set_up_log()

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await work

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        log.info("SIGTERM: leaving%s", leaving)
        return 128 + signal.SIGTERM
    except PerdureError as error:
        log.error("%s (%s)", error.message, error.hint)
        return error.exit_code
    return 0


def read_run_pid() -> int:
    """Return the pid of the `perdure run` that this part belongs to; 0 where there is none."""
    return int(os.environ.get("PERDURE_RUN_PID") or 0)


@contextlib.contextmanager
def watch_process(pid: int, gone: Callable[[], object]) -> Iterator[None]:
    """Call `gone` when process `pid` has ended; with pid 0, never."""
    loop, fd = asyncio.get_running_loop(), -1

    def call() -> None:
        loop.remove_reader(fd)
        gone()

    if pid:
        try:
            fd = os.pidfd_open(pid)
            loop.add_reader(fd, call)
        except ProcessLookupError:
            loop.call_soon(gone)
    try:
        yield
    finally:
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)


LINE_MAX = 16 << 20
"""Bytes of a line, as the limit of its reader."""


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, and nothing at the end.

    In the place of one that is longer than the reader's limit stands the reason, which no decoder
    takes for a message; what follows of that line is another one, or several.
    """
    try:
        return await reader.readline()
    except ValueError as error:
        return f"a line is too long: {error}\n".encode()


QUIET_S = 1.0
"""Seconds between two lines about dropped messages, so that a flood of them fills no disk."""


class DropLog:
    """Counts the messages that a process drops at its doors, and logs one a second."""

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        """Write to `log`."""
        self.count = 0
        """Messages dropped so far."""
        self._log, self._now = log, now
        self._said_at_s, self._unsaid = -math.inf, 0

    def note(self, what: object) -> None:
        """Count one message; `what` says whose it was and what is wrong with it."""
        self.count += 1
        now = self._now()
        if now - self._said_at_s < QUIET_S:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more)" if self._unsaid else ""
        self._log.error("dropped: %s%s", make_plain(str(what), 300), more)
        self._said_at_s, self._unsaid = now, 0
