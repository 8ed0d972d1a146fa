"""A queue on disk: its journal, and a directory for each attempt.

    $PERDURE_HOME/queues/NAME/
        journal.jsonl           every record, synced before it is acted on
        journal.lock            held while the journal is written
        runner.lock             held by `perdure queue run` as long as it lives
        attempts/ITEM/N/        attempt.json  claim.json  ending.json  output.log

`claim.json` and `ending.json` come into being whole and once: of two processes that make one,
the second is told that it was too late.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from perdure.adapters.host import read_boot_id, read_start_time
from perdure.control.queue import Book
from perdure.failpoints import failpoint
from perdure.files import create_file, is_locked, sync_path
from perdure.files.regular import open_file
from perdure.model.errors import ConfigError, ProtocolError
from perdure.model.queue import NAME, Claim, Ending, Item, Record
from perdure.model.records import decode_record, encode_record
from perdure.service.jobfiles import load_snapshot, on_disk, read_document
from perdure.service.jobfolders import paths_of

log = logging.getLogger("perdure.queue")

ATTEMPT, CLAIM, ENDING, OUTPUT = "attempt.json", "claim.json", "ending.json", "output.log"


class QueueStore:
    """One queue's directory, and the book read from its journal so far."""

    def __init__(self, home: str, name: str) -> None:
        """Use the queue `name` under the absolute directory `home`; nothing is made yet.

        Raises:
            ConfigError: that is no name.
        """
        if not re.match(NAME, name):
            raise ConfigError(f"`{name}` is no name of a queue", hint="letters, digits and _.=+-")
        self.home, self.name = home, name
        self.root = Path(home, "queues", name)
        self._journal = self.root / "journal.jsonl"
        self.book = Book()
        self._offset = 0

    def attempt(self, item: str, number: int) -> Path:
        """Return the directory of an attempt."""
        return self.root / "attempts" / item / str(number)

    def read(self) -> Book:
        """Return the book with everything that was written since the last look."""
        try:
            with open_file(self._journal) as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.book
        end = data.rfind(b"\n") + 1
        lines = data[:end].splitlines()
        if _is_whole(data[end:]):
            lines.append(data[end:-1])
            end = len(data)
        for line in lines:
            try:
                self.book.add(decode_record(line, Record))
            except ProtocolError as error:
                log.warning("%s: a record is passed over: %s", self._journal, error)
        self._offset += end
        return self.book

    @contextlib.contextmanager
    def writing(self) -> Iterator[Self]:
        """Hold the journal: what is decided inside stands on all that was written before.

        What others have written is read, and a record that was torn by a kill is cut off.

        Raises:
            PlatformError: the directory cannot be used.
        """
        with on_disk():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open(self.root / "journal.lock", "wb")  # noqa: SIM115
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.read()
            with on_disk(f"use {self._journal}"), open(self._journal, "a+b") as file:
                file.truncate(self._offset)
                file.seek(max(0, self._offset - 1))
                if file.read() not in (b"", b"\n"):  # It is another byte by now.
                    file.truncate(self._offset - 1)
                    file.write(b"\n")
            yield self

    def append(self, *records: Record) -> None:
        """Write records and bring them to the disk; then they are in the book.

        Only for who holds the journal.

        Raises:
            PlatformError: they could not be written; none of them counts.
        """
        if not records:
            return
        data = b"".join(encode_record(record) + b"\n" for record in records)
        with on_disk(f"use {self._journal}"), open(self._journal, "ab", buffering=0) as file:
            try:
                if file.write(data[: failpoint("queue/append")]) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
                sync_path(self.root)
            except OSError:
                file.truncate(self._offset)
                raise
        failpoint("queue/appended")
        self.read()


def _is_whole(rest: bytes) -> bool:
    """Return whether what follows the last line is a record whose line's end is another byte."""
    try:
        decode_record(rest[:-1], Record)
    except ProtocolError:
        return False
    return True


class RunnerLock:
    """The right to run a queue; freed by the kernel on any death."""

    def __init__(self, store: QueueStore) -> None:
        """Take it.

        Raises:
            ConfigError: the queue is being run.
        """
        with on_disk():
            store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = open(store.root / "runner.lock", "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = read_runner_pid(store)
            self._file.close()
            raise ConfigError(
                f"queue `{store.name}` is being run by pid {pid}",
                hint=f"`perdure queue ls --queue {store.name}` shows it; what you add is taken up",
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def release(self) -> None:
        """Give it back."""
        self._file.close()


def read_runner_pid(store: QueueStore) -> int:
    """Return the pid of the living runner; 0 where there is none."""
    path = store.root / "runner.lock"
    text = path.read_text() if is_locked(path) else "0"
    return int(text) if text.isdigit() else -1


def look_at_attempt(store: QueueStore, item: Item, number: int) -> Claim | Ending | None:
    """Return who carries out an attempt, or how it ended; None where nobody has begun.

    An attempt whose holder and command are both gone without a record of the end is judged by
    what it left: by its files, or as a job by its own journal.
    """
    folder = store.attempt(item.name, number)
    for _ in range(2):  # A holder writes its record and then ends: between our two looks, perhaps.
        ending = read_document(str(folder / ENDING), Ending)
        if ending is not None:
            return ending
        claim = read_document(str(folder / CLAIM), Claim)
        if claim is None:
            return None
        same_boot = claim.boot_id == read_boot_id()
        if same_boot and find_carrier(claim):
            return claim
    at_s = max(path.stat().st_mtime for path in folder.iterdir())
    why = "nobody saw its end (killed?)" if same_boot else "the machine was started anew"
    if has_proof(store, item):
        why = ""
    return Ending(at_s=at_s, reason=why)


def find_carrier(claim: Claim) -> int:
    """Return the pid of an attempt's holder, of the command where that is gone, or else 0."""
    for pid, start in ((claim.holder, claim.holder_start), (claim.child, claim.child_start)):
        if start and read_start_time(pid) == start:
            return pid
    return 0


def has_proof(store: QueueStore, item: Item) -> bool:
    """Return whether something other than an exit code proves that an item is done."""
    if item.done:
        return not list_missing_outputs(item)
    if item.job is not None:
        snapshot = load_snapshot(paths_of(store.home, item.name))
        return snapshot is not None and snapshot.state == "done"
    return False


def list_missing_outputs(item: Item) -> tuple[str, ...]:
    """Return those of the files in `done` that are not there or hold nothing."""
    return tuple(path for path in item.done if not _is_there(item.cwd, path))


def _is_there(cwd: str, pattern: str) -> bool:
    folder = Path(cwd, os.path.expanduser(pattern))
    if folder.exists():
        found = [folder]
    elif any(letter in pattern for letter in "*?["):
        found = list(Path("/").glob(str(folder.absolute()).lstrip("/")))
    else:
        return False
    return any(any(p.iterdir()) if p.is_dir() else p.stat().st_size > 0 for p in found)


def create_once(path: Path, value: Any) -> bool:
    """Write a document that comes into being whole; return False where it was there already.

    Raises:
        PlatformError: the disk is full, read-only or not ours.
    """
    with on_disk(f"write {path}"):
        return create_file(path, encode_record(value) + b"\n")
