"""The files of a job on disk: read and written here, and nowhere else in the service room.

Every document is replaced atomically (temporary file, then rename), so that a reader sees the
old one or the new one. Nothing here syncs: what must survive a power cut is in the journal.
"""

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from perdure import __version__
from perdure.files import replace_file
from perdure.files.private import check_owner, make_private
from perdure.files.regular import LINE_BYTES_MAX, UnfitFileError, open_file, read_file
from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.version import PROTOCOL, PROTOCOL_MIN, Spoken
from perdure.model.errors import ConfigError, PlatformError, ProtocolError
from perdure.model.job import JobSpec
from perdure.model.paths import LOCK, JobPaths
from perdure.model.platforms.slurm import Allocation
from perdure.model.records import decode_record, encode_record
from perdure.model.report import Snapshot
from perdure.model.steering import Steering
from perdure.service.jobfolders import is_alive

if TYPE_CHECKING:
    from perdure.model.chain import EntryReader
    from perdure.model.events import JournalEntry
    from perdure.model.orders import Assignment

log = logging.getLogger("perdure.files")

T = TypeVar("T")

MINE = Spoken(PROTOCOL, PROTOCOL_MIN, __version__)
"""What this version speaks."""

PREVIOUS = "previous"
"""Everything but the checkpoints of earlier runs under the same name, numbered from 1."""
RENDEZVOUS = "rendezvous"
KEPT = frozenset({LOCK, PREVIOUS, RENDEZVOUS, "checkpoints", "compile-cache"})
SPACE_MIN_BYTES = 8_000_000
_ROOM = "make room, or choose another state directory with PERDURE_HOME"
_LAST_LINES_GUESS = 1 << 16
_AT_ONCE = 1 << 20
"""Bytes of a journal that are read at once."""
_START_S, _LOOK_S = 60.0, 0.02
_TRY_S, _TRY_AGAIN_S = 3600.0, 1.0


class Parts(msgspec.Struct, frozen=True):
    """`parts.json`: who runs the job now."""

    started_s: float
    """Job time at which `perdure run` started: the ledger's first instant."""
    run: int
    nats: int = 0
    """0 where the server is the user's own."""
    controller: int = 0
    agents: dict[int, int] = {}
    """Node -> pid."""
    slurm: Allocation | None = None
    """The attempt of a Slurm job that it runs in."""
    host: str = ""
    """Name of the machine of `perdure run`."""


@contextlib.contextmanager
def on_disk(what: str = "", hint: str = _ROOM) -> Iterator[None]:
    """Give the name `what` to what cannot be done where the disk refuses something inside.

    Without it, that is to use the file that the disk's word names.

    Raises:
        PlatformError: the disk is full, read-only or not ours.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise PlatformError(
            f"cannot {what or f'use {error.filename}'}: {why}", hint=hint
        ) from error


def keep_trying(
    act: Callable[[], T], say: Callable[[str], None], wanted: Callable[[], bool] = lambda: True
) -> T:
    """Return what `act` returns, tried again while it is `wanted` and a disk refuses: an hour.

    Raises:
        PlatformError: as `act` does at the end of that.
    """
    deadline_s, told = time.monotonic() + _TRY_S, ""
    while True:
        try:
            return act()
        except PlatformError as error:
            if not wanted() or time.monotonic() > deadline_s:
                raise
            if error.message != told:
                told = error.message
                say(f"{told}: tried again until it can be")
            time.sleep(_TRY_AGAIN_S)


def write_atomic(path: str, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`.

    Raises:
        PlatformError: the disk is full, read-only or not ours.
    """
    with on_disk(f"write {path}"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, data, mode=mode)


def read_document(path: str, type_: type[T]) -> T | None:
    """Return the document at `path`; None where there is none.

    A damaged document counts as missing, with a warning; so does anything but a regular file.
    """
    try:
        return decode_record(read_file(path), type_)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ProtocolError, UnfitFileError) as error:
        log.warning("%s is damaged: %s", path, _explain(error))
        return None


def _explain(error: ProtocolError | UnfitFileError) -> str:
    """Return what is wrong, without the path."""
    return str(error.strerror) if isinstance(error, UnfitFileError) else error.message


