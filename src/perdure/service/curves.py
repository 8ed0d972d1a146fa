"""The files of a job's curves: what `run.log` has told, which is no fact and so in no journal.

    curves/kept         everything older, bounded and coarser with age (`telemetry/curves.py`)
    curves/new-*.jsonl  what came since, one file a controller; each line begins with its hash

A controller only appends. Once its file has a megabyte, a thread folds it into `kept`, which is
replaced as a whole and names the files that are in it, so that a death between any two of these
steps counts nothing twice. Nothing here is synced, and nothing here can fail the controller: values
that no disk takes are counted, what is damaged is set aside, and both are said in `diagnose`.
"""

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from perdure.failpoints import failpoint
from perdure.files import replace_file
from perdure.files.regular import read_file
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import MetricsLogged
from perdure.model.records import decode_record, encode_record
from perdure.telemetry.curves import UNREADABLE, Curves, decode_curves, encode_curves

log = logging.getLogger("perdure.controller")

FOLD_BYTES = 1 << 20
"""A file of new values is folded into what is kept once it is so large."""
NEW_BYTES_MAX = 8 << 20
"""Of one file, should it not be possible to fold it; what is more is counted as dropped."""
WRITERS_MAX = 64
"""Controllers whose files are known to have been folded; of more, the oldest are forgotten."""
KEPT, DAMAGED, _LOCK = "kept", "damaged", "lock"
_NEW = re.compile(r"new-(\d+)-(.*)\.jsonl")
_HASH_BYTES = 16


class _Line(msgspec.Struct, frozen=True):
    """One batch of `run.log`, as a controller took it."""

    at_s: float
    source: str
    rows: tuple[tuple[int, dict[str, float]], ...]
    dropped: int = 0


class _Head(msgspec.Struct, frozen=True):
    """The first line of what is kept."""

    digest: str
    """xxh3_128 of the rest."""
    folded: dict[str, int]
    """Writer -> number of its newest file that is in it. A copy of the folder may still have such a
    file: it counts no more."""


