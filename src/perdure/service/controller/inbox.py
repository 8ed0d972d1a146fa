"""What has come to the controller, read and checked at its door.

Whatever cannot be read, is too large, or names a node or rank that the job does not have is
refused here: said in the log, counted (`service/part.py`), answered where an answer is awaited. An
event that is refused has a number all the same, and its sender says nothing else before it was
taken: a note that it was set aside takes its place in the journal, and the stream goes on.

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
    EventBatch,
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
from perdure.model.events import AnyEvent, MessagesSetAside, RankExited, digest_secret
from perdure.model.job import JobSpec
from perdure.model.plain import make_plain
from perdure.model.signals.progress import NodeBeat
from perdure.service.access.sealing import seal
from perdure.service.jobfiles import MINE
from perdure.service.part import Asides, Tasks
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
_NOTES_MAX, _NOTES_A_S = 20, 2.0
"""Messages of one node whose events were in part set aside, taken at once and then a second: each
costs the journal an entry. A sender repeats what is passed over."""
NAMES_MAX, NAMES_A_S = 64, 8.0
"""New sources of events of one node taken at once and then a second, beside 8 and one for each of
its ranks. A sender repeats what is passed over."""
_NOT_FOR: Mapping[str, str] = {
    "operator": "is not for an operator to ask for",
    "viewer": "is not for those who may only look",
}
_QUIET_S = 1.0
"""Between two lines about refusals: a flood of them shall not fill the disk as well."""


@dataclass(slots=True)
class Arrived:
    """Everything that has arrived since the last turn."""

    messages: list[tuple[str, EventMessage, Reply]] = field(default_factory=list)
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
        self._said_at_s, self._unsaid = -_QUIET_S, 0
        nproc = spec.nproc
        self._notes = _Allowance(_NOTES_MAX, _NOTES_A_S, clock)
        self._names = _Allowance(NAMES_MAX + 8 * nproc, NAMES_A_S + nproc, clock)
        self._waits: dict[str, str] = {}
        """Sender -> its source whose first batch had to wait last."""
        self.asides = Asides(clock)
        """What was refused beside the stream of events."""
        self.refused = 0
        """Messages refused so far."""

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
            message, refused = read_message(data, self._spec, self._clock())
            if str(message.node) != (sender if sender.isdecimal() else "-1"):
                raise ProtocolError(f"{who} says that it is node {message.node}")
        except ProtocolError as error:
            self.asides.note("event", who, error, data)
            self._refuse(f"event of {who}: {error}")
            self._answer(reply, EventAck({}, refused=make_plain(str(error))))
            return
        if refused:
            self._refuse(f"event of {who}: {refused}")
            if not self._notes.take(sender):
                return
        failpoint("inbox/taken", sender)
        self._arrived.messages.append((sender, message, reply))
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
            self.asides.note("command", f"a join of {asked.host}", why)
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
        who = describe_sender(sender)
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
            self.asides.note("heartbeat", who, error, data)
            self._refuse(f"heartbeat of {who}: {error}")
            return
        self._arrived.beats.setdefault(beat.node, deque(maxlen=BACKLOG_MAX)).append(beat)
        self._wake.set()

    def put(self, command: Command, reply: Reply) -> None:
        """Take a command that has been read."""
        self._arrived.commands.append((command, reply))
        self._wake.set()

    # --- refusals -----------------------------------------------------------------------------

    def set_aside(self, sender: str, source: str, event: AnyEvent, why: str) -> AnyEvent | None:
        """Return the note that takes the place of an event which is not `sender`'s to tell.

        None where the sender may not cost the journal another note now.
        """
        self._refuse(f"event of {describe_sender(sender)}: {why}")
        if not self._notes.take(sender):
            return None
        who = f"node {sender}" if sender.isdecimal() else sender
        return _make_note(self._clock(), f"{who}, {source}", why, encode(event))

    def admits_source(self, sender: str, source: str) -> bool:
        """Return whether `sender` may have another source now; where not, that is counted."""
        if self._names.take(sender):
            return True
        if self._waits.get(sender) != source:  # A batch that is only repeated counts once.
            self._waits[sender] = source
            self.pass_over(sender, source, "more new sources of events than it has processes")
        return False

    def pass_over(self, sender: str, source: str, why: str) -> None:
        """Count a batch that is not taken, such as of another's source: nothing takes its place."""
        self.asides.note("event", describe_sender(sender), why, source)
        self._refuse(f"event of {describe_sender(sender)}: {why}")

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
            self.asides.note("command", f"{name} of somebody", error, data)
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


class _Unread(NamedTuple):
    """An event that is refused."""

    data: bytes
    why: str


_raw_messages = msgspec.json.Decoder(_RawMessage)


def read_message(data: bytes, spec: JobSpec, now: float) -> tuple[EventMessage, str]:
    """Return the message in `data`, and why the first event was refused that was not taken.

    In the place of events that are refused stands a note; everything else is as it was sent.

    Raises:
        ProtocolError: it is no message, so that nobody knows which numbers it has.
    """
    try:
        message: EventMessage = decode(data, EventMessage)
    except ProtocolError:
        message = _read_apart(data)
    found: list[EventBatch] = []
    refused = ""
    for batch in message.batches:
        if len(batch.source) > SOURCE_MAX or batch.first_seq < 1 or batch.skipped < 0:
            raise ProtocolError(f"a batch that cannot be: {make_plain(batch.source, 40)}")
        taken: list[AnyEvent] = []
        events: Sequence[AnyEvent | _Unread] = batch.events
        for event in events:
            strange = "" if isinstance(event, _Unread) else find_stranger(spec, event)
            if strange:
                event = _Unread(encode(event), strange)
            if isinstance(event, _Unread):
                refused = refused or event.why
                source = f"node {message.node}, {batch.source}"
                event = _make_note(now, source, event.why, event.data)
            taken.append(event)
        found.append(msgspec.structs.replace(batch, events=tuple(taken)))
    return EventMessage(message.node, tuple(found)), refused


def _make_note(now: float, source: str, why: str, data: bytes) -> MessagesSetAside:
    return MessagesSetAside(
        at_s=now,
        door="event",
        source=make_plain(source),
        reason=make_plain(why),
        example=make_plain(data),
    )


def _read_apart(data: bytes) -> EventMessage:
    """Return the message in `data`, in which an `_Unread` stands for each event that is none."""
    try:
        raw = _raw_messages.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error
    batches = (
        EventBatch(b.source, b.first_seq, tuple(map(_read_event, b.events)), b.skipped)
        for b in raw.batches
    )
    return EventMessage(raw.node, tuple(batches))


def _read_event(raw: msgspec.Raw) -> Any:
    try:
        return decode(bytes(raw), AnyEvent)
    except ProtocolError as error:
        return _Unread(bytes(raw), str(error))


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