def load_spec(paths: JobPaths, say: Callable[[str], None] = log.warning) -> JobSpec:
    """Return the job's document; what its journal began with where that is damaged, and `say` so.

    Raises:
        ConfigError: there is no such job.
        PlatformError: its document is damaged, and the journal's beginning is lost as well.
    """
    name = os.path.basename(paths.root)
    try:
        return decode_record(read_file(paths.spec), JobSpec)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"unknown job `{name}`: no {paths.spec}",
            hint="`perdure status` lists the jobs under this PERDURE_HOME",
        ) from None
    except (ProtocolError, UnfitFileError) as error:
        from perdure.model.chain import EntryReader
        from perdure.model.events import JobSubmitted

        first = next(iter(EntryReader(read_lines(paths.journal), mine=MINE)), None)
        if first is not None and isinstance(first.body, JobSubmitted):
            stands_in = "the job as it was submitted stands in for it"
            say(f"{paths.spec} is damaged: {_explain(error)}; {stands_in}")
            return first.body.spec
        raise PlatformError(
            f"{paths.spec} is damaged: {_explain(error)}",
            hint=f"perdure run --name {name} with the job's own options writes it anew",
        ) from error


def load_endpoint(paths: JobPaths, user: str = "operator") -> Endpoint:
    """Return where the job's NATS server is, and what `user` shows it.

    Raises:
        ConfigError: the job was never started.
        PlatformError: another user's document names files with secrets.
    """
    path = paths.endpoint if user == "operator" else paths.credential(user)
    endpoint = read_document(path, Endpoint)
    if endpoint is None:
        damaged = os.path.exists(path)
        what = f"{path} is damaged" if damaged else f"no endpoint of the job: {path}"
        raise ConfigError(what, hint="start the job anew" if damaged else "is it running?")
    if endpoint.creds or endpoint.tls_key:
        check_owner(path)  # It names a secret, and the server that gets it.
    return endpoint


def load_parts(paths: JobPaths) -> Parts | None:
    """Return who runs the job, or ran it last."""
    return read_document(paths.parts, Parts)


def load_snapshot(paths: JobPaths) -> Snapshot | None:
    """Return the newest snapshot that a controller wrote."""
    return read_document(paths.snapshot, Snapshot)


def write_document(path: str, value: Any, *, mode: int = 0o644) -> None:
    """Replace the document at `path`."""
    write_atomic(path, encode_record(value) + b"\n", mode=mode)


def write_steering(paths: JobPaths, node: int, assignment: "Assignment") -> None:
    """Write down what the ranks of a generation have to know before their first step."""
    if assignment.steering != Steering():
        path = paths.steering(assignment.generation, node)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_document(path, assignment.steering)


def parse_journal(lines: Iterable[bytes]) -> "list[JournalEntry]":
    """Return the entries of `lines`, all of which must be sound; a torn last line is left out.

    Raises:
        ProtocolError: one is none, or one that only a newer version knows.
    """
    from perdure.model.chain import EntryReader  # With all events.

    reader = EntryReader(lines, mine=MINE, first=0)
    entries = list(reader)
    if not reader.tally.whole:
        raise ProtocolError(f"a journal that cannot be read: {reader.tally.describe()}")
    return entries


def read_mirror(paths: JobPaths, without: Collection[str] = ()) -> "EntryReader | None":
    """Return a reader of `journal.jsonl`, but of types in `without`; None without such a file."""
    if not os.path.exists(paths.journal):
        return None
    from perdure.model.chain import EntryReader

    picture = None if is_alive(paths) else load_snapshot(paths)  # The mirror of a living job lags.
    known_seq = picture.seq if picture is not None else 0
    return EntryReader(read_lines(paths.journal), mine=MINE, known_seq=known_seq, without=without)


