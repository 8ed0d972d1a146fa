"""The lighthouse's loop: torchft's protocol in front, `control.lighthouse.quorum` behind it.

It needs nobody to go on. What the controller orders (who is held, who is evicted, which store is
whose) are levels that it keeps; the deaths that agents report it hears on the bus at the same
time as the controller, and acts upon them at once, since they are facts and not decisions. While
the bus is away replicas go on asking and are answered.
"""

import asyncio
import itertools
import logging
import math
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.adapters.lighthouse import LighthouseServer
from perdure.control.lighthouse.names import Names
from perdure.control.lighthouse.outputs import (
    Answered,
    Fenced,
    Formed,
    Late,
    LeftOut,
    Output,
    Refused,
    Seen,
    Stands,
)
from perdure.control.lighthouse.quorum import Quorums
from perdure.control.membership.quorum import make_quorum_config
from perdure.failpoints import failpoint
from perdure.model.bus.lighthouse import encode_response, parse_heartbeat, parse_request
from perdure.model.bus.wire import (
    EventMessage,
    LinesHeld,
    LinesKnown,
    NodeOrder,
    read_order,
    subject_beats,
    subject_events,
    subject_lines,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError, SafetyError
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    KeeperLost,
    QuorumFormed,
    QuorumIdsReserved,
    RankExited,
    ReplicaLate,
    ReplicaSeen,
    ReplicaWaiting,
)
from perdure.model.job import JobSpec, Lighthouse
from perdure.model.orders import (
    LIGHTHOUSE,
    AnyOrder,
    EvictReplica,
    FenceAbort,
    HoldReplicas,
    InjectFault,
    RankOrder,
    ReplicaGroup,
    SendBoundary,
)
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import NodeBeat
from perdure.service.agent.outbox import Outbox
from perdure.service.jobfiles import read_document, write_document
from perdure.service.lighthouse.endings import Endings
from perdure.service.lighthouse.relays import TOLD_S, Relays
from perdure.service.lighthouse.remembered import LighthouseFile
from perdure.service.lighthouse.replica_ranks import ReplicaRanks
from perdure.service.part import Tasks, wait_event
from perdure.service.ports import Bus, Reply

log = logging.getLogger("perdure.lighthouse")

IDS = 1000
"""Quorum ids reserved at a time."""
_FIRST_ID_MAX = 1_000_000
"""Of the first quorum of groups that others start."""
NOTE_S = 5.0
"""A step that has advanced is told of this often, though the members are the same."""
_LAG_S = 0.2
"""After a turn that came so much too late, nobody's silence counts."""
_TICK_S_MIN = 0.01
_BIND_S = 10.0
_OPEN_S = 1.0
"""It is looked so often whether a replica is known that was not seen."""


class _Passing(Outbox):
    """What the lighthouse tells, and its ranks by way of it; of their waits it hears itself."""

    on_waiting: Callable[[ReplicaWaiting], None]

    def put_from(self, source: str, seq: int, event: AnyEvent, done: Callable[[], None]) -> None:
        """Queue event `seq` of a rank."""
        super().put_from(source, seq, event, done)
        if isinstance(event, ReplicaWaiting):
            self.on_waiting(event)


