"""The controller's loop: events in from the bus, decisions out, the journal in between.

One turn of the loop takes everything that has arrived, asks the machines, appends the events and
the decisions as one group, waits until the group is on disk, and only then sends anything: no
node acts on, and no sender is told of, what a power cut could undo. While the journal cannot be
written the loop stands still, and training goes on without it.

One fsync thus lies between a rank's exit and the next assignment. The machines run ahead of the
disk by at most this one group, of which nobody has heard; a controller that dies in between is
replaced by one that never knew of it, and the senders repeat what was not acknowledged.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from perdure.adapters.nats import make_shared_certificate
from perdure.control.joining import preview_invitations
from perdure.control.lighthouse.watch import ReplicaWatch
from perdure.control.membership import membership_of
from perdure.control.membership.quorum import make_quorum_config
from perdure.control.memory import Memory
from perdure.control.orders import OrderBook, Sending
from perdure.control.records import make_journal_event
from perdure.control.senders import describe_sender, find_role, find_untrue, sift_beat
from perdure.control.steering.preview import preview
from perdure.detect.detector import Detector, Unwatched
from perdure.detect.devices import DeviceJudge
from perdure.failpoints import failpoint
from perdure.model.bus.version import can_talk, check_journal
from perdure.model.bus.wire import (
    Command,
    CommandReply,
    EventAck,
    NodeOrder,
    subject_orders,
)
from perdure.model.codec import encode
from perdure.model.errors import PlatformError
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CommandReceived,
    ControllerStarted,
    Decision,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    MetricsLogged,
    Newest,
    NodeRegistered,
    RanksAgreed,
    ResumeCompared,
    name_agreement,
)
from perdure.model.fitting import fit_event
from perdure.model.job import JobSpec
from perdure.model.orders import (
    AnswerCommand,
    AnyAction,
    Assignment,
    EndJob,
    FollowWorld,
    WatchClosely,
)
from perdure.model.report import Snapshot
from perdure.model.signals.progress import NodeBeat
from perdure.service.controller.inbox import Checked, Inbox
from perdure.service.controller.journal import Journal, Position
from perdure.service.controller.snapshots import EVERY, SnapshotFiles
from perdure.service.curves import CurveFiles
from perdure.service.jobfiles import MINE
from perdure.service.part import wait_event
from perdure.service.ports import Bus, Reply
from perdure.telemetry.exactness import LossComparison
from perdure.telemetry.links import LinkFold

log = logging.getLogger("perdure.controller")

SNAPSHOT_S, NEWEST_S = 0.5, 5.0
_LAG_S = 0.5
"""After a turn or an outage longer than this, silence proves nothing for `_SETTLE_S`."""
_SETTLE_S = 1.0
_TIMER_PAUSE_S = 0.05
"""At the least between two `TimerFired`, should a machine leave its deadline in the past."""
_TOGETHER_MIN, _TOGETHER_MAX = 16, 500
"""So many ranks' answers to an agreement are one entry, not one each."""
_WATCH_S = 4.0
"""How long a node under suspicion is looked at more often, before that is asked for again."""


@dataclass(slots=True)
class _Turn:
    """What one turn has brought about; nothing of it leaves before the journal has it."""

    now: float
    entries: list[JournalEntry] = field(default_factory=list)
    sendings: list[Sending] = field(default_factory=list)
    answers: list[AnswerCommand] = field(default_factory=list)
    replies: list[tuple[Reply, bytes]] = field(default_factory=list)
    acks: list[tuple[Reply, set[str]]] = field(default_factory=list)
    agreed: list[tuple[str, int, BoundaryAnswered | BoundaryReached]] = field(default_factory=list)
    """Answers of ranks to one agreement that no entry has yet, with source and number."""
    metrics: list[tuple[str, MetricsLogged]] = field(default_factory=list)
    """What was logged, by its source: no facts, which nothing follows from."""


def _find_strange_version(event: AnyEvent) -> str:
    """Return why an agent that registers cannot be worked with; empty where it can."""
    if not isinstance(event, NodeRegistered) or not event.speaks.protocol:
        return ""  # An agent of 0.1 did not say, and does not come on this subject.
    if can_talk(MINE, event.speaks):
        return ""
    return f"node {event.node} runs {event.speaks}, and this job {MINE}"


