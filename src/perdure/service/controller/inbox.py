"""What has come to the controller, read and checked at its door.

Whatever cannot be read, is too large, or names a node or rank that the job does not have is
dropped here, with a line in the log, and answered if its sender waits. An event that is dropped has
a number, which counts as taken: its sender repeats it no more, and the next event comes.

Which subject a message came by says who its sender is, and what it may ask for: the server has
checked who may publish there (`model/bus/access.py`). Whether an event is its sender's to tell
follows from what the machines know, and is looked at where they are asked (`control/senders.py`).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec

from perdure.control.joining import FINAL
from perdure.control.senders import describe_sender, is_sender
from perdure.failpoints import failpoint
from perdure.model.bus.access import ASKED_BY, Role
from perdure.model.bus.version import can_talk
from perdure.model.bus.wire import (
    Admission,
    Command,
    CommandReply,
    EventAck,
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
from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError, ProtocolError
from perdure.model.events import AnyEvent, RankExited, digest_secret
from perdure.model.input.plain import make_plain
from perdure.model.job import JobSpec
from perdure.model.signals.progress import NodeBeat
from perdure.service.access.sealing import seal
from perdure.service.jobfiles import MINE
from perdure.service.part import DropLog, Tasks
from perdure.service.ports import Bus, Reply

log = logging.getLogger("perdure.controller")

COMMAND_BYTES_MAX = 65_536
"""Of a command or a notice: it is journaled as a whole."""
BACKLOG_MAX = 4
"""Heartbeats kept of one node; older ones are dropped when the loop falls behind."""
MEMBERS_A_SLOT = 1000
"""Numbers that an elastic world may give in a slot, one after another."""
SOURCE_MAX = 200
"""Characters of the name of a source of events: each is remembered."""
NAMES_MAX, NAMES_A_S = 64, 8.0
"""New sources of events of one node taken at once and then a second, beside 8 and one for each of
its ranks. A sender repeats what is passed over."""
_NOT_FOR: Mapping[str, str] = {
    "operator": "is not for an operator to ask for",
    "viewer": "is not for those who may only look",
}


class Checked(NamedTuple):
    """A batch whose events were read; None stands for one that was dropped."""

    source: str
    first_seq: int
    events: Sequence[AnyEvent | None]
    skipped: int = 0


@dataclass(slots=True)
class Arrived:
    """Everything that has arrived since the last turn."""

    messages: list[tuple[str, list[Checked], Reply]] = field(default_factory=list)
    """Each with its sender, as the subject says."""
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
        self._answers = Tasks()
        nproc = spec.nproc
        self._names = _Allowance(NAMES_MAX + 8 * nproc, NAMES_A_S + nproc, clock)
        self.drops = DropLog(log, clock)

    def __bool__(self) -> bool:
        """Return whether anything has arrived."""
        return bool(self._arrived)

    async def serve(self, bus: Bus) -> None:
        """Take what comes over `bus`."""
        job = self._spec.name
        await bus.serve_each(subject_events(job, "*"), self.take_message)
        await bus.serve(subject_commands(job), partial(self._take_asked, "operator"))
        await bus.serve(subject_queries(job), partial(self._take_asked, "viewer"))
        await bus.serve(subject_notices(job), self.take_notice)
        await bus.serve(subject_joins(job), self.take_join)
        await bus.serve_each(subject_beats(job, "*"), self.take_beat)

    def empty(self) -> Arrived:
        """Return what has arrived, and begin anew."""
        arrived, self._arrived = self._arrived, Arrived()
        return arrived

    # --- by the bus ---------------------------------------------------------------------------

    def take_message(self, sender: str, data: bytes, reply: Reply) -> None:
        """Take events of `sender`: a node's agent by its number, `lighthouse` or `run`."""
        who = describe_sender(sender)
        try:
            if not is_sender(self._spec, sender):
                raise ProtocolError("there is no such sender")
            node, batches, dropped = read_message(data, self._spec)
            if str(node) != (sender if sender.isdecimal() else "-1"):
                raise ProtocolError(f"{who} says that it is node {node}")
        except ProtocolError as error:
            self.drop_event(sender, error)
            self._answer(reply, EventAck({}, refused=make_plain(str(error))))
            return
        for why in dropped:
            self.drop_event(sender, why)
        failpoint("inbox/taken", sender)
        self._arrived.messages.append((sender, batches, reply))
        self._wake.set()

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

        if not can_talk(MINE, asked.speaks):
            why = f"this machine's is {asked.speaks}, the job's is {MINE}"
            self.drops.note(f"join of {asked.host}: {why}")
            refusal = CommandReply(id=asked.id, ok=False, reason=why, result=dict(FINAL))
            self._answer(reply, refusal)
            return

        async def let_in(answer: bytes) -> None:
            told: CommandReply = decode(answer, CommandReply)
            admission, why = None, "its credentials are gone"
            try:
                admission = self.admit(told.result["node"]) if told.ok else None
            except (OSError, PerdureError) as error:
                log.error("%s is not let in: %s", asked.host, error)
                # A path on this machine is nobody's business elsewhere.
                words = error.message if isinstance(error, PerdureError) else error.strerror
                why = f"its credentials cannot be read where the job runs: {words}"
            if admission is not None:
                result: dict[str, Any] = {"admission": msgspec.to_builtins(admission)}
                if asked.sealed:  # All machines that join hear what is sent to `joiner`.
                    result = {"sealed": seal(encode(admission), asked.secret)}
                told = msgspec.structs.replace(told, result=result)
            elif told.ok:
                told = CommandReply(id=told.id, ok=False, reason=why)
            await reply(encode(told))

        args = {"machine": asked.machine, "host": asked.host}
        args |= {"invitation": asked.invitation, "proof": digest_secret(asked.secret)}
        # Decided anew each time: an answer that was kept would give away the login of now.
        id_ = f"join-{token_hex(8)}"
        self.put(Command(id=id_, kind="join", args=args, who=asked.host), let_in)

    def take_beat(self, sender: str, data: bytes, _: Reply) -> None:
        """Take a heartbeat of the node `sender`."""
        try:
            beat: NodeBeat = decode(data, NodeBeat)
            if self._spec.served or not 0 <= beat.node < self._spec.num_nodes:
                raise ProtocolError(f"there is no node {beat.node}")
            if str(beat.node) != sender:
                raise ProtocolError(f"it says that it is node {beat.node}")
            ranks = count_numbers(self._spec)
            if any(not 0 <= progress.rank < ranks for progress in beat.ranks):
                raise ProtocolError("ranks that there are not")
        except ProtocolError as error:
            self.drops.note(f"heartbeat of {describe_sender(sender)}: {error}")
            return
        self._arrived.beats.setdefault(beat.node, deque(maxlen=BACKLOG_MAX)).append(beat)
        self._wake.set()

    def put(self, command: Command, reply: Reply) -> None:
        """Take a command that has been read."""
        self._arrived.commands.append((command, reply))
        self._wake.set()

    # --- refusals -----------------------------------------------------------------------------

    def drop_event(self, sender: str, why: object) -> None:
        """Log that an event of `sender` is dropped."""
        self.drops.note(f"event of {describe_sender(sender)}: {why}")

    def admits_source(self, sender: str) -> bool:
        """Return whether `sender` may have another source of events now; log it if not."""
        admitted = self._names.take(sender)
        if not admitted:
            self.drop_event(sender, "more new sources of events than it has processes")
        return admitted

    def _take_asked(self, role: Role, data: bytes, reply: Reply) -> None:
        """Take what an operator asks for, or somebody who may only look."""
        command = self._read(data, Command, reply)
        if command is None:
            return
        if command.kind in ASKED_BY[role]:
            self.put(command, reply)
        else:
            who = command.who or f"a {role}"
            self._refuse(f"command of {who}: {command.kind} {_NOT_FOR[role]}", reply, command.id)

    def _read(self, data: bytes, type_: Any, reply: Reply) -> Any:
        name = type_.__name__.lower()
        try:
            if len(data) > COMMAND_BYTES_MAX:
                raise ProtocolError(f"{len(data)} bytes are more than {COMMAND_BYTES_MAX}")
            return decode(data, type_)
        except ProtocolError as error:
            self._refuse(f"{name}: {error}", reply, "")
            return None

    def _refuse(self, why: str, reply: Reply, id_: str) -> None:
        self.drops.note(why)
        self._answer(reply, CommandReply(id=id_, ok=False, reason=f"refused: {why}"[:500]))

    def _answer(self, reply: Reply, answer: CommandReply | EventAck) -> None:
        self._answers.spawn(reply(encode(answer)))