class CurveFiles:
    """One controller's side of a job's curves."""

    def __init__(self, folder: str, writer: str) -> None:
        """Write below `folder`, which is made with the first value, as `writer`."""
        self._folder, self._writer = Path(folder), writer
        self._fd = -1
        self._size = self._number = 0
        self._lost: dict[str, int] = {}
        """Source -> values that could not be written, to be said in its next line."""
        self._failing = ""

    def append(self, at_s: float, source: str, event: MetricsLogged) -> None:
        """Keep what `source` has logged, in job time `at_s`."""
        dropped = event.dropped + self._lost.get(source, 0)
        text = encode(_Line(at_s, source, event.rows, dropped))
        line = f"{xxhash.xxh3_64_hexdigest(text)} ".encode() + text + b"\n"
        try:
            self._write(line)
        except OSError as error:
            self._lost[source] = dropped + sum(len(values) for _, values in event.rows)
            if not self._failing:
                self._failing = error.strerror or str(error)
                log.error("curves: %s: values of run.log are dropped", self._failing)
            return
        self._lost.pop(source, None)
        if self._failing:
            log.warning("curves: they can be written again")
            self._failing = ""

    def _write(self, line: bytes) -> None:
        if self._size + len(line) > NEW_BYTES_MAX:
            raise OSError(0, f"{NEW_BYTES_MAX:,} bytes wait to be folded")
        if self._fd < 0:
            self._folder.mkdir(exist_ok=True)
            numbers = [number for number, _ in _list_new(self._folder)]
            self._number = max([self._number, *numbers]) + 1  # A name is never used twice.
            name = f"new-{self._number:08d}-{self._writer}.jsonl"
            self._fd = os.open(
                self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
            )
        written = os.pwrite(self._fd, line[: failpoint("curves/append")], self._size)
        if written < len(line):
            os.ftruncate(self._fd, self._size)
            raise OSError(0, "the disk takes no more")
        self._size += written

    def is_due(self) -> bool:
        """Return whether what was appended is to be folded."""
        return self._size >= FOLD_BYTES

    def begin_next(self) -> list[Path]:
        """Append to another file from now on; return all that are to be folded."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = -1, 0
        return [path for _, path in _list_new(self._folder)]

    def fold(self, paths: Sequence[Path]) -> None:
        """Put the files at `paths`, which nobody appends to, into what is kept.

        It may take a second. One controller does so at a time; where another is at it, or the disk
        refuses, the next call does it.
        """
        if not paths:
            return
        try:
            with _locked(self._folder):
                self._fold([(path, read_file(path)) for path in paths])
        except Exception as error:  # The next call tries again, and a controller goes on without.
            log.warning("curves are not folded: %r", error)

    def _fold(self, new: Sequence[tuple[Path, bytes]]) -> None:
        curves, folded, why = _read_kept(self._folder)
        if why:
            log.error("curves: what was kept cannot be read (%s): it is set aside", why)
            os.replace(self._folder / KEPT, self._folder / DAMAGED)
            curves.count_dropped(0.0, UNREADABLE, 1)
        for path, data in new:
            number, writer = _read_name(path)
            if number > folded.get(writer, 0):
                _take(curves, data)
                folded[writer] = number
        while len(folded) > WRITERS_MAX:
            del folded[min(folded, key=lambda writer: folded[writer])]
        body = encode_curves(curves)
        head = _Head(xxhash.xxh3_128_hexdigest(body), folded)
        replace_file(self._folder / KEPT, encode_record(head) + b"\n" + body, mode=0o644)
        failpoint("curves/folded")
        for path, _ in new:
            path.unlink(missing_ok=True)

    def read_newest(self) -> dict[str, float]:
        """Return the newest value of each name."""
        return read_curves(str(self._folder)).list_newest()


def read_curves(folder: str) -> Curves:
    """Return all of a job's curves. What cannot be read is counted as dropped by `UNREADABLE`."""
    new = []
    for _, path in _list_new(Path(folder)):
        with contextlib.suppress(OSError):  # It was folded just now.
            new.append((path, read_file(path)))
    curves, folded, why = _read_kept(Path(folder))
    if why:
        curves.count_dropped(0.0, UNREADABLE, 1)
    for path, data in new:
        number, writer = _read_name(path)
        if number > folded.get(writer, 0):
            _take(curves, data)
    return curves


def _read_name(path: Path) -> tuple[int, str]:
    """Return number and writer of a file of new values."""
    match = _NEW.fullmatch(path.name)
    return (int(match[1]), match[2]) if match else (0, "")


def _list_new(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of new values by their numbers, oldest first."""
    with contextlib.suppress(OSError):
        found = [(_read_name(path)[0], path) for path in folder.iterdir()]
        return sorted((number, path) for number, path in found if number)
    return []


def _read_kept(folder: Path) -> tuple[Curves, dict[str, int], str]:
    """Return what is kept, which files are in it, and why it cannot be read."""
    try:
        first, _, body = read_file(folder / KEPT).partition(b"\n")
        head: _Head = decode_record(first, _Head)
        if xxhash.xxh3_128_hexdigest(body) != head.digest:
            raise ProtocolError("it does not have the hash that it had")
        return decode_curves(body), dict(head.folded), ""
    except FileNotFoundError:
        return Curves(), {}, ""
    except (OSError, ProtocolError) as error:
        return Curves(), {}, str(error)


def _take(curves: Curves, data: bytes) -> None:
    """Take the lines of a file of new values; those that are not what they were are counted."""
    at_s = 0.0
    for raw in data.split(b"\n"):
        digest, text = raw[:_HASH_BYTES], raw[_HASH_BYTES + 1 :]
        if xxhash.xxh3_64_hexdigest(text).encode() == digest:
            with contextlib.suppress(ProtocolError, OverflowError):  # A step that no float has.
                line: _Line = decode(text, _Line)
                at_s = line.at_s
                curves.take(line.at_s, line.source, line.rows, line.dropped)
                continue
        if raw:
            curves.count_dropped(at_s, UNREADABLE, 1)
    curves.coarsen()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Be the only one who folds.

    Raises:
        OSError: somebody else does.
    """
    with open(folder / _LOCK, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
