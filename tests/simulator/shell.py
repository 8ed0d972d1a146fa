"""The controller's process in the simulator: the real machines, and a shell like the real one.

What it knows is lost when it is killed; what its successor knows comes from a snapshot and the
entries since, and is compared with a replay of everything.
"""

from collections.abc import Callable
from hashlib import sha256

from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.control.orders import OrderBook, Sending
from perdure.control.records import make_journal_event
from perdure.control.senders import find_untrue
from perdure.detect.detector import Detector
from perdure.model.bus.access import BROUGHT_BY
from perdure.model.bus.wire import Command, CommandReply, EventAck, EventMessage
from perdure.model.codec import encode
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    ControllerStarted,
    Decision,
    JobEnded,
    JobSubmitted,
    JournalEntry,
)
from perdure.model.job import JobSpec
from perdure.model.orders import AnswerCommand, AnyAction, EndJob
from perdure.model.signals.progress import NodeBeat
from tests.simulator.network import VirtualClock

SNAPSHOT_EVERY = 40
Answer = Callable[[CommandReply], None]


class ControllerDied(Exception):
    """The rest of what the controller was about to do does not happen."""


class Forgotten(Exception):
    """A snapshot and the entries since do not give what the whole journal gives."""


class Unbelieved(Exception):
    """The controller's door would not believe what an honest node tells."""


class Disk:
    """What outlives every controller: the journal, and the newest snapshot."""

    def __init__(self) -> None:
        """Begin empty."""
        self.journal: list[JournalEntry] = []
        self.snapshot: tuple[int, bytes] | None = None
        self.actions = sha256()
        """Of all actions of all controllers, with their times."""
        self.die_in = 0
        """Events until a controller dies between an event and its decisions; 0 for never."""
        self.ended: JobEnded | None = None

    def replay(self, spec: JobSpec) -> Memory:
        """Return what the whole journal says."""
        memory = Memory(spec)
        for entry in self.journal:
            memory.replay(entry)
        return memory

    def remember(self, spec: JobSpec) -> Memory:
        """Return what a new controller knows."""
        whole = self.replay(spec)
        if self.snapshot is None:
            return whole
        seq, data = self.snapshot
        memory = decode_memory(data, spec)
        for entry in self.journal[seq:]:
            memory.replay(entry)
        if encode_memory(memory) != encode_memory(whole):
            raise Forgotten(f"the snapshot at entry {seq} leads elsewhere than the journal")
        return memory