class _Allowance:
    """What each sender may cost: so much at once, and so much a second."""

    def __init__(self, at_once: float, a_second: float, clock: Callable[[], float]) -> None:
        self._at_once, self._a_second, self._clock = at_once, a_second, clock
        self._left: dict[str, tuple[float, float]] = {}
        """Sender -> (what it may cost now, since when)."""

    def take(self, sender: str) -> bool:
        """Return whether `sender` may cost one more now."""
        now = self._clock()
        left, since_s = self._left.get(sender, (self._at_once, now))
        left = min(self._at_once, left + (now - since_s) * self._a_second)
        self._left[sender] = (left - 1.0 if left >= 1.0 else left, now)
        return left >= 1.0


class _RawBatch(msgspec.Struct):
    source: str
    first_seq: int
    events: tuple[msgspec.Raw, ...]
    skipped: int = 0


class _RawMessage(msgspec.Struct):
    node: int
    batches: tuple[_RawBatch, ...]


_raw_messages = msgspec.json.Decoder(_RawMessage)


def read_message(data: bytes, spec: JobSpec) -> tuple[int, list[Checked], list[str]]:
    """Return the node of a message, its batches, and why events of them were dropped.

    Raises:
        ProtocolError: it is no message, so that nobody knows which numbers it has.
    """
    dropped: list[str] = []

    def check(event: AnyEvent | msgspec.Raw) -> AnyEvent | None:
        try:
            if isinstance(event, msgspec.Raw):
                event = decode(bytes(event), AnyEvent)
            if why := find_stranger(spec, event):
                raise ProtocolError(why)
        except ProtocolError as error:
            dropped.append(str(error))
            return None
        return event

    try:
        message: EventMessage | _RawMessage = decode(data, EventMessage)
    except ProtocolError:  # One of its events, perhaps: they are read one by one.
        message = _decode_raw(data)
    batches = []
    for batch in message.batches:
        if len(batch.source) > SOURCE_MAX or batch.first_seq < 1 or batch.skipped < 0:
            raise ProtocolError(f"a batch that cannot be: {make_plain(batch.source, 40)}")
        events = [check(event) for event in batch.events]
        batches.append(Checked(batch.source, batch.first_seq, events, batch.skipped))
    return message.node, batches, dropped


def _decode_raw(data: bytes) -> _RawMessage:
    try:
        return _raw_messages.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def count_numbers(spec: JobSpec) -> int:
    """Return below which number every rank is: members of elastic worlds have later ones.

    So have replica groups that others start, of which nobody knows how many there will be.
    """
    known = spec.groups and not spec.served
    return spec.num_nodes * spec.nproc * (1 if known else MEMBERS_A_SLOT)


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
