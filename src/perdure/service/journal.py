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
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.model.codec import encode
from perdure.model.errors import ConfigError, FencedError, PlatformError
from perdure.model.events import AnyEvent, Decision, JobEnded, JournalEntry
from perdure.model.paths import JobPaths
from perdure.model.wire import Endpoint
from perdure.service.jobfiles import load_endpoint, parse_journal, read_mirror, write_atomic
from perdure.service.ports import JournalStream

log = logging.getLogger("perdure.journal")

_GROUP_BYTES = 500_000
"""A group is split above this: NATS refuses messages over 1 MB unless told otherwise."""
_RETRY_S = 0.02
_STUCK_S = 8.0


class Mirror:
    """`journal.jsonl`: a copy for commands that run when no server does.

    It never fails the journal: what could not be written (full disk) is kept and written with
    the next group, after cutting off what was left of the failed attempt.
    """

    def __init__(self, path: str) -> None:
        """Write to `path`; nothing is done before `rewrite`."""
        self.path = path
        self._size = 0
        self._pending = b""

    def rewrite(self, data: bytes) -> None:
        """Replace the copy by `data`, the whole journal."""
        self._size, self._pending = 0, data
        try:
            write_atomic(self.path, data)
        except PlatformError as error:
            log.warning("mirror: %s", error)
        else:
            self._size, self._pending = len(data), b""

    def append(self, data: bytes) -> None:
        """Add `data`, which is in the journal by now."""
        self._pending += data
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.ftruncate(fd, self._size)
                done = os.pwrite(fd, self._pending, self._size)
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("mirror: %s", error)
            return
        self._size += done
        self._pending = self._pending[done:]


class Journal:
    """Entries, appended by one task at a time."""

    def __init__(
        self,
        stream: JournalStream,
        *,
        writer: str,
        mirror: Mirror | None = None,
        on_stuck: Callable[[], None] = lambda: None,
    ) -> None:
        """Append to `stream` as `writer` (a controller's incarnation); call `open` first.

        `on_stuck` is called every `_STUCK_S` while the stream refuses: JetStream that once found
        its disk full writes again only after the server was restarted.
        """
        self._stream, self._writer, self._mirror = stream, writer, mirror
        self._on_stuck = on_stuck
        self._groups = 0
        self.last_seq = 0
        """Number of the newest entry."""

    async def open(self) -> list[JournalEntry]:
        """Return every entry, oldest first, and rewrite the mirror.

        Raises:
            PlatformError: the stream cannot be read.
            ProtocolError: it holds something that is no journal.
        """
        groups = await self._stream.read_all()
        whole = b"".join(groups)
        entries = parse_journal(whole.splitlines(keepends=True))
        self._groups = len(groups)
        self.last_seq = entries[-1].seq if entries else 0
        if self._mirror is not None:
            self._mirror.rewrite(whole)
        return entries

    def number(self, bodies: Sequence[AnyEvent | Decision], *, at_s: float) -> list[JournalEntry]:
        """Return `bodies` as the next entries; they count once they were appended."""
        return [
            JournalEntry(seq=self.last_seq + 1 + index, at_s=at_s, body=body)
            for index, body in enumerate(bodies)
        ]

    async def append(self, entries: Sequence[JournalEntry]) -> None:
        """Return when `entries` are on disk, however long that takes.

        Raises:
            FencedError: somebody else has written; nothing more may be decided here.
        """
        lines: list[bytes] = []
        size = 0
        for entry in entries:
            if entry.seq != self.last_seq + 1 + len(lines):
                raise AssertionError(f"entry {entry.seq} after {self.last_seq + len(lines)}")
            line = encode(entry) + b"\n"
            if lines and size + len(line) > _GROUP_BYTES:
                await self._append_group(lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            await self._append_group(lines)

    async def _append_group(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        message_id = f"{self._writer}-{self.last_seq + 1}"
        failures = 0
        stuck_at_s = asyncio.get_running_loop().time() + _STUCK_S
        while True:
            try:
                number = await self._stream.append(
                    data, expected_last=self._groups, message_id=message_id
                )
                break
            except FencedError:
                raise
            except PlatformError as error:
                failures += 1
                if failures == 1:
                    log.warning("%s; nothing is decided until it can be written", error)
                if asyncio.get_running_loop().time() > stuck_at_s:
                    stuck_at_s = asyncio.get_running_loop().time() + _STUCK_S
                    self._on_stuck()
                await asyncio.sleep(_RETRY_S)
        if failures:
            log.warning("the journal can be written again, after %d attempts", failures)
        if number != self._groups + 1:
            raise FencedError(f"the journal's group has number {number}, not {self._groups + 1}")
        self._groups = number
        self.last_seq += len(lines)
        if self._mirror is not None:
            self._mirror.append(data)


def read_journal(paths: JobPaths) -> list[JournalEntry]:
    """Return a job's entries without a running job, for the commands.

    From the mirror, else from the server's store, by a nats-server of a moment, else from the
    user's own server.

    Raises:
        ConfigError: the job was never started.
        PlatformError: the store cannot be read.
    """
    entries = read_mirror(paths)
    if entries is not None:
        return entries
    endpoint = load_endpoint(paths)
    job = os.path.basename(paths.root)
    if endpoint.external or _is_served(endpoint):
        return asyncio.run(_read_stream(endpoint, job))
    if not (Path(paths.nats) / "jetstream").exists():
        return []
    with tempfile.TemporaryDirectory(prefix="perdure-nats-") as folder:
        server = NatsServer(folder=paths.nats, token=endpoint.token, name=job)
        with open(os.path.join(folder, "log"), "wb") as output:
            process = subprocess.Popen(
                server.command(), stdout=output, stderr=output, start_new_session=True
            )
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


async def _read_stream(endpoint: Endpoint, job: str) -> list[JournalEntry]:
    bus = await NatsBus.connect(endpoint, name="perdure journal", timeout_s=5)
    try:
        groups = await NatsStream(bus, job).read_all()
    finally:
        await bus.close()
    return parse_journal(b"".join(groups).splitlines(keepends=True))


async def clear_stream(endpoint: Endpoint, job: str, *, ours: bool) -> None:
    """Remove an earlier run's journal from a user's own server; `ours`: it was this machine's.

    Raises:
        ConfigError: it is another machine's, of a job that has not ended.
        PlatformError: the server cannot be reached.
    """
    bus = await NatsBus.connect(endpoint, name="perdure run", timeout_s=10)
    try:
        stream = await NatsStream.open(bus, job)
        groups = await stream.read_all()
        entries = parse_journal(groups[-1].splitlines(keepends=True)) if groups else []
        if entries and not ours and not isinstance(entries[-1].body, JobEnded):
            raise ConfigError(
                f"{endpoint.url} holds the journal of a job `{job}` that has not ended",
                hint="choose another --name, or remove its stream",
            )
        await stream.delete()
    finally:
        await bus.close()
