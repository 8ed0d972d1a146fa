"""The agent's ears for its ranks: a unix socket, a JSON line a message.

A line that cannot be read is dropped, and the connection stays. The rank sends it again to the next
agent; the outbox declares its number skipped once the next event comes.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from perdure.agent.messages import WorkerSaid
from perdure.failpoints import failpoint
from perdure.model.bus.wire import (
    FromWorker,
    ReplicaHello,
    ReplicaWelcome,
    WorkerAck,
    WorkerEvent,
    WorkerHello,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.orders import Order
from perdure.service.agent.outbox import Outbox
from perdure.service.part import LINE_MAX, DropLog, read_line

log = logging.getLogger("perdure.agent")

_SEQ_MAX = 1 << 53


@dataclass(slots=True)
class _RankConnection:
    hello: WorkerHello
    writer: asyncio.StreamWriter
    newest: int = 0
    """Number of the newest event that could be read; 0: none yet."""
    gap: int = 0
    """Lines since then that could not be read: so many numbers may be missing."""

    @property
    def source(self) -> str:
        """Whose numbers its events carry."""
        return f"g{self.hello.generation}-r{self.hello.rank}-p{self.hello.pid}"

    def is_next(self, seq: int) -> bool:
        """Return whether an event may have this number: a rank counts, and says things again."""
        return seq <= self.newest + 1 + self.gap if self.newest else 0 < seq <= _SEQ_MAX

    def send(self, message: WorkerAck | Order) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode(message) + b"\n")


class WorkerServer:
    """Listens for ranks. Their events go to the outbox, all else to `say`."""

    def __init__(
        self,
        job: str,
        outbox: Outbox,
        say: Callable[[WorkerSaid], None],
        *,
        admit: Callable[[ReplicaHello], Awaitable[ReplicaWelcome]] | None = None,
        gone: Callable[[WorkerHello], None] = lambda hello: None,
    ) -> None:
        """Serve the ranks of `job`.

        A rank that others have started asks `admit` who it is; `gone` hears of a line that ended.
        """
        self._admit, self._gone = admit, gone
        self.job, self._outbox, self._say, self._drops = job, outbox, say, DropLog(log)
        self._lines: dict[int, _RankConnection] = {}
        """By rank, of the newest generation that said hello."""
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        """Listen at `path`, in the place of an agent that was there before."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=LINE_MAX)
        os.chmod(path, 0o600)

    def send(self, rank: int, order: Order) -> None:
        """Send `order` to `rank`, if it is connected and the order is for it."""
        line = self._lines.get(rank)
        if line is not None and order.is_for(line.hello.generation, rank):
            line.send(order)

    async def close(self) -> None:
        """Stop listening and hang up; ranks will look for the next agent."""
        if self._server is not None:
            self._server.close()
        for line in self._lines.values():
            line.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line: _RankConnection | None = None
        try:
            while text := await read_line(reader):
                try:
                    message: FromWorker = decode(text, FromWorker)
                except ProtocolError as error:
                    if line is None:
                        raise
                    self._drops.note(f"of rank {line.hello.rank}: {error}")
                    line.gap += 1
                    continue
                if isinstance(message, ReplicaHello) and self._admit is not None and line is None:
                    writer.write(encode(await self._admit(message)) + b"\n")
                    return
                if line is None:
                    line = self._welcome(message, writer)
                self._take(line, message)
        except ProtocolError as error:
            self._drops.note(f"of a stranger: {error}")
        except (OSError, asyncio.CancelledError):
            pass  # It ended, or we do.
        finally:
            if line is not None and self._lines.get(line.hello.rank) is line:
                del self._lines[line.hello.rank]
                self._outbox.company = len(self._lines)
                self._gone(line.hello)
            writer.close()

    def _welcome(self, message: FromWorker, writer: asyncio.StreamWriter) -> _RankConnection:
        if not isinstance(message, WorkerHello) or message.job != self.job:
            raise ProtocolError("a line that does not begin with a hello of this job")
        line = _RankConnection(message, writer)
        held = self._lines.get(message.rank)
        if held is None or held.hello.generation <= message.generation:
            self._lines[message.rank] = line
            self._outbox.company = len(self._lines)
        return line

    def _take(self, line: _RankConnection, message: FromWorker) -> None:
        if isinstance(message, ReplicaHello):
            return
        if isinstance(message, WorkerEvent):
            seq = message.seq
            if not line.is_next(seq):  # Taken at its word, everything after it would be old.
                why = f"an event says that it is number {seq}, after {line.newest}"
                self._drops.note(f"of rank {line.hello.rank}: {why}")
                return
            line.newest, line.gap = max(seq, line.newest), 0

            def acknowledge() -> None:
                newest = self._lines.get(line.hello.rank)
                same = newest is not None and newest.source == line.source
                failpoint("agent/worker-ack")
                (newest if newest is not None and same else line).send(WorkerAck(seq))

            failpoint("agent/worker-event")
            self._outbox.put_from(line.source, seq, message.event, acknowledge)
            return
        hello = line.hello
        self._say(WorkerSaid(rank=hello.rank, generation=hello.generation, message=message))
