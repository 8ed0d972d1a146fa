"""The lighthouse's process: torchft's protocol in front, `control.lighthouse.quorum` behind it.

It needs nobody to go on. What the controller orders (who is held, who is evicted, which store is
whose) are levels that it keeps; the deaths that agents report it hears on the bus at the same
time as the controller, and acts upon them at once, since they are facts and not decisions. While
the bus is away replicas go on asking and are answered.

Its own death costs a fork: the process that serves is the child of one that has imported all of
this and only waits for the child's end (or for it to be stopped). Should that one die as well, the
supervisor starts both again. The next lighthouse takes the same port, reads the last quorum from
`lighthouse.json`, and waits for its members; ids below the reserved bound are never used again.
"""

import asyncio
import importlib
import itertools
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.adapters.host import pick_free_port
from perdure.adapters.lighthouse import LighthouseServer, kill_replica
from perdure.control.lighthouse.names import Names
from perdure.control.lighthouse.outputs import (
    Answered,
    Fenced,
    Formed,
    Late,
    LeftOut,
    Output,
    Seen,
    Stands,
)
from perdure.control.lighthouse.quorum import Quorums
from perdure.control.membership.quorum import make_quorum_config
from perdure.failpoints import failpoint
from perdure.model.bus.lighthouse import encode_response, parse_heartbeat, parse_request
from perdure.model.bus.wire import (
    EventMessage,
    NodeOrder,
    read_order,
    subject_beats,
    subject_events,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError, PerdureError, PlatformError, ProtocolError
from perdure.model.events import (
    AnyEvent,
    FaultInjected,
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
    EvictReplica,
    FenceAbort,
    HoldReplicas,
    InjectFault,
    RankOrder,
)
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import NodeBeat
from perdure.service.agent.outbox import Outbox
from perdure.service.jobfiles import (
    LighthouseFile,
    load_endpoint,
    load_spec,
    paths_of,
    read_document,
    resolve_home,
    write_document,
)
from perdure.service.part import (
    Tasks,
    read_run_pid,
    run_part,
    set_up_log,
    wait_event,
    watch_process,
)
from perdure.service.ports import Bus, Reply
from perdure.service.replica_ranks import ReplicaRanks
from perdure.worker.process import die_with, set_title

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
_LIVES = 1000
_HEARD_S = 0.15
"""A heartbeat comes in such a time, of a manager that was to end."""
_STOCK = "torchft_lighthouse"


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
        self._futures: dict[int, asyncio.Future[bytes]] = {}
        self._tokens = itertools.count(1)
        self._wake = asyncio.Event()
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
        self._hold_number = -1
        self._ending: set[str] = set()
        """Replicas that are being ended."""
        self._noted: tuple[float, int] = (0.0, -1)
        self.tasks = Tasks()

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
        until = self.machine.next_id + IDS
        line = known.line if known is not None else secrets.token_hex(8)
        kept = msgspec.structs.replace(known or self._file, port=port, ids_until=until, line=line)
        self._keep(kept)
        self._outbox.put(QuorumIdsReserved(until=until, at_s=self._clock()))
        return port

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
                    self._kill(order)
                case InjectFault():
                    if not self._ranks.take(order):
                        self._harm(order)
                case RankOrder():
                    self._ranks.take(order)
                case EvictReplica():
                    self._do(self.machine.evict(now, order.replica, order.reason))
                    self._do(self.machine.end(now, order.generation, order.reason, fence=True))

    def _kill(self, order: EvictReplica) -> None:
        """End a replica that others have started, and tell of it, as often as it is ordered."""
        reason = order.reason

        def tell(why: str) -> None:
            said = f"{reason}; {why}" if why else reason
            self._tell_ended(order.replica, (order.group, order.generation), said, ended=not why)

        self._end(order.replica, reason, tell)

    def _harm(self, order: InjectFault) -> None:
        """Do harm to a replica that others have started: it can be ended, and no more."""
        replica = self.machine.find_life(order.generation)
        first = order.rank % self._spec.nproc == 0
        if replica is None or order.kind != "crash" or order.at_step >= 0 or not first:
            why = "only crash, now, and of a group's first rank" if replica else "it is not there"
            why = (
                f"{order.kind} on rank {order.rank}: {why}, where no line of perdure is in a script"
            )
            self._tell_harmed(order, why)
            return
        name, home = replica.name, replica.home

        def tell(why: str) -> None:
            self._tell_harmed(order, why)
            if not why:
                self._tell_ended(name, home, "crash, injected", ended=True)

        self._end(name, f"crash, injected: {order.reason}", tell, anyway=False)

    def _end(
        self, name: str, reason: str, tell: Callable[[str], None], *, anyway: bool = True
    ) -> None:
        """Have a replica end by its manager; `tell` why it has not, or nothing.

        It is forgotten for ever, `anyway` or where it has ended.
        """
        if name in self._ending:
            return
        self._ending.add(name)
        known = self.machine.replicas.get(name)

        async def end() -> None:
            why = await kill_replica(known.manager, reason) if known else ""
            if known and not why:
                done_s = self._clock()
                await asyncio.sleep(_HEARD_S)
                if known.beat_s > done_s + _HEARD_S / 3:
                    why = f"its heartbeats go on: its manager, {known.manager}, is not reached"
            self._ending.discard(name)
            log.warning("%s: %s: %s", name, reason, why or "it has ended")
            ended = anyway or not why
            told = self.machine.evict(self._now(), name, reason) if ended else []
            tell(why)
            self._do([output for output in told if not isinstance(output, LeftOut)])

        self.tasks.spawn(end())

    def _tell_harmed(self, order: InjectFault, error: str) -> None:
        event = FaultInjected(
            id=order.id, rank=order.rank, kind=order.kind, at_s=self._clock(), error=error
        )
        note = "" if error else "by its manager's Kill"
        self._outbox.put(msgspec.structs.replace(event, note=note))

    def _tell_ended(self, name: str, home: tuple[int, int], reason: str, *, ended: bool) -> None:
        self._outbox.put(
            ReplicaSeen(
                replica=name,
                group=home[0],
                at_s=self._clock(),
                gone=True,
                reason=reason,
                silent=ended,
                step=self.machine.step,
                life=home[1],
            )
        )

    def _find_life(self, name: str) -> tuple[int, int]:
        self._do(self.machine.introduce(self._now(), name))
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
        """Take what a node's agent tells of the group that it runs, and of no other."""
        message: EventMessage | None = self._decode(data, EventMessage)
        now = self._now()
        batches = message.batches if message is not None else ()
        for event in (event for batch in batches for event in batch.events):
            match event:
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
                case Fenced():
                    self._fence(output)
                case Seen():
                    self._tell_seen(output)
                case Late():
                    self._tell_late(output)
                case LeftOut():
                    self._tell_left_out(output)
                case Stands(replica=replica, group=group, step=step):
                    now, hold = self._clock(), self._hold_number
                    stands = ReplicaSeen(
                        replica=replica, group=group, at_s=now, held=True, hold=hold, step=step
                    )
                    self._outbox.put(stands)

    def _tell_seen(self, seen: Seen) -> None:
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


# --- the process --------------------------------------------------------------------------------


def main(job: str) -> int:
    """Run the lighthouse of `job` as a process; return its exit code."""
    set_up_log()
    try:
        paths = paths_of(resolve_home(), job)
        spec = load_spec(paths)
        if spec.lighthouse is not None and not spec.lighthouse.own:
            _become_stock(spec.lighthouse, paths.lighthouse)
        return _keep_serving(spec, paths.lighthouse)
    except PerdureError as error:
        log.error("%s (%s)", error.message, error.hint)
        return error.exit_code


def _keep_serving(spec: JobSpec, path: str) -> int:
    """Have a child serve, and another one at once should it be killed or stopped."""
    asked: list[int] = []
    parent, child = os.getpid(), 0

    def leave(number: int, frame: object) -> None:
        asked.append(number)
        if child:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    for _ in range(_LIVES):
        child = os.fork()
        if child == 0:
            die_with(parent)
            os._exit(_serve(spec, path))
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            log.warning("the lighthouse (pid %d) is stopped: replacing it", child)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        elif asked or os.WIFEXITED(status):
            return os.waitstatus_to_exitcode(status)
        log.warning("the lighthouse (pid %d) has died: the next one serves", child)
    return 1


def _serve(spec: JobSpec, path: str) -> int:
    """Be the lighthouse; return the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_title(f"perdure lighthouse {spec.name}: serving")
    try:
        return run_part(_main(spec, path), log, "")
    except BaseException:
        log.exception("the lighthouse has failed")
        return 1


async def _main(spec: JobSpec, path: str) -> None:
    endpoint = load_endpoint(paths_of(resolve_home(), spec.name), LIGHTHOUSE)
    offset_s = endpoint.clock_offset_s
    task = asyncio.current_task()
    assert task is not None
    service = LighthouseService(
        spec,
        path,
        clock=lambda: time.monotonic() + offset_s,
        incarnation=f"l{os.getpid()}-{secrets.token_hex(3)}",
        clock_offset_s=offset_s,
    )

    async def connect() -> None:
        # Its import takes longer than all the rest: replicas are served meanwhile.
        nats = await asyncio.to_thread(importlib.import_module, "perdure.adapters.nats")
        name = f"perdure lighthouse {spec.name}"
        await service.join(await nats.NatsBus.connect(endpoint, name=name))

    with watch_process(read_run_pid(), task.cancel):
        port = await service.start()
        log.info("listening on port %d", port)
        if spec.served:
            await service.hear_ranks(paths_of(resolve_home(), spec.name), port)
        service.tasks.spawn(connect())
        try:
            await service.run()
        finally:
            await service.close()


def _become_stock(lighthouse: Lighthouse, path: str) -> None:
    """Become torchft's own lighthouse, on the port of the one before or a new one.

    Raises:
        ConfigError: torchft is not installed.
    """
    program = shutil.which(_STOCK, path=f"{os.path.dirname(sys.executable)}:{os.defpath}")
    if program is None:
        raise ConfigError(f"there is no {_STOCK}", hint="pip install torchft==0.2.0")
    known = read_document(path, LighthouseFile)
    port = (known and known.port) or pick_free_port("127.0.0.1")
    write_document(path, LighthouseFile(port=port))
    os.execv(program, [program, "--bind", f"127.0.0.1:{port}", *lighthouse.stock_words])
