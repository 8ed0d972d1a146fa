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
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import msgspec
import xxhash

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.adapters.shared_folder import open_journal
from perdure.failpoints import failpoint
from perdure.model.bus.wire import Endpoint
from perdure.model.chain import FIRST, EntryReader, Link, seal
from perdure.model.codec import encode
from perdure.model.errors import (
    ConfigError,
    FencedError,
    PerdureError,
    PlatformError,
    ProtocolError,
)
from perdure.model.events import JobEnded, JournalEntry
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import (
    MINE,
    load_endpoint,
    parse_journal,
    read_document,
    read_last_entries,
    read_mirror,
    write_atomic,
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


class Position(msgspec.Struct, frozen=True):
    """A place in the journal, after one of its groups, and how to know the journal by it."""

    entries: int = 0
    groups: int = 0
    digest: str = ""
    """xxh3_128 of the last group."""
    hash: str = FIRST
    """Of the newest entry."""
    mirror_size: int = 0
    mirror_digest: str = ""
    """xxh3_128 of everything up to here; empty where it is not known."""


class Mirror:
    """`journal.jsonl`: a copy for commands that run when no server does.

    It never fails the journal: what could not be written (full disk) is kept and written with
    the next group, after cutting off what was left of the failed attempt.
    """

    def __init__(self, path: str, *, shared: bool = False) -> None:
        """Write to `path`; nothing is done before `rewrite` or `resume`.

        Where it is `shared`, another controller may be about to take over: each writes into a
        file of its own, so that what a deposed one still writes is in nobody's way.
        """
        self.path, self._shared, self._inode = path, shared, 0
        self._size = 0
        self._pending = b""
        self._held = True
        self._digest = xxhash.xxh3_128()

    def rewrite(self, data: bytes) -> None:
        """Replace the copy by `data`, the whole journal, and what was appended meanwhile."""
        self._size, self._pending = 0, data + self._pending
        self._digest.reset()
        try:
            write_atomic(self.path, data)
        except PlatformError as error:
            log.warning("mirror: %s", error)
        else:
            self._size, self._pending = len(data), self._pending[len(data) :]
            self._digest.update(data)
            self._inode = os.stat(self.path).st_ino
        self.release()

    def resume(self, size: int, digest: str) -> bool:
        """Go on behind the first `size` bytes of the file if they have this `digest`.

        Takes as long as reading them, so it may be called in a thread: meanwhile, what is
        appended waits.
        """
        self._digest.reset()
        left = size
        try:
            with open(self.path, "rb") as file:
                while left and (chunk := file.read(min(left, 1 << 20))):
                    self._digest.update(chunk)
                    left -= len(chunk)
        except OSError:
            return False
        if left or self._digest.hexdigest() != digest:
            return False
        if self._shared and not self._copy(size):
            return False
        self._size = size
        return True

    def _copy(self, size: int) -> bool:
        """Put a copy of the file's first `size` bytes in its place."""
        temporary = f"{self.path}.{os.getpid()}"
        try:
            shutil.copyfile(self.path, temporary)
            os.truncate(temporary, size)
            self._inode = os.stat(temporary).st_ino
            os.replace(temporary, self.path)
        except OSError as error:
            log.warning("mirror: %s", error)
            return False
        return True

    def position(self) -> tuple[int, str]:
        """Return size and digest of all that was appended; (0, "") where they are not known."""
        if self._held:
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
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if self._shared and os.fstat(fd).st_ino != self._inode:
                    return  # A later controller's.
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
        on_stuck: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Append to `stream` as `writer` (a controller's incarnation); call `open` first.

        `on_stuck` is called every `STUCK_S` while the stream refuses: JetStream that once found
        its disk full writes again only after the server was restarted.
        """
        self._stream, self._writer, self._mirror = stream, writer, mirror
        self._on_stuck = on_stuck
        self._groups = 0
        self._digest, self._hash = "", FIRST
        self._mirroring: asyncio.Task[None] | None = None
        self.last_seq = 0
        """Number of the newest entry."""

    async def open(self) -> list[JournalEntry]:
        """Return every entry, oldest first, and rewrite the mirror.

        Raises:
            PlatformError: the stream cannot be read.
            ProtocolError: it holds something that is no journal.
        """
        groups = await self._stream.read_all()
        entries = self._take(Position(), groups)
        if self._mirror is not None:
            self._mirror.rewrite(b"".join(groups))
        return entries

    async def resume(self, position: Position) -> list[JournalEntry] | None:
        """Return the entries after `position`; None if it is no place in this journal.

        The mirror is looked at meanwhile, and written anew if it is not what it was.

        Raises:
            PlatformError: the stream cannot be read.
            ProtocolError: it holds something that is no journal.
        """
        groups = await self._stream.read_all(first=max(position.groups, 1))
        if not groups or _compute_digest(groups[0]) != position.digest:
            return None
        entries = self._take(position, groups[1:])
        if entries and entries[0].seq != position.entries + 1:
            return None
        if self._mirror is not None:
            self._mirror.append(b"".join(groups[1:]))
            self._mirroring = asyncio.create_task(self._resume_mirror(self._mirror, position))
        return entries

    def _take(self, position: Position, groups: list[bytes]) -> list[JournalEntry]:
        last = Link(position.entries, FIRST, position.hash) if position.entries else None
        lines = b"".join(groups).splitlines(keepends=True)
        reader = EntryReader(lines, mine=MINE, last=last)
        entries = list(reader)
        if not reader.tally.whole:
            raise ProtocolError(f"the journal is damaged: {reader.tally.describe()}")
        self._groups = position.groups + len(groups)
        self._digest = _compute_digest(groups[-1]) if groups else position.digest
        self._hash, self.last_seq = reader.last.hash, reader.last.seq
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
        mirror.rewrite(b"".join(groups[: position.groups]))

    async def settle(self) -> None:
        """Return when the mirror is what the journal is."""
        if self._mirroring is not None:
            await self._mirroring

    def position(self) -> Position:
        """Return where the journal ends now."""
        size, digest = self._mirror.position() if self._mirror is not None else (0, "")
        return Position(self.last_seq, self._groups, self._digest, self._hash, size, digest)

    @property
    def body_max(self) -> int:
        """How many bytes an entry's body may have, so that the entry is one message."""
        return min(self._stream.bytes_max, _ENTRY_BYTES) - _ENTRY_ROOM

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
            if lines and size + len(line) > min(_GROUP_BYTES, self._stream.bytes_max):
                await self._append_group(lines, hash_)
                lines, size = [], 0
            lines.append(line)
            size, hash_ = size + len(line), sealed
        if lines:
            await self._append_group(lines, hash_)

    async def _append_group(self, lines: list[bytes], hash_: str) -> None:
        data = b"".join(lines)
        message_id = f"{self._writer}-{self.last_seq + 1}"
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
                    if self._on_stuck is not None:
                        await self._on_stuck()
                    stuck_at_s = asyncio.get_running_loop().time() + STUCK_S
                await asyncio.sleep(_RETRY_S)
        if failures:
            log.warning("the journal can be written again, after %d attempts", failures)
        if number != self._groups + 1:
            raise FencedError(f"the journal's group has number {number}, not {self._groups + 1}")
        failpoint("journal/appended")
        self._groups, self._digest, self._hash = number, _compute_digest(data), hash_
        self.last_seq += len(lines)
        if self._mirror is not None:
            self._mirror.append(data)


def _compute_digest(data: bytes) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def read_journal(paths: JobPaths, without: Collection[str] = ()) -> EntryReader:
    """Return a reader of a job's entries without a running job, for the commands.

    Entries of types in `without` may be left out.

    From the mirror, else from the arbiter's folder, or from the server's store by a nats-server of
    a moment, or from the user's own server.

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
    endpoint, spec = load_endpoint(paths), read_document(paths.spec, JobSpec)
    job = os.path.basename(paths.root)
    if spec is not None and spec.bus.arbiter:
        return asyncio.run(_read_folder(spec.bus.arbiter))
    if endpoint.external or _is_served(endpoint):
        return asyncio.run(_read_stream(endpoint, job))
    if not any(Path(paths.nats).glob("jetstream/*/streams/*")):
        return []  # The machine was gone before there was one.
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


async def _read_folder(arbiter: str) -> list[bytes]:
    with open_journal(arbiter) as stream:
        groups = await stream.read_all()
    return b"".join(groups).splitlines(keepends=True)


def _is_served(endpoint: Endpoint) -> bool:
    port = int(endpoint.url.rsplit(":", 1)[1])
    return NatsServer(folder="", token="", port=port).poll_ready()


async def _read_stream(endpoint: Endpoint, job: str) -> list[bytes]:
    bus = await NatsBus.connect(endpoint, name="perdure journal", timeout_s=5)
    try:
        groups = await NatsStream(bus, job).read_all()
    finally:
        await bus.close()
    return b"".join(groups).splitlines(keepends=True)


async def read_end(paths: JobPaths, bus: NatsBus | None, spec: JobSpec) -> JobEnded | None:
    """Return how the job ended if its journal says so, without reading more than its end.

    With `bus` the stream is asked as well, since the mirror's disk may be full.
    """
    with contextlib.suppress(PerdureError):
        ended = find_end(read_last_entries(paths), by_loss=True)
        if ended is not None:
            return ended
    with contextlib.suppress(PerdureError):
        last = await _read_last(bus, spec) if bus is not None else None
        entries = parse_journal(last.splitlines(keepends=True)) if last else []
        return find_end(entries, by_loss=True)  # What its turn brought about follows it.
    return None


async def _read_last(bus: NatsBus, spec: JobSpec) -> bytes | None:
    if not spec.bus.arbiter:
        return await NatsStream(bus, spec.name).read_last()
    with open_journal(spec.bus.arbiter) as stream:
        return await stream.read_last()


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