def _is_over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()


def make_detector(spec: JobSpec) -> Detector | Unwatched:
    """Return what finds who hangs, is slow or stopped: perdure's lighthouse has its own eyes."""
    if spec.lighthouse is None:
        return Detector(spec)
    own = spec.lighthouse.own  # It has its own eyes.
    return Unwatched() if own else ReplicaWatch(spec.nproc, make_quorum_config(spec))


class ControllerService:
    """One controller of one job; `run` is its life."""

    def __init__(
        self,
        spec: JobSpec,
        bus: Bus,
        journal: Journal,
        *,
        clock: Callable[[], float],
        incarnation: str,
        submitted_s: float,
        show: Callable[[Snapshot], None],
        note: Callable[[list[JournalEntry]], None] = lambda entries: None,
        snapshots: SnapshotFiles | None = None,
        curves: CurveFiles | None = None,
        show_newest: Callable[[Newest], None] = lambda newest: None,
        snapshot_every: int = EVERY,
        known_seq: int = 0,
    ) -> None:
        """Wire the machines; `show` takes a picture twice a second, `note` what was journaled.

        With `snapshots`, what is known is written down every `snapshot_every` entries; with
        `curves`, what `run.log` tells is kept; `show_newest` takes what the journal is told
        seldom. The journal is known to have had `known_seq` entries.
        """
        self._spec, self._bus, self._journal = spec, bus, journal
        self._clock, self._incarnation, self._submitted_s = clock, incarnation, submitted_s
        self._show, self._note = show, note
        self._memory = Memory(spec)
        self._detector = make_detector(spec)
        self._devices = DeviceJudge()
        self._detect = spec.detect
        self._snapshots, self._snapshot_every = snapshots, snapshot_every
        self._curves, self._show_newest = curves, show_newest
        self._losses = LossComparison()
        self._compared = (-1, False)
        """The newest generation that was compared, and whether it was said to differ."""
        self._folding: asyncio.Task[None] | None = None
        self._snapshot_seq = 0
        self._writing: asyncio.Task[None] | None = None
        self._term, self._known_seq = 0, known_seq
        self._orders = OrderBook(spec, incarnation, 0)
        self._join_keys: dict[tuple[int, int], str] = {}
        """Generation and epoch of the newest join -> its key."""
        self._links = LinkFold()
        self._heard: dict[int, float] = {}
        """Node -> job time of its newest heartbeat."""
        self._waiting: dict[str, list[Reply]] = {}
        self._wake = asyncio.Event()
        self.inbox = Inbox(spec, self._wake, clock)
        self._ended: JobEnded | None = None
        self._newest_at_s = 0.0
        self._show_at_s = self._timer_at_s = self._settled_at_s = self._watch_at_s = 0.0
        self._reconnects = 0

    # --- life ---------------------------------------------------------------------------------

    async def run(self) -> JobEnded:
        """Replay, take over, decide until the job has ended; return how it did.

        Raises:
            FencedError: another controller writes the journal.
            PlatformError: the journal cannot be read at the start.
        """
        await self._remember()
        failpoint("controller/replayed")
        if self._ended is None:
            self._term = self._memory.term + 1
            self._orders = OrderBook(self._spec, self._incarnation, self._term)
            await self.inbox.serve(self._bus)
            first = not self._memory.seq
            if self._curves is not None and not first:
                self._folding = asyncio.create_task(self._know_curves(self._curves))
            await self._begin(first=first)
        while self._ended is None:
            await self._pause()
            await self._turn()
        self._show(self._memory.fold.snapshot(self._clock()))
        await self._journal.settle()
        failpoint("controller/ended")
        if self._folding is not None:
            await self._folding
        return self._ended

    async def _remember(self) -> None:
        """Know again what the journal knows: from the newest snapshot that holds, or all of it."""
        started_s = self._clock()
        tail = None
        passed: list[tuple[Memory, Position]] = []
        for memory, position in self._snapshots.read(self._spec) if self._snapshots else ():
            tail = await self._journal.resume(position)
            if tail is not None:
                self._memory, self._snapshot_seq = memory, memory.seq
                break
            log.warning("the snapshot at entry %d does not fit the journal", memory.seq)
            passed.append((memory, position))
        if tail is None:
            async for entry in self._journal.read():
                self._replay(entry)
            tail = []
            if not self._journal.agreed:
                self._memory, self._ended = Memory(self._spec), None
                tail = await self._journal.open()
            for memory, position in passed:
                if self._journal.lacks(position):
                    self._memory, self._snapshot_seq = memory, memory.seq
                    self._journal.skip_to(position)
                    tail = [entry for entry in tail if entry.seq > memory.seq]
                    break
        since = self._snapshot_seq
        for entry in tail:
            self._replay(entry)
        self._reconfigure()
        for at_s, event in self._memory.recent():
            self._detector.note(at_s, event)
            self._devices.note(event)
        replayed_s = self._clock() - started_s
        source = f"after the snapshot at entry {since}" if since else "from the first on"
        log.info("replayed %d entries %s in %.3f s", self._memory.seq - since, source, replayed_s)

    def _replay(self, entry: JournalEntry) -> None:
        """Take an entry of the past."""
        if not self._memory.seq and not isinstance(entry.body, JobSubmitted):
            begin = JobSubmitted(spec=self._spec, at_s=self._submitted_s)  # It is lost.
            self._memory.replay(JournalEntry(1, entry.at_s, begin))
        if isinstance(entry.body, ControllerStarted):
            check_journal(MINE, entry.body.speaks)
        self._memory.replay(entry)
        if isinstance(entry.body, JobEnded):
            self._ended = entry.body

    def _reconfigure(self) -> None:
        """Have the detector judge as the job is configured now."""
        spec = self._memory.machine.state.spec
        if spec is not None and spec.detect is not self._detect:
            self._detector.reconfigure(spec.detect)
            self._detect = spec.detect

    async def _begin(self, *, first: bool) -> None:
        turn = _Turn(self._clock())
        if first:
            self._add(turn, JobSubmitted(spec=self._spec, at_s=self._submitted_s))
        self._add(
            turn,
            ControllerStarted(incarnation=self._incarnation, term=self._term, speaks=MINE),
        )
        self._derive(turn, self._journal.take_damage(max(self._known_seq, self._snapshot_seq)))
        turn.sendings += self._orders.start(turn.now)
        await self._finish(turn)

    async def _pause(self) -> None:
        """Sleep until something arrives or is due."""
        due = [self._show_at_s, self._orders.next_deadline(), self._timer_due()]
        detector_s = self._detector.next_deadline()
        if detector_s is not None:
            due.append(max(detector_s, self._settled_at_s))
        wait_s = min(time_s for time_s in due if time_s is not None) - self._clock()
        if not self.inbox and wait_s > 0:
            await wait_event(self._wake, wait_s)
        lag_s = -wait_s
        if lag_s > _LAG_S or self._bus.reconnects != self._reconnects:
            self._reconnects = self._bus.reconnects
            self._settled_at_s = self._clock() + _SETTLE_S
        self._wake.clear()

    def _timer_due(self) -> float | None:
        deadline_s = self._memory.machine.next_deadline()
        return None if deadline_s is None else max(deadline_s, self._timer_at_s)

    # --- what arrives -------------------------------------------------------------------------

    def command(self, command: Command) -> None:
        """Take a command of this process's own."""

        async def nobody(_: bytes) -> None:
            """Nobody waits for the answer."""

        self.inbox.put(command, nobody)

    # --- one turn -----------------------------------------------------------------------------

    async def _turn(self) -> None:
        inbox = self.inbox.empty()
        turn = _Turn(self._clock())
        self._derive(turn, self._journal.take_damage())
        for sender, batches, reply in inbox.messages:
            self._take_events(turn, sender, batches)
            turn.acks.append((reply, {batch.source for batch in batches}))
        self._add_agreed(turn)
        for command, reply in inbox.commands:
            self._obey(turn, command, reply)
        for node in sorted(inbox.beats):
            self._heard[node] = turn.now
            for said in inbox.beats[node]:
                beat = self._sift(said)
                joined = self._links.take_beat(turn.now, beat)
                self._memory.fold.take_beat(turn.now, joined)
                self._derive(turn, self._detector.take_beat(turn.now, joined))
                self._derive(turn, self._devices.take_beat(turn.now, beat))
        due_s = self._detector.next_deadline()
        if due_s is not None and max(due_s, self._settled_at_s) <= turn.now:
            self._derive(turn, self._detector.tick(turn.now))
        self._derive(turn, self._links.tick(turn.now))
        self._watch_closely(turn)
        due_s = self._timer_due()
        if due_s is not None and due_s <= turn.now:
            self._timer_at_s = turn.now + _TIMER_PAUSE_S
            self._add(turn, self._memory.make_timer(turn.now))
        turn.sendings += self._orders.repeat(turn.now)
        await self._finish(turn)

    def _sift(self, said: NodeBeat) -> NodeBeat:
        """Return what is its node's to tell of a heartbeat; the rest is dropped."""
        beat, why = sift_beat(self._memory.machine.state, self._memory.started, said)
        if why:
            self.inbox.drops.note(f"heartbeat of {describe_sender(str(said.node))}: {why}")
        return beat

    def _watch_closely(self, turn: _Turn) -> None:
        """Have the nodes under suspicion look more often. No decision: nothing is journaled."""
        suspects = self._detector.suspects()
        if suspects and turn.now >= self._watch_at_s:
            self._watch_at_s = turn.now + _WATCH_S / 2
            nodes, until_s = tuple(sorted(suspects)), turn.now + _WATCH_S
            action = WatchClosely(nodes=nodes, until_s=until_s, reason="suspicion")
            turn.sendings += self._orders.take(action)

    def _take_events(self, turn: _Turn, sender: str, batches: Sequence[Checked]) -> None:
        """Take what is new; a gap is left for the sender to fill."""
        for batch in batches:
            if find_role(sender, batch.source) is None:
                self.inbox.drop_event(sender, "the numbers of another source")
                continue
            known = batch.source in self._memory.taken or not batch.events
            if not known and not self.inbox.admits_source(sender):
                return
            skipped = batch.skipped
            for number, event in enumerate(batch.events, batch.first_seq):
                if number - skipped <= self._memory.taken.get(batch.source, 0) + 1 <= number:
                    self._memory.take_number(batch.source, number)
                    if event is not None:
                        self._take_event(turn, sender, batch.source, number, event)
                skipped = 0

    def _take_event(
        self, turn: _Turn, sender: str, source: str, number: int, event: AnyEvent
    ) -> None:
        """Take one event, unless it is not its sender's to tell."""
        state, started = self._memory.machine.state, self._memory.started
        if why := find_untrue(state, started, sender, source, event):
            self.inbox.drop_event(sender, why)
            return
        match event:
            case NodeRegistered() if why := _find_strange_version(event):
                self._send_away(turn, event, why)
            case MetricsLogged():
                turn.metrics.append((source, event))
                self._compare_losses(turn, event)
            case BoundaryAnswered() | BoundaryReached() if name_agreement(event):
                self._collect(turn, source, number, event)
            case _:
                self._add(turn, event, source, number)

    def _compare_losses(self, turn: _Turn, event: MetricsLogged) -> None:
        """Say once a generation whether a resume is exact, and once that it is not."""
        if self._spec.groups:
            return
        state, found = self._memory.machine.state, self._losses.take(event)
        resumed = state.world.resumed_step
        if found is None or resumed <= 0 or membership_of(state).goes_on(state):
            return
        step, differs = found
        if (event.generation, bool(differs)) <= self._compared:
            return
        self._compared = (event.generation, bool(differs))
        compared = ResumeCompared(
            generation=event.generation, step=step, resumed=resumed, differs=differs
        )
        self._add(turn, compared)
        if differs:
            log.error("not exact: %s", differs)

    def _send_away(self, turn: _Turn, event: NodeRegistered, why: str) -> None:
        """Have an agent of another version leave: it would understand half of what it is told.

        It says so on its machine, and the journal and every picture here.
        """
        reason = f"{why}: they do not work together; it is told to leave"
        log.error("%s", reason)
        number = self._memory.machine.state.number + 1
        leave = Assignment(number=number, generation=event.generation + 1, phase="end", reason=why)
        order = NodeOrder(controller=self._incarnation, term=self._term, assignment=leave)
        turn.sendings.append((event.node, order))
        self._enter(
            turn, Decision(action="AssignNodes", summary=f"node {event.node} leaves", reason=reason)
        )

    def _obey(self, turn: _Turn, command: Command, reply: Reply) -> None:
        match command.kind:
            case "ping":
                result = {"controller": self._incarnation, "pid": os.getpid()}
                answer = encode(CommandReply(id=command.id, ok=True, result=result))
                turn.replies.append((reply, answer))
            case "status":
                result = msgspec.to_builtins(self._memory.fold.snapshot(turn.now))
                answer = encode(CommandReply(id=command.id, ok=True, result=result))
                if len(answer) > self._bus.payload_max:
                    why = f"its {len(answer):,} bytes are too many for the server: see state.json"
                    answer = encode(CommandReply(id=command.id, ok=False, reason=why))
                turn.replies.append((reply, answer))
            case kind:
                state = self._memory.machine.state
                if kind == "join":
                    silent = {str(node): turn.now - at for node, at in sorted(self._heard.items())}
                    command = msgspec.structs.replace(
                        command, args={**command.args, "silent_s": silent}
                    )
                known = (
                    state.answered.get(command.id)
                    or preview(state, kind, command.args)
                    or preview_invitations(state, turn.now, kind, command.args)
                )
                if known is not None:
                    turn.replies.append((reply, encode(CommandReply(command.id, *known))))
                    return
                self._waiting.setdefault(command.id, []).append(reply)
                if command.id not in state.commands:
                    event = CommandReceived(
                        id=command.id,
                        kind=kind,
                        args=command.args,
                        who=command.who,
                        at_s=turn.now,
                        pace=self._memory.fold.estimate_pace(),
                    )
                    self._add(turn, event)

    def _collect(
        self, turn: _Turn, source: str, number: int, event: BoundaryAnswered | BoundaryReached
    ) -> None:
        """Let an answer wait for those of other ranks to the same agreement in this turn."""
        if turn.agreed and name_agreement(turn.agreed[0][2]) != name_agreement(event):
            self._add_agreed(turn)
        turn.agreed.append((source, number, event))
        if len(turn.agreed) == _TOGETHER_MAX:
            self._add_agreed(turn)

    def _add_agreed(self, turn: _Turn) -> None:
        """Take what has waited through the machine: of many ranks it is one entry."""
        told, turn.agreed = turn.agreed, []
        if len(told) < _TOGETHER_MIN:
            for source, number, event in told:
                self._add(turn, event, source, number)
            return
        self._enter(turn, RanksAgreed.join(told))
        actions: list[AnyAction] = []
        for _, _, event in told:
            self._orders.note(event)
            actions += self._memory.machine.handle(turn.now, event)
        self._act(turn, actions)

    def _derive(self, turn: _Turn, events: list[AnyEvent]) -> None:
        for event in events:
            self._add(turn, event)

    def _add(self, turn: _Turn, event: AnyEvent, source: str = "", source_seq: int = 0) -> None:
        """Take one event through the machines: its entry, then its decisions, then what follows."""
        if turn.agreed:  # It came before.
            self._add_agreed(turn)
        fitting = fit_event(event, self._journal.body_max)
        if fitting is None:
            self._drop(event, source)
            return
        event = fitting
        self._enter(turn, event, source, source_seq)
        self._orders.note(event)
        self._act(turn, self._memory.machine.handle(turn.now, event))
        self._reconfigure()
        self._devices.note(event)
        self._derive(turn, self._detector.note(turn.now, event))
        self._derive(turn, self._links.note(turn.now, event))

    def _add_key(self, action: AnyAction) -> AnyAction:
        """Return `action`; of a join, with the key of its epoch, which no file keeps."""
        if not isinstance(action, FollowWorld):
            return action
        join = (action.generation, action.epoch)
        if join not in self._join_keys:
            self._join_keys = {join: make_shared_certificate()}
        return msgspec.structs.replace(action, key=self._join_keys[join])

    def _act(self, turn: _Turn, actions: list[AnyAction]) -> None:
        """Enter what the machine has decided, and what follows from it, and have it carried out."""
        self._derive(turn, self._memory.machine.facts(turn.now))
        for action in actions:
            log.info("%s %s: %s", type(action).__name__, action.describe(), action.reason)
            decision = Decision(
                action=type(action).__name__,
                summary=action.describe(),
                reason=action.reason,
                result=action.result if isinstance(action, AnswerCommand) else {},
            )
            self._enter(turn, fit_event(decision, self._journal.body_max) or decision)
            turn.sendings += self._orders.take(self._add_key(action))
            if isinstance(action, AnswerCommand):
                turn.answers.append(action)
            record = make_journal_event(turn.now, action)
            if record is not None:
                self._add(turn, record)
            if isinstance(action, EndJob):
                self._ended = JobEnded(
                    status=action.status,
                    exit_code=action.exit_code,
                    reason=action.reason,
                    at_s=turn.now,
                )
                self._add(turn, self._ended)

    def _drop(self, event: AnyEvent, source: str) -> None:
        """Drop an event that the journal cannot hold.

        Raises:
            PlatformError: it is the job's document.
        """
        size, limit = len(encode(event)), self._journal.body_max
        if isinstance(event, JobSubmitted):
            raise PlatformError(
                f"the job's document has {size:,} bytes, of which the journal takes {limit:,}",
                hint="raise max_payload of the NATS server, or shorten [env] and the arguments",
            )
        name = f"{type(event).__name__} of {source or 'the controller'}"
        self.inbox.drops.note(f"{name}: {size:,} bytes are more than the journal's {limit:,}")

    def _enter(
        self, turn: _Turn, body: AnyEvent | Decision, source: str = "", source_seq: int = 0
    ) -> None:
        entry = JournalEntry(
            seq=self._journal.last_seq + 1 + len(turn.entries),
            at_s=turn.now,
            body=body,
            source=source,
            source_seq=source_seq,
        )
        turn.entries.append(entry)
        self._memory.note(entry)

    async def _finish(self, turn: _Turn) -> None:
        """Wait until the turn is on disk; then send what it decided."""
        if turn.entries:
            await self._journal.append(turn.entries)
            self._note(turn.entries)
            failpoint("controller/journaled")
        self._keep(turn)
        for node, order in turn.sendings:
            await self._bus.publish(subject_orders(self._spec.name, node), encode(order))
            failpoint("controller/ordered", str(node))
        for reply, sources in turn.acks:
            seqs = {source: self._memory.taken.get(source, 0) for source in sorted(sources)}
            await reply(encode(EventAck(seqs, self._term)))
            failpoint("controller/acknowledged")
        now = self._clock()
        # Who is answered may look at once, and sees what the answer says.
        if turn.answers or now >= self._show_at_s or self._ended is not None:
            self._show_at_s = now + SNAPSHOT_S
            self._show(self._memory.fold.snapshot(now))
        if now >= self._newest_at_s or self._ended is not None:
            self._newest_at_s = now + NEWEST_S
            self._show_newest(Newest(self._detector.sum_up(now), self._links.sum_up(now)))
        for action in turn.answers:
            answer = CommandReply(
                id=action.id, ok=action.ok, reason=action.reason, result=action.result
            )
            for reply in self._waiting.pop(action.id, ()):
                await reply(encode(answer))
        for reply, data in turn.replies:
            await reply(data)
        now = self._clock()
        if now - turn.now > _LAG_S:
            self._settled_at_s = now + _SETTLE_S
        self._write_snapshot()

    def _keep(self, turn: _Turn) -> None:
        """Keep what was logged; it is folded, from time to time, beside the loop."""
        for source, event in turn.metrics:
            self._memory.fold.take_metrics(event)
            if self._curves is not None:
                self._curves.append(turn.now, source, event)
        if self._curves is not None and self._curves.is_due() and _is_over(self._folding):
            paths = self._curves.begin_next()
            self._folding = asyncio.create_task(asyncio.to_thread(self._curves.fold, paths))

    async def _know_curves(self, curves: CurveFiles) -> None:
        """Show again what was logged last, and fold what earlier controllers have left."""
        await asyncio.to_thread(curves.fold, curves.begin_next())
        self._memory.fold.know_metrics(await asyncio.to_thread(curves.read_newest))

    def _write_snapshot(self) -> None:
        """Write down what is known, if it is time: rendered now, put on disk beside the loop."""
        every = failpoint("snapshot/every") or self._snapshot_every
        files, due = self._snapshots, self._snapshot_seq + every
        if files is None or self._memory.seq < due or self._ended is not None:
            return
        if not _is_over(self._writing):
            return
        self._snapshot_seq = self._memory.seq
        seq, data = files.render(self._memory, self._journal.position())
        self._writing = asyncio.create_task(asyncio.to_thread(files.write, seq, data))