class LighthouseService:
    """One lighthouse; the bus may come and go."""

    def __init__(
        self,
        spec: JobSpec,
        path: str,
        *,
        clock: Callable[[], float],
        incarnation: str,
        clock_offset_s: float = 0.0,
    ) -> None:
        """Serve `spec`; keep what must not be forgotten in the file `path`."""
        self._spec, self._path, self._clock = spec, path, clock
        self._awake_s = math.inf
        """When we are awake at the latest."""
        self._incarnation, self._place = incarnation, spec.lighthouse or Lighthouse()
        self.machine = Quorums(make_quorum_config(spec))
        self._server = LighthouseServer(self._take_request, self._take_heartbeat)
        self.tasks = Tasks()
        self._futures: dict[int, asyncio.Future[bytes]] = {}
        self._tokens = itertools.count(1)
        self._wake, self._seen = asyncio.Event(), asyncio.Event()
        self._file = LighthouseFile(port=0)
        self._bus: Bus | None = None
        subject = subject_events(spec.name, LIGHTHOUSE)
        self._outbox = _Passing(None, subject, node=-1, source=incarnation)
        self._outbox.on_waiting = self._take_waiting
        self._ranks = ReplicaRanks(
            spec,
            self._outbox,
            clock=clock,
            clock_offset_s=clock_offset_s,
            find=self._find_life,
            ended=self._take_end,
        )
        self._relays = Relays(clock, spec.nproc)
        self._hold_number = -1
        self._endings = Endings(
            spec, self.machine, self._outbox, self.tasks, clock=clock, forget=self._forget
        )
        self._noted: tuple[float, int] = (0.0, -1)

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> int:
        """Listen on the port of the lighthouse before this one, or on a new one; return it."""
        known = read_document(self._path, LighthouseFile)
        deadline_s = self._clock() + _BIND_S
        while True:
            try:
                wanted = known.port if known else self._place.port
                port = await self._server.start(self._place.bind, wanted)
                break
            except PlatformError:
                if self._clock() > deadline_s:
                    raise
                self._server = LighthouseServer(self._take_request, self._take_heartbeat)
                await asyncio.sleep(0.05)
        if known is not None:
            self.machine.restore(self._clock() + 1.0, known.quorum_id, known.members, known.homes)
            self.machine.regroup(self._clock(), known.groups)
            self.machine.next_id = known.ids_until
            self.machine.silences.long.extend(known.silences)
            self.machine.names = Names(dict(known.names), known.lives)
        elif self._spec.served:  # A manager that outlived an earlier run takes its id for known.
            self.machine.next_id = 1 + secrets.randbelow(_FIRST_ID_MAX)
            self._hold_known()
        until = self.machine.next_id + IDS
        line = known.line if known is not None else secrets.token_hex(8)
        kept = msgspec.structs.replace(known or self._file, port=port, ids_until=until, line=line)
        self._keep(kept)
        self._outbox.put(QuorumIdsReserved(until=until, at_s=self._clock()))
        return port

    def _hold_known(self) -> None:
        """Hold those with whom the job begins held, before the controller has said so."""
        held = self._spec.torchft.held
        names = {group.name: group.number for group in held}
        groups = tuple(ReplicaGroup(number, -1, "", held=True) for number in names.values())
        self.machine.names = Names(names)
        self.machine.regroup(self._clock(), groups)
        self._file = msgspec.structs.replace(self._file, groups=groups, names=dict(names))

    async def run(self) -> None:
        """Look at what is due, until cancelled."""
        while True:
            due_s = self.machine.next_deadline()
            wait_s = NOTE_S if due_s is None else due_s - self._clock()
            wait_s = min(max(wait_s, _TICK_S_MIN), NOTE_S)
            self._awake_s = self._clock() + wait_s
            self._wake.clear()
            await wait_event(self._wake, wait_s)
            self._do(self.machine.tick(self._now()))
            self._note_step()

    def _now(self) -> float:
        """Return job time, at which an input is taken: what we have slept through is forgiven."""
        now = self._clock()
        lag_s = now - self._awake_s
        if lag_s > _LAG_S:
            log.warning("this process came %.2f s too late: nobody's silence counts", lag_s)
            self._awake_s = now
            self.machine.forgive(now, lag_s)
        return now

    async def join(self, bus: Bus) -> None:
        """Hear and tell over `bus`, which keeps itself connected."""
        job = self._spec.name
        self._bus = self._outbox.bus = bus
        self.tasks.spawn(self._outbox.run())
        await bus.subscribe(subject_orders(job, LIGHTHOUSE), self._take_order)
        await bus.serve_each(subject_events(job, "*"), self._take_events)
        await bus.serve_each(subject_beats(job, "*"), self._take_beat)
        if self._spec.served:
            await bus.serve_each(subject_lines(job, "*"), self._take_lines)

    async def hear_ranks(self, paths: JobPaths, port: int) -> None:
        """Take the lines of ranks that others have started."""
        await self._ranks.start(paths, port, self._file.line)

    async def close(self) -> None:
        """Hang up."""
        await self.tasks.end()
        await self._ranks.close()
        await self._server.close()

    # --- in -----------------------------------------------------------------------------------

    async def _take_request(self, data: bytes) -> bytes:
        member = parse_request(data)
        token = next(self._tokens)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._futures[token] = future
        self._do(self.machine.ask(self._now(), token, member))
        try:
            return await future
        finally:
            if self._futures.pop(token, None) is not None and not future.done():
                self._do(self.machine.hang_up(self._now(), token))

    def _take_heartbeat(self, data: bytes) -> None:
        self._do(self.machine.hear(self._now(), parse_heartbeat(data)))

    def _take_order(self, data: bytes) -> None:
        try:
            message, _ = read_order(data)
        except ProtocolError as error:
            log.error("refused: %s", error)
            return
        now = self._now()
        for order in message.orders:
            match order:
                case HoldReplicas() if order.number > self._hold_number:
                    self._take_groups(now, order)
                case EvictReplica(kill=True):
                    self._endings.kill(order)
                case InjectFault() if self._relays.holds(order.rank, order.generation):
                    self._pass_on(order)
                case InjectFault():
                    if not self._ranks.take(order):
                        self._endings.harm(order)
                case RankOrder():
                    self._ranks.take(order)
                    self._pass_on(order)
                    if isinstance(order, SendBoundary) and order.move == "prepare":
                        self._refuse_for_lost(order)
                case EvictReplica():
                    self._do(self.machine.evict(now, order.replica, order.reason))
                    self._do(self.machine.end(now, order.generation, order.reason, fence=True))

    def _refuse_for_lost(self, order: SendBoundary) -> None:
        """Say no for a rank whose line is lost: it trains on, and would be waited for in vain."""
        own, life = self._ranks.lines, order.generation
        lost = (r for r in order.ranks if own.get(r) != life and self._relays.has_lost(r, life))
        if (rank := next(lost, None)) is None:
            return
        why = "it has no line to the lighthouse any more: is perdure node join up on its machine?"
        self._outbox.put(
            BoundaryAnswered(id=order.id, rank=rank, ok=False, step=-1, reason=why, refused=True)
        )

    def _forget(self, name: str, reason: str) -> None:
        """Go on without a replica of whose end it was told already."""
        told = self.machine.evict(self._now(), name, reason)
        self._do([output for output in told if not isinstance(output, LeftOut)])

    def _take_lines(self, place: str, data: bytes, reply: Reply) -> None:
        """Take which ranks the relay of a place hears, and answer what it asks."""
        said: LinesHeld | None = self._decode(data, LinesHeld)
        if said is None:
            return
        for life, reason in self._relays.take(place, said, self._ranks.lines).items():
            self._take_end(life, reason)
        self.tasks.spawn(self._answer_lines(said.find, reply))

    async def _answer_lines(self, replica: str, reply: Reply) -> None:
        """Answer a relay; of a replica, once the controller knows it: its ranks speak next."""
        group, life = await self._find_life(replica) if replica else (-1, -1)
        if replica and not await self._outbox.flush(TOLD_S):
            return  # It asks again.
        kept, now = self._file, self._clock()
        known = LinesKnown(at_s=now, port=kept.port, line=kept.line, group=group, life=life)
        await reply(encode(known))

    def _pass_on(self, order: AnyOrder) -> None:
        """Have the relays tell it to those of their ranks that it is for."""
        if self._bus is None:
            return
        data = encode(NodeOrder(controller=self._incarnation, orders=(order,)))
        for place in self._relays.places:
            self.tasks.spawn(self._bus.publish(subject_orders(self._spec.name, place), data))

    async def _find_life(self, name: str) -> tuple[int, int]:
        """Return group and life of a replica, once it is seen which these are; -1 if unknown."""
        self._do(self.machine.introduce(self._now(), name))
        while self.machine.is_open(name):
            self._seen.clear()
            await wait_event(self._seen, _OPEN_S)
        known = self.machine.replicas.get(name)
        return known.home if known is not None else (-1, -1)

    def _take_end(self, life: int, reason: str) -> None:
        self._do(self.machine.end(self._now(), life, reason, fence=True))

    def _take_waiting(self, event: ReplicaWaiting) -> None:
        """Take that a rank waits in a collective, or has waited."""
        waits = self.machine.wait(
            self._now(),
            event.generation,
            event.quorum_id,
            event.since_s,
            timeout_s=event.timeout_s,
            over=event.over,
        )
        self._do(waits)

    def _take_groups(self, now: float, hold: HoldReplicas) -> None:
        log.info("hold #%d: %s", hold.number, hold.groups)
        self._hold_number = hold.number
        self._keep(msgspec.structs.replace(self._file, groups=hold.groups))
        told = {"startup_s": hold.startup_s, "alone_s": hold.alone_s}
        self.machine.config = msgspec.structs.replace(
            self.machine.config, **{name: s for name, s in told.items() if s is not None}
        )
        self._do(self.machine.regroup(now, hold.groups))

    def _take_events(self, sender: str, data: bytes, _: Reply) -> None:
        """Take what an agent tells of its node's group, or a relay of its ranks; of no other."""
        message: EventMessage | None = self._decode(data, EventMessage)
        now = self._now()
        batches = message.batches if message is not None else ()
        for event in (event for batch in batches for event in batch.events):
            match event:
                case ReplicaWaiting(rank=rank, generation=life) if self._spec.served:
                    if self._relays.holds(rank, life, sender):
                        self._take_waiting(event)
                case _ if self._spec.served:
                    pass  # No agent is there.
                case RankExited(record=record) if self._is_home(record.generation, sender):
                    why = f"rank {record.rank}: {record.cause}"
                    ended = self.machine.end(now, record.generation, why, fence=record.failed)
                    self._do(ended)
                case KeeperLost(generation=generation) if self._is_home(generation, sender):
                    self._do(self.machine.end(now, generation, "its keeper died", fence=True))
                case ReplicaWaiting() if self._is_home(event.generation, sender):
                    self._take_waiting(event)

    def _is_home(self, generation: int, sender: str) -> bool:
        """Return whether a generation is of the group that the node `sender` runs."""
        homes = {replica.home[1]: replica.home[0] for replica in self.machine.replicas.values()}
        homes |= {group.generation: group.group for group in self.machine.groups.values()}
        return str(homes.get(generation)) == sender

    def _take_beat(self, sender: str, data: bytes, _: Reply) -> None:
        beat: NodeBeat | None = self._decode(data, NodeBeat)
        if beat is not None and self._is_home(beat.generation, sender):
            states = {rank.proc.state for rank in beat.ranks}
            phases = [rank.busy_phase for rank in beat.ranks if rank.busy_phase is not None]
            outputs = self.machine.note_process(
                self._now(),
                beat.generation,
                stopped="T" in states,  # A debugger's `t` ends by itself; py-spy makes it, too.
                lives=bool(states) and not states & {"Z", "X", "?"},
                busy_until_s=max((phase.until_s for phase in phases), default=0.0),
            )
            if outputs:
                self._do(outputs)

    def _decode(self, data: bytes, type_: Any) -> Any:
        """Return the message in `data`; None where it is none."""
        try:
            return decode(data, type_)
        except ProtocolError as error:
            log.error("refused: %s", error)
            return None

    # --- out ----------------------------------------------------------------------------------

    def _do(self, outputs: list[Output]) -> None:
        self._wake.set()
        for output in outputs:
            match output:
                case Formed():
                    self._form(output)
                case Answered(tokens=tokens, quorum_id=quorum_id, members=members):
                    answer = encode_response(quorum_id, members, self._clock())
                    for token in tokens:
                        future = self._futures.pop(token, None)
                        if future is not None and not future.done():
                            future.set_result(answer)
                case Refused(token=token, reason=reason):
                    future = self._futures.pop(token, None)
                    if future is not None and not future.done():
                        log.warning("refused: %s", reason)
                        future.set_exception(SafetyError(reason))
                case Fenced():
                    self._fence(output)
                case Seen():
                    self._tell_seen(output)
                case Late():
                    self._tell_late(output)
                case LeftOut():
                    self._tell_left_out(output)
                case Stands(replica=replica) if self._endings.is_ending(replica):
                    pass  # It was in the quorum until it was evicted, and was not drained.
                case Stands(replica=replica, group=group, step=step):
                    now, hold = self._clock(), self._hold_number
                    stands = ReplicaSeen(
                        replica=replica, group=group, at_s=now, held=True, hold=hold, step=step
                    )
                    self._outbox.put(stands)

    def _tell_seen(self, seen: Seen) -> None:
        self._seen.set()
        log.info("%s of group %d, generation %d asks", seen.replica, seen.group, seen.generation)
        event = ReplicaSeen(replica=seen.replica, group=seen.group, at_s=self._clock())
        if self._spec.served:  # Nobody else knows of it.
            names = self.machine.names
            kept = msgspec.structs.replace(self._file, names=dict(names.numbers), lives=names.lives)
            self._keep(kept)
            event = msgspec.structs.replace(
                event, life=seen.generation, manager=seen.manager, ranks=seen.ranks
            )
        self._outbox.put(event)

    def _form(self, formed: Formed) -> None:
        """Keep it on disk before anybody is answered, and tell of it."""
        until = self._file.ids_until
        if formed.quorum_id + IDS // 2 > until:
            until = formed.quorum_id + IDS
            self._outbox.put(QuorumIdsReserved(until=until, at_s=self._clock()))
        self._keep(
            msgspec.structs.replace(
                self._file,
                ids_until=until,
                quorum_id=formed.quorum_id,
                members=formed.members,
                homes=self.machine.map_members(),
                silences=tuple(self.machine.silences.long),
            )
        )
        failpoint("lighthouse/formed")
        names = tuple(member.replica for member in formed.members)
        log.info("quorum %d at step %d: %s", formed.quorum_id, formed.step, ", ".join(names))
        self._noted = (self._clock(), formed.step)
        self._outbox.put(
            QuorumFormed(
                quorum_id=formed.quorum_id,
                step=formed.step,
                members=names,
                recovering=formed.recovering,
                at_s=self._clock(),
            )
        )

    def _note_step(self) -> None:
        machine, (at_s, step) = self.machine, self._noted
        if machine.step > step and machine.whole and self._clock() - at_s >= NOTE_S:
            self._noted = (self._clock(), machine.step)
            self._outbox.put(
                QuorumFormed(
                    quorum_id=machine.quorum_id,
                    step=machine.step,
                    members=machine.members,
                    at_s=self._clock(),
                )
            )

    def _fence(self, fenced: Fenced) -> None:
        log.info("fence quorum %d, groups %s: %s", fenced.quorum_id, fenced.groups, fenced.reason)
        order = FenceAbort(quorum_id=fenced.quorum_id, groups=fenced.groups, reason=fenced.reason)
        if self._spec.served:
            self._ranks.tell_groups(fenced.groups, order)
            self._pass_on(order)
            return
        if self._bus is None:
            return
        data = encode(NodeOrder(controller=self._incarnation, orders=(order,)))
        for group in fenced.groups:  # Each group is the node of its number.
            subject = subject_orders(self._spec.name, group)
            self.tasks.spawn(self._bus.publish(subject, data))

    def _tell_left_out(self, left: LeftOut) -> None:
        log.warning("%s of group %d is left out: %s", left.replica, left.group, left.reason)
        self._outbox.put(
            ReplicaSeen(
                replica=left.replica,
                group=left.group,
                at_s=self._clock(),
                gone=True,
                reason=left.reason,
                stopped=left.stopped,
                silent=left.silent,
                step=self.machine.step,
                life=left.generation if self._spec.served else -1,
                heard_s=left.heard_s if self._spec.served else 0.0,
            )
        )

    def _tell_late(self, late: Late) -> None:
        words = "" if late.over else "is late: "
        log.info("%s of group %d %s%s", late.replica, late.group, words, late.reason)
        event = ReplicaLate(
            replica=late.replica,
            group=late.group,
            at_s=self._clock(),
            waited_s=late.waited_s,
            reason=late.reason,
            over=late.over,
        )
        self._outbox.put(event)
        if late.over:
            self._keep(
                msgspec.structs.replace(self._file, silences=tuple(self.machine.silences.long))
            )

    def _keep(self, file: LighthouseFile) -> None:
        self._file = file
        try:
            write_document(self._path, file)
        except PlatformError as error:
            log.error("%s: ids stay unique, but a restart will not know the members", error)
