"""Experiment trackers that are told of the job while it runs: a process for each, beside the loop.

The process is `perdure metrics JOB --follow`, which reads the job's files: the loop hands it
nothing, and waits for nothing. It is nicer to the ranks than they are to one another, leaves when
this one does, and whatever becomes of it is a line in the log and another try, after a pause that
grows. At the job's end it has a quarter of `tracking.timeout_s` to tell the rest.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO

from perdure.files.regular import open_file
from perdure.model.input.plain import make_plain
from perdure.model.input.raw import restore_text
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.part import Tasks, wait_event
from perdure.service.processes import describe_exit, part_command

log = logging.getLogger("perdure.tracking")

_PAUSE_S, _PAUSE_S_MAX = 2.0, 300.0
_END_SHARE = 0.25
"""Of `tracking.timeout_s`: how long the job's end waits for trackers at most."""
_LEAVE_S = 1.0
"""Given to a process that is asked to leave."""
CONTROLLER_PID = "PERDURE_CONTROLLER_PID"
"""Variable of such a process: whom it leaves with."""
_SAID_BYTES = 4096
_OF_TRACKERS = ("WANDB_", "MLFLOW_", "DATABRICKS_")
"""What of the job file's [env] is theirs; the shell's environment they have as a whole."""


class Trackers:
    """The processes that tell trackers, each kept up; `finish` sees them to their end."""

    def __init__(
        self,
        spec: JobSpec,
        paths: JobPaths,
        command: Callable[..., list[str]] = part_command,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """Prepare; `start` starts them."""
        self._spec, self._paths, self._command, self._pause_s = spec, paths, command, pause_s
        self._tasks = Tasks()
        self._running: list[asyncio.Future[None]] = []
        self._ended = asyncio.Event()
        self._left_s = float("inf")

    def start(self) -> None:
        """Begin to tell."""
        for kind, target in self._spec.tracking.targets.items():
            self._running.append(self._tasks.spawn(self._keep_up(kind, target)))

    async def finish(self) -> None:
        """Wait until they were told of the end, which is in the journal; not for long."""
        most_s = _END_SHARE * self._spec.tracking.timeout_s
        self._left_s = time.monotonic() + most_s
        self._ended.set()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=most_s)
            if late:
                log.warning("%d tracker(s) were not told of the end in time", len(late))

    async def end(self) -> None:
        """Leave no process."""
        await self._tasks.end()

    async def _keep_up(self, kind: str, target: str) -> None:
        """Have one tracker told until it knows of the end."""
        said, pause_s = "", self._pause_s
        while True:
            last, begun_s = self._ended.is_set(), time.monotonic()
            why = await self._run(kind, target)
            if not why or last:
                if why:
                    log.warning("%s does not know of the end: %s", kind, why)
                return
            if time.monotonic() - begun_s > _PAUSE_S_MAX:  # It went well for a while.
                said, pause_s = "", self._pause_s
            if why != said:
                said = why
                log.warning("%s: %s; the job goes on, and it is tried again", kind, why)
            await wait_event(self._ended, pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _run(self, kind: str, target: str) -> str:
        """Run one process to its end; return why it did not tell all, else an empty text."""
        run_log = "--run-log" if self._spec.tracking.run_log else "--no-run-log"
        words = ("metrics", self._spec.name, f"--{kind}={target}", "--follow", run_log)
        path = self._paths.log(f"tracking-{kind}")
        try:
            with _open_log(path) as output:
                begun = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *self._command(*words),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_make_environment(os.environ, self._spec.env),
                    cwd=restore_text(self._spec.cwd),
                    start_new_session=True,
                )
        except OSError as error:
            return str(error)
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
        return "" if status == 0 else _read_last(path, begun) or describe_exit(status)


def _open_log(path: str) -> BinaryIO:
    return open(path, "ab")


def _make_environment(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return what a tracker's process is started with: no GPU is its business."""
    theirs = {name: value for name, value in own.items() if name.startswith(_OF_TRACKERS)}
    more = {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", CONTROLLER_PID: str(os.getpid())}
    return {**environ, **theirs, **more}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to leave, and end it with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # On a disk that hangs it may not even die.
        async with asyncio.timeout(_LEAVE_S):
            await process.wait()


def _read_last(path: str, begun: int) -> str:
    """Return what was said last since the log was `begun` bytes long: the error, in one line."""
    try:
        with open_file(path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begun if begun <= end else 0, end - _SAID_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if line.startswith("perdure: error: ")]
    return make_plain(errors[-1].removeprefix("perdure: error: "), 500) if errors else ""
