"""The node agent's machine: bring what the keeper holds to what the newest assignment says.

It decides nothing about the job. Orders are levels, so repeating one is harmless; what it reports
is idempotent by generation and rank, so a new agent that takes over a keeper may report again.
"""

from dataclasses import dataclass, field
from typing import assert_never

from perdure.agent.messages import (
    AgentAction,
    AgentEvent,
    KeeperConnected,
    KeeperDied,
    KeeperSaid,
    LeaveNode,
    OrderReceived,
    Report,
    ReportExit,
    ReportStore,
    SpawnRanks,
    StartKeeper,
    TakeStacksOf,
    TellKeeper,
    TellWorkers,
    WorkerConnected,
    WorkerSaid,
)
from perdure.model.actions import Assignment, InjectFault, SendBoundary
from perdure.model.events import (
    CommandReceived,
    FaultInjected,
    GenerationStopped,
    KeeperLost,
    NodeRegistered,
    RanksStarted,
)
from perdure.model.job import JobSpec
from perdure.model.wire import (
    KeeperExit,
    KeeperExited,
    KeeperKill,
    KeeperSignal,
    KeeperSpawned,
    KeeperState,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    NodeOrder,
    WorkerEvent,
    WorkerHello,
    WorkerQuery,
    WorkerSignal,
)

_SIGKILL, _SIGTERM, _SIGUSR1, _SIGSTOP = 9, 15, 10, 19
_BY_SIGNAL = {"crash": _SIGKILL, "stop": _SIGSTOP}
"""Faults that the keeper can do from outside, whatever the rank is doing."""


@dataclass(slots=True)
class _State:
    assignment: Assignment | None = None
    keeper: KeeperState | None = None
    generation: int = -1
    """Newest generation of which the keeper started ranks."""
    pids: dict[int, int] = field(default_factory=dict)
    """Living ranks of it."""
    stopped: int = -2
    """Newest generation known to be gone, by the keeper's word."""
    stopped_reported: int = -2
    killing: int = -2
    spawning: int = -1
    store_asked: int = -1
    reported: set[tuple[int, int]] = field(default_factory=set)
    """(generation, rank) of exits reported."""
    boundaries: dict[str, SendBoundary] = field(default_factory=dict)
    """Newest move of each agreement of this generation, for ranks that connect late."""
    injects: dict[str, InjectFault] = field(default_factory=dict)
    ended: bool = False


