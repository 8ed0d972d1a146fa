"""Whether the platform says that a machine is gone: asked again and again, never taken for granted.

An exit code of 0 says that a request was taken. A meter stops when the machine is gone, and whether
it is only its platform can say. An error, a time-out and a rate limit say nothing.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import LaunchRecord

STOP_S = 900.0
STOP_ATTEMPTS = 3
ASK_S = 60.0
PAUSE_S = 5.0
"""Between two questions; it grows to six times as much, for APIs have rate limits."""
_SAID_MAX = 200
_WRITTEN_MAX = 1 << 20
"""Bytes; a command that says more is ended, and has said nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A platform's answer about a machine."""

    gone: bool
    said: str
    """The end of its words, on one line."""
    code: int = 0


def fill_words(record: LaunchRecord, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command of the profile for a box; empty where it has none, or lacks the id."""
    teardown = record.profile.teardown
    if not teardown.id and any("{id}" in word for word in words):
        return ()
    values = {"{job}": record.job, "{host}": record.profile.launch.host, "{id}": teardown.id}
    return tuple(re.sub(r"\{(job|host|id)\}", lambda hole: values[hole[0]], w) for w in words)


def ask_gone(record: LaunchRecord) -> Answer | None:
    """Return what the platform says of a box now; None where the profile knows no way to ask."""
    words = fill_words(record, record.profile.teardown.gone_command)
    if not words:
        return None
    try:
        code, said = _listen(words)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(False, str(error), 1)
    out = said.decode(errors="replace")
    pattern = record.profile.teardown.gone_when
    gone = bool(re.search(pattern, out, re.MULTILINE)) if pattern else code == 0
    return Answer(gone, " ".join(out.split())[-_SAID_MAX:], code)


def _listen(words: tuple[str, ...]) -> tuple[int, bytes]:
    """Return the exit code of a command, and the end of what it said; nothing of it is left.

    Its output goes to a file that the kernel bounds: a shell's own command that hangs would hold a
    pipe for longer than the shell lives, and endless words would fill the memory.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it does not end in time.
    """
    bounded = ("sh", "-c", f'ulimit -f {_WRITTEN_MAX >> 9}; exec "$@"', "sh", *words)
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(f"{words[0]} is not installed here")
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            bounded, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = process.wait(timeout=ASK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        said = out.read()
    if len(said) >= _WRITTEN_MAX:
        raise OSError(f"{words[0]} says more than {_WRITTEN_MAX >> 20} MiB")
    return code, said


def wait_gone(
    record: LaunchRecord,
    tell: Callable[[str], None],
) -> Answer | None:
    """Return what the platform says once a box is gone, or last of all; None as `ask_gone`."""
    until_s, pause_s, told = time.monotonic() + record.profile.teardown.gone_wait_s, PAUSE_S, ""
    while True:
        answer = ask_gone(record)
        if answer is None or answer.gone or time.monotonic() >= until_s:
            return answer
        if answer.said != told:
            told = answer.said
            tell(f"{record.box} is not gone yet: {told or 'nothing was said'}")
        time.sleep(min(pause_s, max(0.0, until_s - time.monotonic())))
        pause_s = min(1.5 * pause_s, 6 * PAUSE_S)


def stop(
    record: LaunchRecord,
    tell: Callable[[str], None],
) -> None:
    """Run the stop command of a box; again where it fails and the platform can be asked.

    A box that is gone already is as well.

    Raises:
        PlatformError: it fails.
    """
    words = fill_words(record, record.profile.teardown.stop_command)
    if not words:
        return
    attempts = STOP_ATTEMPTS if record.profile.teardown.gone_command else 1
    for attempt in range(attempts):
        tell(f"running: {shlex.join(words)}")
        try:
            run(words)
            return
        except PlatformError as error:
            answer = ask_gone(record)
            if answer is not None and answer.gone:
                return
            if attempt == attempts - 1:
                raise
            tell(f"{error}; once more")
            time.sleep(PAUSE_S)


def run(words: tuple[str, ...]) -> None:
    """Run a command that stops a meter.

    Raises:
        PlatformError: it fails.
    """
    hint = "THE METER MAY STILL RUN: look at the provider"
    try:
        unpaged = os.environ | {"AWS_PAGER": "", "PAGER": "cat"}  # Nobody may be there to page on.
        done = subprocess.run(words, timeout=STOP_S, env=unpaged, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlatformError(
            f"the stop command did not run to its end: {error}", hint=hint
        ) from error
    if done.returncode:
        raise PlatformError(f"the stop command ended with {done.returncode}", hint=hint)
