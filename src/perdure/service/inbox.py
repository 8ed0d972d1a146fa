"""What has come to the controller, read and checked at its door.

Whatever cannot be read, is too large, or names a node or rank that the job does not have is
refused here: said in the log, answered where an answer is awaited, never journaled. A sender whose
events are refused keeps them, so nothing is lost by it; a heartbeat is worth nothing later.

Which subject a message came by says what its sender may ask for: the server has checked who may
publish there (`model/access.py`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import msgspec

from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, RankExited
from perdure.model.job import JobSpec
from perdure.model.progress import NodeBeat
from perdure.model.wire import (
    Admission,
    Command,
    CommandReply,
    EventMessage,
    JoinRequest,
    Notice,
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_notices,
    subject_queries,
)
from perdure.service.ports import Bus, Reply

log = logging.getLogger("perdure.controller")

COMMAND_BYTES_MAX = 65_536
"""Of a command or a notice: it is journaled as a whole."""
BACKLOG_MAX = 4
"""Heartbeats kept of one node; older ones are dropped when the loop falls behind."""
MEMBERS_A_SLOT = 1000
"""Numbers that an elastic world may give in a slot, one after another."""
QUERIES = frozenset({"ping", "status"})
"""What those may ask who may only look."""
_QUIET_S = 1.0
"""Between two lines about refusals: a flood of them shall not fill the disk as well."""


@dataclass(slots=True)
class Arrived:
    """What has arrived since the last turn."""

    messages: list[tuple[EventMessage, Reply]] = field(default_factory=list)
    commands: list[tuple[Command, Reply]] = field(default_factory=list)
    beats: dict[int, deque[NodeBeat]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.messages or self.commands or self.beats)


class Inbox:
    """Collects what arrives between two turns of the loop; `wake` is set by each arrival."""

    def __init__(
        self,
        spec: JobSpec,
        wake: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin empty."""
        self.admit: Callable[[int], Admission | None] = lambda node: None
        """What a machine that was given the place of a node has to know."""
        self._spec, self._wake, self._clock = spec, wake, clock
        self._arrived = Arrived()
        self._answers: set[asyncio.Task[None]] = set()
        self._said_at_s, self._unsaid = -_QUIET_S, 0
        self.refused = 0
        """Messages refused so far."""

    def __bool__(self) -> bool:
        """Return whether anything has arrived."""
        return bool(self._arrived)

    async def serve(self, bus: Bus) -> None:
        """Take what comes over `bus`."""
        job = self._spec.name
        await bus.serve(subject_events(job), self.take_message)
        await bus.serve(subject_commands(job), self.take_command)
        await bus.serve(subject_queries(job), self.take_query)
        await bus.serve(subject_notices(job), self.take_notice)
        await bus.serve(subject_joins(job), self.take_join)
        await bus.subscribe(subject_beats(job), self.take_beat)

    def empty(self) -> Arrived:
        """Return what has arrived, and begin anew."""
        arrived, self._arrived = self._arrived, Arrived()
        return arrived

    # --- by the bus ---------------------------------------------------------------------------

    def take_message(self, data: bytes, reply: Reply) -> None:
        """Take events of an agent."""
        try:
            message: EventMessage = decode(data, EventMessage)
        except ProtocolError as error:
            self._refuse(f"event: {error}")
            return
        for batch in message.batches:
            for event in batch.events:
                strange = find_stranger(self._spec, event)
                if strange:
                    self._refuse(f"{type(event).__name__} of {batch.source}: {strange}")
                    return
        self._arrived.messages.append((message, reply))
        self._wake.set()

    def take_command(self, data: bytes, reply: Reply) -> None:
        """Take an operator's command."""
        command = self._read(data, Command, reply)
        if command is not None:
            self.put(command, reply)

    def take_query(self, data: bytes, reply: Reply) -> None:
        """Take a question of somebody who may only look."""
        command = self._read(data, Command, reply)
        if command is None:
            return
        if command.kind in QUERIES:
            self.put(command, reply)
        else:
            why = f"{command.kind} is not for those who may only look"
            self._refuse(f"command of {command.who or 'a viewer'}: {why}", reply, command.id)

    def take_notice(self, data: bytes, reply: Reply) -> None:
        """Take a notice of an outside monitor."""
        notice = self._read(data, Notice, reply)
        if notice is not None:
            id_ = f"notice-{notice.id or token_hex(6)}"
            args: dict[str, Any] = msgspec.to_builtins(notice)
            who = notice.source or "a monitor"
            self.put(Command(id=id_, kind="notify", args=args, who=who), reply)

    def take_join(self, data: bytes, reply: Reply) -> None:
        """Take a machine's request for a place; the answer that it gets holds a secret."""
        asked = self._read(data, JoinRequest, reply)
        if asked is None:
            return

        async def let_in(answer: bytes) -> None:
            told: CommandReply = decode(answer, CommandReply)
            admission = self.admit(told.result["node"]) if told.ok else None
            if admission is not None:
                result = {"admission": msgspec.to_builtins(admission)}
                told = msgspec.structs.replace(told, result=result)
            elif told.ok:
                told = CommandReply(id=told.id, ok=False, reason="its credentials are gone")
            await reply(encode(told))

        args = {"machine": asked.machine, "host": asked.host}
        self.put(Command(id=f"join-{asked.id}", kind="join", args=args, who=asked.host), let_in)

    def take_beat(self, data: bytes) -> None:
        """Take a heartbeat."""
        try:
            beat: NodeBeat = decode(data, NodeBeat)
        except ProtocolError as error:
            self._refuse(f"heartbeat: {error}")
            return
        ranks = count_numbers(self._spec)
        if not 0 <= beat.node < self._spec.num_nodes:
            self._refuse(f"heartbeat: there is no node {beat.node}")
            return
        if any(not 0 <= progress.rank < ranks for progress in beat.ranks):
            self._refuse(f"heartbeat of node {beat.node}: ranks that there are not")
            return
        self._arrived.beats.setdefault(beat.node, deque(maxlen=BACKLOG_MAX)).append(beat)
        self._wake.set()

    def put(self, command: Command, reply: Reply) -> None:
        """Take a command that has been read."""
        self._arrived.commands.append((command, reply))
        self._wake.set()

    # --- refusals -----------------------------------------------------------------------------

    def _read(self, data: bytes, type_: Any, reply: Reply) -> Any:
        name = type_.__name__.lower()
        if len(data) > COMMAND_BYTES_MAX:
            why = f"{len(data)} bytes are more than {COMMAND_BYTES_MAX}"
            self._refuse(f"{name}: {why}", reply, "")
            return None
        try:
            return decode(data, type_)
        except ProtocolError as error:
            self._refuse(f"{name}: {error}", reply, "")
            return None

    def _refuse(self, why: str, reply: Reply | None = None, id_: str = "") -> None:
        self.refused += 1
        now = self._clock()
        if now - self._said_at_s >= _QUIET_S:
            more = f" (and {self._unsaid} more)" if self._unsaid else ""
            log.error("refused: %.300s%s", why, more)
            self._said_at_s, self._unsaid = now, 0
        else:
            self._unsaid += 1
        if reply is not None:
            answer = CommandReply(id=id_, ok=False, reason=f"refused: {why}"[:500])
            task = asyncio.ensure_future(reply(encode(answer)))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)


def count_numbers(spec: JobSpec) -> int:
    """Return below which number every rank is: members of elastic worlds have later ones."""
    return spec.num_nodes * spec.nproc * (1 if spec.groups else MEMBERS_A_SLOT)


def find_stranger(spec: JobSpec, event: AnyEvent) -> str:
    """Return which node or rank of `event` the job does not have; empty where it has them all."""
    ranks = count_numbers(spec)
    node = getattr(event, "node", -1)
    rank = event.record.rank if isinstance(event, RankExited) else getattr(event, "rank", 0)
    if not -1 <= node < spec.num_nodes:
        return f"there is no node {node}"
    if not -1 <= rank < ranks:
        return f"there is no rank {rank}"
    for name in ("pids", "accounts", "stacks"):
        if any(not 0 <= rank < ranks for rank in getattr(event, name, ())):
            return f"{name} of ranks that there are not"
    return ""