class Agent:
    """The state machine of one node."""

    def __init__(
        self, spec: JobSpec, node: int, *, incarnation: str, host: str, boot_id: str,
        device_ids: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Know the job and the node; the keeper's word brings the rest."""
        self.spec, self.node = spec, node
        self.incarnation, self.host, self.boot_id = incarnation, host, boot_id
        self.device_ids = device_ids
        self.state = _State()

    def handle(self, now: float, event: AgentEvent) -> list[AgentAction]:
        """Return what to do about `event`."""
        match event:
            case OrderReceived():
                return self._order(now, event.order)
            case KeeperConnected():
                return self._adopt(now, event.state)
            case KeeperSaid():
                return self._hear_keeper(now, event)
            case KeeperDied():
                return self._lose_keeper(now)
            case WorkerSaid():
                return self._hear_worker(now, event)
            case WorkerConnected():
                return self._greet(event)
            case _:
                assert_never(event)

    # --- orders ------------------------------------------------------------------------------

    def _order(self, now: float, order: NodeOrder) -> list[AgentAction]:
        state = self.state
        actions: list[AgentAction] = []
        if order.register and state.keeper is not None:
            actions.append(Report(self._registration()))
        new = order.assignment
        if new is not None and (state.assignment is None or new.number > state.assignment.number):
            state.assignment = new
            actions += self._reconcile(now)
        if order.boundary is not None and order.boundary.generation == state.generation:
            boundary = order.boundary
            state.boundaries[boundary.id] = boundary
            ranks = tuple(r for r in boundary.ranks if r in self._ranks())
            actions.append(TellWorkers(ranks, boundary))
        if order.stacks is not None and order.stacks.generation == state.generation:
            pids = {r: state.pids[r] for r in order.stacks.ranks if r in state.pids}
            if pids:
                actions.append(TakeStacksOf(state.generation, pids))
        if order.inject is not None:
            actions += self._inject(now, order.inject)
        return actions

    def _inject(self, now: float, order: InjectFault) -> list[AgentAction]:
        state = self.state
        if order.rank not in self._ranks() or order.generation != state.generation:
            return []
        if order.id in state.injects:
            return []
        state.injects[order.id] = order
        number = _BY_SIGNAL.get(order.kind)
        if order.at_step < 0 and number is not None:
            error = "" if order.rank in state.pids else "the rank is not running"
            done = FaultInjected(
                id=order.id, rank=order.rank, kind=order.kind, at_s=now, error=error
            )
            return [
                Report(done),
                TellKeeper(KeeperSignal(state.generation, order.rank, number)),
            ]
        return [TellWorkers((order.rank,), order)]

    def _reconcile(self, now: float) -> list[AgentAction]:
        """Return the next moves from what the keeper holds towards the assignment."""
        state, wanted = self.state, self.state.assignment
        if wanted is None or state.keeper is None or state.ended:
            return []
        if wanted.phase == "end":
            state.ended = True
            grace_s = wanted.grace_s if state.pids else 0.0
            kill = TellKeeper(KeeperKill(wanted.generation, grace_s))
            return [kill, TellKeeper(KeeperExit())] if grace_s == 0 else [kill]
        actions: list[AgentAction] = []
        old = wanted.generation - 1
        if state.stopped < old and state.generation >= wanted.generation:
            state.stopped = old  # A newer generation runs, so the older ones are gone.
        if state.stopped < old:
            if state.killing < old:
                state.killing = old
                actions.append(TellKeeper(KeeperKill(old, wanted.grace_s)))
        elif state.stopped_reported < old:
            state.stopped_reported = old
            actions.append(Report(GenerationStopped(node=self.node, generation=old, at_s=now)))
        if self.node == 0 and wanted.phase == "store" and state.store_asked < wanted.generation:
            state.store_asked = wanted.generation
            if self.spec.cold or self.spec.no_python:
                actions.append(ReportStore(wanted.generation, 0))
            else:
                world = self.spec.world_size
                actions.append(TellKeeper(KeeperStore(wanted.generation, world)))
        if (
            wanted.phase == "run"
            and state.stopped >= old
            and max(state.generation, state.spawning) < wanted.generation
        ):
            state.spawning = wanted.generation
            actions.append(SpawnRanks(wanted))
        return actions

    # --- the keeper --------------------------------------------------------------------------

    def _adopt(self, now: float, keeper: KeeperState) -> list[AgentAction]:
        """Take over what a keeper holds, old or new; report what nobody may have heard."""
        state = self.state
        fresh = state.keeper is None or state.keeper.pid != keeper.pid
        state.keeper = keeper
        state.generation = keeper.generation
        state.pids = dict(keeper.running)
        if fresh:
            state.killing, state.spawning = -2, keeper.generation
            state.store_asked = keeper.store_generation
        actions: list[AgentAction] = [Report(self._registration())]
        if keeper.generation >= 0 and keeper.running:
            actions.append(Report(self._started(now, keeper.running, keeper.warm)))
        actions += [a for record in keeper.exits for a in self._exit(KeeperExited(record))]
        if keeper.store_port and keeper.store_generation >= keeper.generation:
            actions.append(ReportStore(keeper.store_generation, keeper.store_port))
        return actions + self._reconcile(now)

    def _started(self, now: float, pids: dict[int, int], warm: bool) -> RanksStarted:
        return RanksStarted(
            node=self.node, generation=self.state.generation, pids=pids, at_s=now, warm=warm
        )

    def _registration(self) -> NodeRegistered:
        state = self.state
        return NodeRegistered(
            node=self.node,
            incarnation=self.incarnation,
            host=self.host,
            boot_id=self.boot_id,
            slots=self.spec.nproc,
            generation=state.generation,
            running=tuple(sorted(state.pids)),
            keeper_pid=state.keeper.pid if state.keeper else 0,
            device_ids=self.device_ids,
        )

    def _hear_keeper(self, now: float, event: KeeperSaid) -> list[AgentAction]:
        state, message = self.state, event.message
        match message:
            case KeeperState():
                return self._adopt(now, message)
            case KeeperSpawned():
                if message.generation > state.generation:
                    state.generation = message.generation
                    state.pids = dict(message.pids)
                    state.boundaries.clear()
                    state.injects.clear()
                started = RanksStarted(
                    node=self.node,
                    generation=message.generation,
                    pids=message.pids,
                    at_s=message.at_s,
                    warm=message.warm,
                    why_cold=message.why_cold,
                )
                return [Report(started)]
            case KeeperStoreReady():
                return [ReportStore(message.generation, message.port)]
            case KeeperExited():
                return self._exit(message)
            case KeeperStopped():
                state.stopped = max(state.stopped, min(message.generation, self._old()))
                if state.ended:
                    stopped = GenerationStopped(node=self.node, generation=self._old(), at_s=now)
                    return [TellKeeper(KeeperExit()), Report(stopped), LeaveNode()]
                return self._reconcile(now)

    def _old(self) -> int:
        return self.state.assignment.generation - 1 if self.state.assignment else -1

    def _exit(self, message: KeeperExited) -> list[AgentAction]:
        record, state = message.record, self.state
        key = (record.generation, record.rank)
        if record.generation == state.generation:
            state.pids.pop(record.rank, None)
        if key in state.reported:
            return []
        state.reported.add(key)
        return [ReportExit(record)]

    def _lose_keeper(self, now: float) -> list[AgentAction]:
        """The keeper is dead: so are its ranks. A new one starts, unless this was the end."""
        state = self.state
        had = state.keeper is not None
        generation = state.generation
        state.keeper = None
        state.pids.clear()
        state.generation, state.spawning, state.store_asked = -1, -1, -1
        if state.ended:
            stopped = GenerationStopped(node=self.node, generation=self._old(), at_s=now)
            return [Report(stopped), LeaveNode()]
        state.stopped = max(state.stopped, generation)
        lost = KeeperLost(node=self.node, generation=generation, at_s=now)
        return [*([Report(lost)] if had else []), StartKeeper()]

    # --- the ranks ---------------------------------------------------------------------------

    def _ranks(self) -> range:
        return self.spec.ranks_of(self.node)

    def _greet(self, event: WorkerConnected) -> list[AgentAction]:
        """Tell a rank that has (re)connected what it may have missed."""
        state = self.state
        if event.generation != state.generation:
            return []
        mine = [b for b in state.boundaries.values() if event.rank in b.ranks]
        faults = [i for i in state.injects.values() if i.rank == event.rank]
        pending = [i for i in faults if i.at_step >= 0 or i.kind not in _BY_SIGNAL]
        messages: list[SendBoundary | InjectFault] = [*mine, *pending]
        return [TellWorkers((event.rank,), message) for message in messages]

    def _hear_worker(self, now: float, event: WorkerSaid) -> list[AgentAction]:
        state, message = self.state, event.message
        match message:
            case WorkerEvent():
                return [Report(message.event)]
            case WorkerHello():
                return []
            case WorkerQuery():
                known = state.boundaries.get(message.id)
                return [TellWorkers((event.rank,), known)] if known is not None else []
            case WorkerSignal():
                kind = "checkpoint" if message.signal == _SIGUSR1 else "stop"
                return [
                    Report(
                        CommandReceived(
                            id=f"signal-{event.generation}-{message.signal}",
                            kind="checkpoint" if kind == "checkpoint" else "stop",
                            who=f"signal {message.signal} at rank {event.rank}",
                            at_s=now,
                        )
                    )
                ]
