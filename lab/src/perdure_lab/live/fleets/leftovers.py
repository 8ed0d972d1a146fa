"""What a drive that was killed has left at a place that ends nothing by itself, such as Slurm's.

A drive writes down what it has submitted before it goes on, and forgets it once it has ended that.
The next drive finds what was written by a process that lives no more, and says what is left. It
ends none of it: a number of another cluster's, or of one that was set up anew, may be another job.
"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

from perdure.adapters.host import read_start_time
from perdure.files import replace_file
from perdure.model.errors import PlatformError

_NAME = "submitted-{}.json"


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """What one drive has submitted."""

    job: str
    """Its own, for a person."""
    host: str
    """Where it submits from; empty for this machine."""
    pid: int
    start: int
    """Of the drive's process, as /proc has it: another one may have its pid by now."""
    ids: tuple[str, ...] = ()


def note_submitted(home: str, job: str, host: str, ids: tuple[str, ...]) -> None:
    """Write down what this process has submitted; forget it where that is nothing any more.

    Raises:
        PlatformError: the disk is full, read-only or not ours.
    """
    pid = os.getpid()
    path = Path(home, "replay", _NAME.format(pid))
    told = Submitted(job=job, host=host, pid=pid, start=read_start_time(pid), ids=ids)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if ids:
            replace_file(path, msgspec.json.encode(told))
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror}") from error


def tell_left(
    home: str, host: str, lives: Callable[[str], bool], tell: Callable[[str], object]
) -> None:
    """Tell what drives that were killed have left at `host`; what has ended since is forgotten.

    Raises:
        PlatformError: nobody says what lives.
    """
    for path in sorted(Path(home, "replay").glob(_NAME.format("*"))):
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Submitted)
        except (OSError, msgspec.DecodeError):
            continue  # Another drive has just ended; or it is none of ours.
        if found.host != host or read_start_time(found.pid) == found.start:
            continue
        left = [id_ for id_ in found.ids if lives(id_)]
        if not left:
            path.unlink(missing_ok=True)
            continue
        tell(
            f"the drive {found.job} was killed and has left Slurm jobs {', '.join(left)}: scancel "
            f"{shlex.join(left)}"
        )