class Shell:
    """One controller process."""

    def __init__(
        self,
        name: str,
        spec: JobSpec,
        disk: Disk,
        clock: VirtualClock,
        send: Callable[[Sending], None],
    ) -> None:
        """Replay; `start` takes over."""
        self.name, self.spec, self.disk, self.clock, self.send = name, spec, disk, clock, send
        self.memory = disk.remember(spec)
        self.detector = Detector(spec)
        for at_s, event in self.memory.recent():
            self.detector.note(at_s, event)
        self.orders = OrderBook(spec, name)
        self.waiting: dict[str, list[Answer]] = {}

    def start(self) -> None:
        """Take over."""
        now = self.clock.now
        if not self.disk.journal:
            self.append(JobSubmitted(spec=self.spec, at_s=now))
        self.append(ControllerStarted(incarnation=self.name))
        self._send(self.orders.start(now))

    def append(self, event: AnyEvent, source: str = "", source_seq: int = 0) -> None:
        """Journal an event, decide, journal the decisions, act."""
        if self.disk.ended is not None:
            return
        now = self.clock.now
        self._write(event, source, source_seq)
        self._perhaps_die()
        actions = self.memory.machine.handle(now, event)
        for fact in self.memory.machine.facts(now):
            self._write(fact)
            self.memory.machine.handle(now, fact)
        for action in actions:
            self.disk.actions.update(encode(action) + f"{now:.6f}".encode())
            summary = action.describe()
            name = type(action).__name__
            self._write(Decision(action=name, summary=summary, reason=action.reason))
        self.orders.note(event)
        for action in actions:
            self._act(action)
        for derived in self.detector.note(now, event):
            self.append(derived)

    def _write(self, body: AnyEvent | Decision, source: str = "", source_seq: int = 0) -> None:
        number = len(self.disk.journal) + 1
        entry = JournalEntry(number, self.clock.now, body, source, source_seq)
        self.disk.journal.append(entry)
        self.memory.note(entry)

    def _perhaps_die(self) -> None:
        """Die here: the event is on disk, and nothing has followed from it."""
        if self.disk.die_in:
            self.disk.die_in -= 1
            if not self.disk.die_in:
                raise ControllerDied

    def _act(self, action: AnyAction) -> None:
        self._send(self.orders.take(action))
        match action:
            case AnswerCommand(id=id_, ok=ok, result=result, reason=reason):
                for answer in self.waiting.pop(id_, ()):
                    answer(CommandReply(id=id_, ok=ok, reason=reason, result=result))
            case EndJob(status=status, exit_code=code, reason=reason):
                ended = JobEnded(status=status, exit_code=code, reason=reason, at_s=self.clock.now)
                self._write(ended)
                self.memory.machine.handle(self.clock.now, ended)
                self.disk.ended = ended
            case _:
                record = make_journal_event(self.clock.now, action)
                if record is not None:
                    self.append(record)

    def _send(self, sendings: list[Sending]) -> None:
        for sending in sendings:
            self.send(sending)

    def _rest(self) -> None:
        """Write down what is known, if it is time; the journal ends where the memory does."""
        seq = self.disk.snapshot[0] if self.disk.snapshot else 0
        if self.memory.seq >= seq + SNAPSHOT_EVERY:
            self.disk.snapshot = (self.memory.seq, encode_memory(self.memory))

    # --- what arrives --------------------------------------------------------------------------

    def take(self, message: EventMessage) -> EventAck:
        """Take what an agent tells, each event once and in order; return what is on disk."""
        for batch in message.batches:
            for seq, event in enumerate(batch.events, batch.first_seq):
                if seq == self.memory.taken.get(batch.source, 0) + 1:
                    self._believe(message.node, batch.source, event)
                    self.append(event, batch.source, seq)
        self._rest()
        taken = self.memory.taken
        return EventAck({batch.source: taken.get(batch.source, 0) for batch in message.batches})

    def _believe(self, node: int, source: str, event: AnyEvent) -> None:
        """Fail where the controller's door would drop what an honest node tells."""
        if "agent" not in BROUGHT_BY[type(event)]:  # Here the agent tells it for its rank.
            generation, rank = getattr(event, "generation", -1), getattr(event, "rank", -1)
            if generation < 0 or rank < 0:
                return
            source = f"g{generation}-r{rank}-p1"
        state, started = self.memory.machine.state, self.memory.started
        why = find_untrue(state, started, str(node), source, event)
        if why:
            raise Unbelieved(f"{type(event).__name__} of node {node}: {why}")

    def take_beat(self, beat: NodeBeat) -> None:
        """Take a heartbeat."""
        self.memory.fold.take_beat(self.clock.now, beat)
        for event in self.detector.take_beat(self.clock.now, beat):
            self.append(event)

    def obey(self, command: Command, answer: Answer) -> None:
        """Take an operator's command once, however often it is sent, and answer it."""
        state = self.memory.machine.state
        if command.id in state.answered:
            ok, reason, result = state.answered[command.id]
            answer(CommandReply(id=command.id, ok=ok, reason=reason, result=result))
            return
        self.waiting.setdefault(command.id, []).append(answer)
        if command.id not in state.commands:
            self.append(
                CommandReceived(
                    id=command.id,
                    kind=command.kind,  # type: ignore[arg-type]
                    args=command.args,
                    who=command.who,
                    at_s=self.clock.now,
                    pace=self.memory.fold.estimate_pace(),
                )
            )

    def tick(self) -> None:
        """Look after time: the detector's, the machine's, the orders'."""
        now = self.clock.now
        for event in self.detector.tick(now):
            self.append(event)
        deadline_s = self.memory.machine.next_deadline()
        if deadline_s is not None and now >= deadline_s:
            self.append(self.memory.make_timer(now))
        self._send(self.orders.repeat(now))
        self._rest()
