"""The journal: what the controller decided from, on disk before anything was done about it.

A group of entries is one message of a fenced stream (one line of JSON each), so a group costs one
fsync, and a controller that has lost its right to write learns so at its next append. Entries are
numbered by the journal itself; the stream's numbers count groups.

The cost of `sync_interval: always` (nats-server 2.15.1, ext4 on a virtual disk, 600-byte groups,
client to acknowledgement): p50 0.7 ms, p99 1.7 ms; with the default of two minutes, which a
power cut would turn into lost decisions, p50 0.3 ms, p99 0.8 ms. There is no timer that waits for
company: entries that arrive while a group is being synced make up the next one.

A user's own server (`--nats URL`) syncs as its operator has set it; perdure cannot know.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.failpoints import failpoint
from perdure.files import read_size, replace_file, sync_path
from perdure.files.private import check_owner
from perdure.files.regular import open_file
from perdure.model.bus.endpoint import Endpoint
from perdure.model.chain import FIRST, EntryReader, Link, Tally, seal, split_lines
from perdure.model.codec import encode
from perdure.model.errors import (
    ConfigError,
    FencedError,
    PerdureError,
    PlatformError,
)
from perdure.model.events import AnyEvent, JobEnded, JournalEntry, JournalMended
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.controller.comparison import Comparison, compare
from perdure.service.jobfiles import (
    MINE,
    load_endpoint,
    on_disk,
    parse_journal,
    read_last_entries,
    read_mirror,
)
from perdure.service.ports import STUCK_S, JournalStream
from perdure.service.processes import start_bound
from perdure.telemetry.outcome import find_end

log = logging.getLogger("perdure.journal")

_GROUP_BYTES = 500_000
"""A group is split above this: NATS refuses messages over 1 MB unless told otherwise."""
_ENTRY_BYTES = 4 << 20
_ENTRY_ROOM = 2048
"""For what is around the body: its number, its time, and the name of its source."""
_RETRY_S = 0.02
_MIRROR_RETRY_S = 1.0
_ASIDE_MAX = 3
"""Damaged mirrors that are kept: the first ones, and the newest."""


class Position(msgspec.Struct, frozen=True):
    """A place in the journal, after one of its groups, and how to know the journal by it."""

    entries: int = 0
    groups: int = 0
    digest: str = ""
    """xxh3_128 of the last group."""
    hash: str = FIRST
    """Of the newest entry."""
    first: str = ""
    """Hash of the first entry."""
    mirror_size: int = 0
    mirror_digest: str = ""
    """xxh3_128 of everything up to here; empty where it is not known."""


class Mirror:
    """`journal.jsonl`: a copy for commands that run when no server does.

    It never fails the journal: what could not be written (full disk) is kept and written with
    the next group, after cutting off what was left of the failed attempt.
    """

    def __init__(self, path: str) -> None:
        """Write to `path`; nothing is done before `rewrite` or `resume`."""
        self.path = path
        self._size = 0
        self._pending = b""
        self._held = True
        self._digest = xxhash.xxh3_128()
        self._data: bytes | None = None
        """What the file shall hold, where that could not be written."""
        self._retry_at_s = 0.0
        self.aside = ""
        """Where what was no copy of the journal is kept."""

    def read(self) -> bytes:
        """Return what is in the file; nothing where there is none."""
        try:
            with open_file(self.path) as file:
                return file.read()
        except OSError:
            return b""

    def begin_anew(self) -> bytes:
        """Return what is in the file, and forget what was to be written."""
        self._pending, self._held = b"", True
        return self.read()

    def read_from(self, size: int) -> bytes:
        """Return what is behind the first `size` bytes of the file."""
        try:
            with open_file(self.path) as file:
                file.seek(size)
                return file.read()
        except OSError:
            return b""

    @contextlib.contextmanager
    def following(self) -> Iterator[Callable[[bytes], bool]]:
        """Give what takes the journal's bytes, one piece after another, for comparison.

        It returns whether the file has them next, or ends here: then they are written. Once it has
        returned False, it is not to be given more.
        """
        self._size = 0
        self._digest.reset()
        with contextlib.ExitStack() as stack:
            try:
                file: BinaryIO | None = stack.enter_context(open_file(self.path))
            except FileNotFoundError:
                file = None
            except OSError:
                yield lambda data: False
                return

            def follow(data: bytes) -> bool:
                if self._held:
                    try:
                        there = file.read(len(data)) if file is not None else b""
                    except OSError:
                        return False
                    if there == data:
                        self._size += len(data)
                        self._digest.update(data)
                        return True
                    if not data.startswith(there):
                        return False
                    self._held = False
                self.append(data)
                return True

            yield follow

    def ends_here(self) -> bool:
        """Return whether the file has nothing behind what it was compared with; then go on."""
        if self._held:
            if read_size(self.path) > self._size:
                return False
            self.release()
        return True

    def rewrite(self, data: bytes, *, synced: bool = False) -> bool:
        """Replace the copy by `data`, the whole journal, and what was appended meanwhile.

        What is there and is not its beginning is kept beside it. Return whether `data` is on the
        disk; where it is not, what is there stays, and it is tried again.
        """
        self._size, self._data = 0, data
        self._digest.reset()
        replaced = self._replace(synced=synced)
        self.release()
        return replaced

    def _replace(self, *, synced: bool = False) -> bool:
        data, self._retry_at_s = self._data, time.monotonic() + _MIRROR_RETRY_S
        assert data is not None
        before = self.read()
        try:
            if not data.startswith(before):
                self._set_aside()
            if before != data or synced or not os.path.exists(self.path):
                with on_disk(f"write {self.path}"):
                    os.makedirs(os.path.dirname(self.path), exist_ok=True)
                    replace_file(self.path, data, mode=0o644, synced=synced)
                    if synced:
                        sync_path(os.path.dirname(self.path))
        except (PlatformError, OSError) as error:
            log.warning("mirror: %s", error)
            return False
        self._size, self._data = len(data), None
        self._digest.update(data)
        return True

    def keep(self, data: bytes) -> bool:
        """Keep `data`, which was a copy of the journal, beside it; return whether that is done."""
        try:
            replace_file(self._name_aside(), data, mode=0o644, synced=True)
        except OSError as error:
            log.warning("mirror: %s", error)
            return False
        return True

    def _set_aside(self) -> None:
        """Keep what is in the file, which is no copy of the journal, under another name."""
        aside = self._name_aside()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        try:
            os.link(self.path, aside)
        except OSError:  # A file system without such links.
            shutil.copyfile(self.path, aside)
        log.warning("%s is not what it was; what was there is kept in %s", self.path, aside)

    def _name_aside(self) -> str:
        number = next(n for n in range(1, _ASIDE_MAX + 1) if n == _ASIDE_MAX or not self._has(n))
        self.aside = f"{self.path}.damaged-{number}"
        return self.aside

    def _has(self, number: int) -> bool:
        return os.path.lexists(f"{self.path}.damaged-{number}")

    def resume(self, size: int, digest: str) -> bool:
        """Go on behind the first `size` bytes of the file if they have this `digest`.

        Takes as long as reading them, so it may be called in a thread: meanwhile, what is
        appended waits.
        """
        self._digest.reset()
        left = size
        try:
            with open_file(self.path) as file:
                while left and (chunk := file.read(min(left, 1 << 20))):
                    self._digest.update(chunk)
                    left -= len(chunk)
        except OSError:
            return False
        if left or self._digest.hexdigest() != digest:
            return False
        self._size = size
        return True

    def position(self) -> tuple[int, str]:
        """Return size and digest of all that was appended; (0, "") where they are not known."""
        if self._held or self._data is not None:
            return 0, ""
        digest = self._digest.copy()
        digest.update(self._pending)
        return self._size + len(self._pending), digest.hexdigest()

    def append(self, data: bytes) -> None:
        """Add `data`, which is in the journal by now."""
        self._pending += data
        if not self._held:
            self._write()

    def release(self) -> None:
        """Write what has waited for `rewrite` or `resume`."""
        self._held = False
        if self._pending:
            self._write()

    def _write(self) -> None:
        if self._data is not None and (time.monotonic() < self._retry_at_s or not self._replace()):
            return  # What is there is worth more than a beginning.
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(self.path, flags, 0o644)
            try:
                os.ftruncate(fd, self._size)
                done = os.pwrite(fd, self._pending[: failpoint("journal/mirror")], self._size)
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("mirror: %s", error)
            return
        self._size += done
        self._digest.update(self._pending[:done])
        self._pending = self._pending[done:]


class Journal:
    """Entries, appended by one task at a time."""

    def __init__(
        self,
        stream: JournalStream,
        *,
        writer: str,
        mirror: Mirror | None = None,
        on_stuck: Callable[[], object] = lambda: None,
    ) -> None:
        """Append to `stream` as `writer` (a controller's incarnation); call `open` first.

        `on_stuck` is called every `STUCK_S` while the stream refuses: JetStream that once found
        its disk full writes again only after the server was restarted.
        """
        self._stream, self._writer, self._mirror = stream, writer, mirror
        self._on_stuck = on_stuck
        self._groups = 0
        self._digest, self._hash, self._first = "", FIRST, ""
        self._found: Comparison | None = None
        self._damage: list[AnyEvent] = []
        self._mirroring: asyncio.Task[None] | None = None
        self.last_seq = 0
        """Number of the newest entry."""
        self.agreed = False
        """Whether `read` has found stream and mirror to be copies of one journal."""

    async def read(self) -> AsyncIterator[JournalEntry]:
        """Yield every entry, oldest first, a few in memory, for as long as stream and mirror agree.

        Where they do not (`agreed`), `open` takes each entry from the copy that has it.

        Raises:
            PlatformError: the stream cannot be read.
            ProtocolError: a newer version has written it.
        """
        reader, groups, newest = EntryReader((), mine=MINE), 0, b""
        with contextlib.ExitStack() as stack:
            follow = stack.enter_context(self._mirror.following()) if self._mirror else None
            async for newest in self._stream.read():
                groups += 1
                taken = [reader.take(line) for line in newest.splitlines(keepends=True)]
                sound = reader.tally.whole and not reader.tally.torn
                if not (sound and (follow is None or follow(newest))):
                    return
                for entry in taken:
                    if entry is not None:
                        yield entry
        if self._mirror is not None and not self._mirror.ends_here():
            return
        self._groups, self._digest = groups, _compute_digest(newest) if groups else ""
        self._first, self._hash, self.last_seq = reader.first, reader.last.hash, reader.last.seq
        self._found = Comparison(b"", [], reader.last, reader.first, reader.tally, [])
        self.agreed = True

    async def open(self) -> list[JournalEntry]:
        """Return every entry, oldest first, once stream and mirror are what both make together.

        Raises:
            PlatformError: the stream cannot be read, or was lost while it was mended.
            ProtocolError: a newer version has written it.
        """
        groups = await self._stream.read_all()
        copy = self._mirror.begin_anew() if self._mirror is not None else b""
        self._found = found = await asyncio.to_thread(compare, groups, copy)
        self._groups = len(groups)
        # Before the stream is touched: what is lost of it in between is then in the mirror.
        lost = found.stream_damaged or bool(found.more)
        safe = self._mirror is not None and self._mirror.rewrite(found.data, synced=lost)
        if found.stream_damaged and safe:
            await self._mend(groups, found)
        for number, data in enumerate(split_lines(found.more, self._group_bytes), self._groups):
            await self._put(data, f"{self._writer}-restored-{number}")
        if self._groups:
            newest = await self._stream.read_all(first=self._groups) if lost else groups
            self._digest = _compute_digest(newest[-1])
        self._first, self._hash, self.last_seq = found.first, found.last.hash, found.last.seq
        self._note_damage(found)
        return found.entries

    async def _mend(self, groups: list[bytes], found: Comparison) -> None:
        lines = set(found.data.splitlines(keepends=True))
        strange = any(line not in lines for group in groups for line in group.splitlines(True))
        if strange and not (self._mirror and self._mirror.keep(b"".join(groups))):
            return
        try:
            self._groups = await self._stream.mend(found.groups)
        except PlatformError as error:
            log.warning("the stream is left as it is: %s", error)
            if await self._stream.read_all() != groups:
                raise

    def _note_damage(self, found: Comparison) -> None:
        reason = found.describe()
        if reason:
            log.warning("%s", reason)
            lost, aside = found.tally.missing, self._mirror.aside if self._mirror else ""
            self._damage.append(
                JournalMended(restored=found.restored, lost=lost, aside=aside, reason=reason)
            )

    def take_damage(self, known_seq: int = 0) -> list[AnyEvent]:
        """Return what was mended, or is lost, and has not been told yet.

        The journal is known to have gone to `known_seq` at least.
        """
        told, self._damage = self._damage, []
        found, self._found = self._found, None  # All of the journal is in it.
        cut = known_seq - found.last.seq if found is not None else 0
        if cut > 0:
            reason = f"in no copy: {Tally(cut=cut).describe()}"
            told.append(JournalMended(lost=cut, reason=reason))
        return told

    def lacks(self, position: Position) -> bool:
        """Return whether no copy has all entries to `position`, which is a place of this journal.

        What was known there is then worth more than the entries that are left.
        """
        found = self._found
        if found is None:
            return False
        hash_ = found.find_hash(position.entries)
        fits = hash_ == position.hash if hash_ else found.first in ("", position.first)
        gap = min((first for first, _ in found.tally.gaps), default=found.last.seq + 1)
        return fits and gap <= position.entries

    def skip_to(self, position: Position) -> None:
        """Go on behind `position` where the journal ends before it."""
        if self.last_seq < position.entries:
            self.last_seq, self._hash = position.entries, position.hash
            self._first = self._first or position.first

    async def resume(self, position: Position) -> list[JournalEntry] | None:
        """Return the entries after `position`; None if it is no place in this journal.

        None also where the copies do not agree on what follows. What is before it is looked at
        meanwhile in the mirror, which is written anew if it is not what it was.

        Raises:
            PlatformError: the stream cannot be read.
            ProtocolError: it holds something that is no journal.
        """
        groups = await self._stream.read_all(first=max(position.groups, 1))
        if not groups or _compute_digest(groups[0]) != position.digest:
            return None
        data = b"".join(groups[1:])
        last = Link(position.entries, position.hash, position.hash)
        reader = EntryReader(data.splitlines(keepends=True), mine=MINE, last=last)
        entries = list(reader)
        if not reader.tally.whole or reader.tally.torn or not all(groups):
            return None
        if self._mirror is not None:
            if not data.startswith(self._mirror.read_from(position.mirror_size)):
                return None  # It is damaged, or it has what the stream has lost.
            self._mirror.append(data)
            self._mirroring = asyncio.create_task(self._resume_mirror(self._mirror, position))
        self._groups, self._digest = position.groups + len(groups) - 1, _compute_digest(groups[-1])
        self._first, self._hash, self.last_seq = position.first, reader.last.hash, reader.last.seq
        return entries

    async def _resume_mirror(self, mirror: Mirror, position: Position) -> None:
        size, digest = position.mirror_size, position.mirror_digest
        if bool(digest) and await asyncio.to_thread(lambda: mirror.resume(size, digest)):
            mirror.release()
            return
        log.warning("%s is not what it was: writing it again", mirror.path)
        while True:
            try:
                groups = await self._stream.read_all()
                break
            except PlatformError as error:
                log.warning("mirror: %s; trying again", error)
                await asyncio.sleep(_MIRROR_RETRY_S)
        copy = await asyncio.to_thread(mirror.read)
        known = groups[: position.groups], copy[:size] if digest else b""
        found = await asyncio.to_thread(compare, *known)
        mirror.rewrite(found.data)
        self._note_damage(found)

    async def settle(self) -> None:
        """Return when the mirror is what the journal is."""
        if self._mirroring is not None:
            await self._mirroring

    def position(self) -> Position:
        """Return where the journal ends now."""
        size, digest = self._mirror.position() if self._mirror is not None else (0, "")
        return Position(
            self.last_seq, self._groups, self._digest, self._hash, self._first, size, digest
        )

    @property
    def body_max(self) -> int:
        """How many bytes an entry's body may have, so that the entry is one message."""
        return min(self._stream.bytes_max, _ENTRY_BYTES) - _ENTRY_ROOM

    @property
    def _group_bytes(self) -> int:
        return min(_GROUP_BYTES, self._stream.bytes_max)

    async def append(self, entries: Sequence[JournalEntry]) -> None:
        """Return when `entries` are on disk, however long that takes.

        Raises:
            FencedError: somebody else has written; nothing more may be decided here.
        """
        lines: list[bytes] = []
        size, hash_ = 0, self._hash
        for entry in entries:
            if entry.seq != self.last_seq + 1 + len(lines):
                raise AssertionError(f"entry {entry.seq} after {self.last_seq + len(lines)}")
            line, sealed = seal(encode(entry), hash_)
            if lines and size + len(line) > self._group_bytes:
                await self._append_group(lines, hash_)
                lines, size = [], 0
            lines.append(line)
            size, hash_ = size + len(line), sealed
        if lines:
            await self._append_group(lines, hash_)

    async def _append_group(self, lines: list[bytes], hash_: str) -> None:
        data = b"".join(lines)
        await self._put(data, f"{self._writer}-{self.last_seq + 1}")
        failpoint("journal/appended")
        self._digest, self._hash = _compute_digest(data), hash_
        self.last_seq += len(lines)
        if self._mirror is not None:
            self._mirror.append(data)

    async def _put(self, data: bytes, message_id: str) -> None:
        """Return when `data` is the stream's next message, however long that takes.

        Raises:
            FencedError: somebody else has written.
        """
        failures = 0
        stuck_at_s = asyncio.get_running_loop().time() + STUCK_S
        while True:
            try:
                failpoint("journal/append")
                number = await self._stream.append(
                    data, expected_last=self._groups, message_id=message_id
                )
                break
            except PlatformError as error:
                failures += 1
                if failures == 1:
                    log.warning("%s; nothing is decided until it can be written", error)
                fits = len(data) <= self._stream.bytes_max  # Else the server is not to blame.
                if fits and asyncio.get_running_loop().time() > stuck_at_s:
                    self._on_stuck()
                    stuck_at_s = asyncio.get_running_loop().time() + STUCK_S
                await asyncio.sleep(_RETRY_S)
        if failures:
            log.warning("the journal can be written again, after %d attempts", failures)
        if number != self._groups + 1:
            raise FencedError(f"the journal's group has number {number}, not {self._groups + 1}")
        self._groups = number


def _compute_digest(data: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def read_journal(paths: JobPaths, without: Collection[str] = ()) -> EntryReader:
    """Return a reader of a job's entries without a running job, for the commands.

    Entries of types in `without` may be left out.

    From the mirror, else from the server's store by a nats-server of a moment, or from the user's
    own server.

    Raises:
        ConfigError: the job was never started.
        PlatformError: the store cannot be read.
    """
    mirror = read_mirror(paths, without)
    if mirror is not None:
        return mirror
    return EntryReader(_read_source(paths), mine=MINE)


def _read_source(paths: JobPaths) -> list[bytes]:
    """Return the lines of which the mirror would be a copy."""
    endpoint = load_endpoint(paths)
    job = os.path.basename(paths.root)
    if endpoint.external or _is_served(endpoint):
        return asyncio.run(_read_stream(endpoint, job))
    if not any(Path(paths.nats).glob("jetstream/*/streams/*")):
        return []  # The machine was gone before there was one.
    check_owner(paths.root)  # Its links would lead the server's files anywhere.
    with tempfile.TemporaryDirectory(prefix="perdure-nats-") as folder:
        server = NatsServer(folder=paths.nats, token=endpoint.token, name=job)
        with open(os.path.join(folder, "log"), "wb") as output:
            process = start_bound(server.command(), output)
        try:
            server.wait_ready()
            here = Endpoint(url=server.url, token=endpoint.token, clock_offset_s=0)
            return asyncio.run(_read_stream(here, job))
        finally:
            process.kill()
            process.wait()


def _is_served(endpoint: Endpoint) -> bool:
    port = int(endpoint.url.rsplit(":", 1)[1])
    return NatsServer(folder="", token="", port=port).poll_ready()


async def _read_stream(endpoint: Endpoint, job: str) -> list[bytes]:
    bus = await NatsBus.connect(endpoint, name="perdure journal", timeout_s=5)
    try:
        groups = await NatsStream(bus, job).read_all()
    finally:
        await bus.close()
    return [line for group in groups for line in group.splitlines(keepends=True)]


async def read_end(paths: JobPaths, bus: NatsBus | None, spec: JobSpec) -> JobEnded | None:
    """Return how the job ended if its journal says so, without reading more than its end.

    With `bus` the stream is asked as well, since the mirror's disk may be full.
    """
    with contextlib.suppress(PerdureError):
        ended = find_end(read_last_entries(paths), by_loss=True)
        if ended is not None:
            return ended
    with contextlib.suppress(PerdureError):
        last = await NatsStream(bus, spec.name).read_last() if bus is not None else None
        entries = parse_journal(last.splitlines(keepends=True)) if last else []
        return find_end(entries, by_loss=True)  # What its turn brought about follows it.
    return None


async def clear_stream(paths: JobPaths, job: str, *, ours: bool) -> None:
    """Remove an earlier run's journal from a user's own server; `ours`: it was this machine's.

    Raises:
        ConfigError: it is another machine's, of a job that has not ended.
        PlatformError: the server cannot be reached.
    """
    endpoint = load_endpoint(paths, "controller")
    bus = await NatsBus.connect(endpoint, name="perdure run", timeout_s=10)
    try:
        stream = await NatsStream.open(bus, job)
        last = await stream.read_last()
        entries = parse_journal(last.splitlines(keepends=True)) if last else []
        if entries and not ours and find_end(entries, by_loss=True) is None:
            raise ConfigError(
                f"{endpoint.url} holds the journal of a job `{job}` that has not ended",
                hint="choose another --name, or remove its stream",
            )
        await stream.delete()
    finally:
        await bus.close()