def read_lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, one in memory at a time; none if there is no such file.

    A line of `LINE_BYTES_MAX` is the last one: nothing that perdure has written follows.

    Raises:
        UnfitFileError: it is no regular file.
    """
    with contextlib.suppress(FileNotFoundError), open_file(path, _AT_ONCE) as file:
        while line := file.readline(LINE_BYTES_MAX):
            if len(line) == LINE_BYTES_MAX:
                yield line + b"\n"  # With an end, it counts as damaged and not as torn.
                return
            yield line


def read_last_entries(paths: JobPaths) -> "list[JournalEntry]":
    """Return the newest sound entries of `journal.jsonl`, oldest first, and at least one.

    They are those of its last 64 KiB, or of its last `LINE_BYTES_MAX` if there is none.

    Raises:
        ProtocolError: one of them only a newer version knows.
    """
    from perdure.model.chain import EntryReader

    length = _LAST_LINES_GUESS
    with contextlib.suppress(FileNotFoundError), open_file(paths.journal) as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            start = max(0, size - length)
            file.seek(start)
            lines = file.read(size - start).split(b"\n")[1 if start else 0 : -1]
            entries = list(EntryReader((line + b"\n" for line in lines), mine=MINE, first=0))
            if entries or not start or length >= LINE_BYTES_MAX:
                return entries
            length *= 4
    return []


class JobRunsError(ConfigError):
    """A job of this name runs on this machine."""


class JobLock:
    """The right to run a job of one name on this machine; freed by the kernel on any death."""

    def __init__(self, paths: JobPaths) -> None:
        """Take it.

        Raises:
            JobRunsError: a run of this job is alive.
        """
        with on_disk(f"use {paths.root}", "choose another state directory with PERDURE_HOME"):
            os.makedirs(paths.root, mode=0o700, exist_ok=True)  # Its [env] is nobody else's.
            self._fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            name = os.path.basename(paths.root)
            raise JobRunsError(
                f"job `{name}` is running",
                hint=f"`perdure status {name}`, `perdure stop {name}`, or another --name",
            ) from None

    def release(self) -> None:
        """Give it back."""
        os.close(self._fd)


def wait_for_start(paths: JobPaths, pid: int) -> None:
    """Wait until child `pid`, a `perdure run`, serves the job, or has ended; at most 60 s.

    A command that comes at once would else find the job that it takes the place of, or none.
    """
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        parts = load_parts(paths)  # Its endpoint is written before them.
        if parts is not None and parts.run == pid:
            return
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        time.sleep(_LOOK_S)


def set_previous_aside(paths: JobPaths) -> str:
    """Move what an earlier run left into `previous/N`; return that folder, or an empty string.

    The checkpoints stay, so that running the same name again resumes from them.
    """
    root = Path(paths.root)
    left = [path for path in root.iterdir() if path.name not in KEPT]
    if not left:
        return ""
    numbers = [int(path.name) for path in (root / PREVIOUS).glob("*") if path.name.isdigit()]
    folder = root / PREVIOUS / str(max(numbers, default=0) + 1)
    folder.mkdir(parents=True)
    for path in left:
        shutil.move(path, folder / path.name)
    return str(folder)


def make_folders(paths: JobPaths) -> None:
    """Make the folders of a job; the sockets' one is private.

    Raises:
        PlatformError: they cannot be made, or the sockets' folder belongs to somebody else.
    """
    remove_folders(paths)  # Of a run that was itself killed.
    try:
        for folder in ("logs/ranks", "exits", "errors", "nats"):
            os.makedirs(os.path.join(paths.root, folder), exist_ok=True)
        for folder in (os.path.dirname(paths.sockets), paths.sockets, f"{paths.sockets}/rings"):
            make_private(folder)
    except OSError as error:
        raise PlatformError(f"cannot make {error.filename}: {error.strerror}") from error


def remove_folders(paths: JobPaths) -> None:
    """Remove what a job has outside its directory: sockets, and snapshots in memory.

    So are links to its sockets (`model.paths.lighthouse_door`).
    """
    for link in glob.glob(os.path.join(os.path.dirname(paths.sockets), "lighthouse-*")):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(paths.sockets + os.sep):
                os.unlink(link)
    for folder in (paths.sockets, paths.memory):
        shutil.rmtree(folder, ignore_errors=True)


def check_space(paths: JobPaths) -> None:
    """Make sure that there is room for a journal.

    Raises:
        PlatformError: there is not.
    """
    free = shutil.disk_usage(paths.root).free
    if free < SPACE_MIN_BYTES:
        raise PlatformError(f"no space left in {paths.root}: {free / 1e6:.1f} MB", hint=_ROOM)
