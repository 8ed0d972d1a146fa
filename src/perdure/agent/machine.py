"""The agent's door: one input in, a list of requests out.

The machine steers towards the newest assignment, a level: from what the keeper holds now it
follows what is missing, so that a repeated, lost or late order changes nothing, and an agent
that was replaced goes on where the old one stood. Only one thing is never repeated: a
generation's start. A keeper that lost one is reported, and the controller forms the next.
"""

from typing import assert_never

import msgspec

from perdure.agent.keeper_silence import note_silence, note_voice
from perdure.agent.messages import (
    AgentStarted,
    CarryOut,
    CollectStacks,
    Input,
    KeeperGone,
    KeeperHeard,
    KeeperSaid,
    KeeperSilent,
    KeeperUp,
    Leave,
    OrderReceived,
    Report,
    Request,
    SpawnRanks,
    StacksCollected,
    StartKeeper,
    SupervisorGone,
    TellKeeper,
    TermHeard,
    WorkerSaid,
)
from perdure.agent.relay import answer_worker, relay, relay_boundary, relay_fault
from perdure.agent.state import AgentState, KeeperView, NodeIdentity
from perdure.model.bus.wire import (
    KeeperExit,
    KeeperKill,
    KeeperSpawned,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    KeeperWaits,
    NodeOrder,
)
from perdure.model.events import (
    GenerationStopped,
    KeeperLost,
    NodeRegistered,
    RankExited,
    RanksStarted,
    RoomNoted,
    StacksTaken,
    StoreReady,
    TimerFired,
)
from perdure.model.job import JobSpec
from perdure.model.orders import (
    Assignment,
    FenceAbort,
    InjectFault,
    Order,
    RankOrder,
    SendBoundary,
    TakeStacks,
)

END_TIMEOUT_S = 20.0
"""Beyond its grace, how long the end of the job may take before the agent leaves anyhow."""
_REGISTER_AGAIN_S = 5.0
"""An agent that is asked to register again does so once its last registration is this old."""

ORPHANED_TIMEOUT_S = 8.0
"""The same after the death of `perdure run`: the keeper gives its ranks two seconds."""


class Agent:
    """The state machine of one node."""

    def __init__(self, spec: JobSpec, identity: NodeIdentity) -> None:
        """Stand for `identity.node` of `spec`."""
        self.spec = spec
        self.identity = identity
        self.state = AgentState()

    def next_deadline(self) -> float | None:
        """Return the job time at which `TimerFired` is wanted."""
        return None if self.state.leaving else self.state.end_deadline_s

    def handle(self, now: float, input_: Input) -> list[Request]:
        """Return what to do about `input_`."""
        match input_:
            case AgentStarted():
                return [StartKeeper()]
            case KeeperUp():
                return self._greet_keeper(now, input_)
            case KeeperGone():
                return self._lose_keeper(now, input_)
            case KeeperSaid():
                return self._hear_keeper(now, input_)
            case KeeperSilent():
                return note_silence(self.state, self.identity, self.spec, now, input_)
            case KeeperHeard():
                return note_voice(self.state, now)
            case RankExited():
                return self._note_exit(now, input_)
            case OrderReceived(order=order):
                return self._obey(now, order)
            case TermHeard(term=term):
                self.state.term = max(self.state.term, term)
                return []
            case WorkerSaid():
                return answer_worker(self.state, self.identity, now, input_)
            case StacksCollected(generation=generation, stacks=stacks, traces=traces):
                taken = StacksTaken(generation=generation, at_s=now, stacks=stacks, traces=traces)
                return [Report(taken)]
            case SupervisorGone():
                return self._give_up(now)
            case TimerFired():
                return self._fire(now)
            case _:
                assert_never(input_)

    # --- orders ------------------------------------------------------------------------------

    def _obey(self, now: float, order: NodeOrder) -> list[Request]:
        state, requests = self.state, list[Request]()
        if order.term < state.term:
            fences = (each for each in order.orders if isinstance(each, FenceAbort))
            return [request for fence in fences for request in relay(state, fence)]
        state.term = max(state.term, order.term)
        if order.register and state.keeper is not None:
            again = now - state.registered_s >= _REGISTER_AGAIN_S
            if again or order.controller != state.registered_with:
                state.registered_with = order.controller
                requests.append(self._register(now, state.keeper))
        if order.agent and order.agent != self.identity.incarnation:
            # One that has not been spoken to yet hears what its predecessor was told.
            if not state.addressed:
                return requests
            return self._leave("another has this node's place", replaced=True)
        state.addressed = state.addressed or bool(order.agent)
        if order.assignment is not None:
            requests += self._assign(now, order.assignment)
        for each in order.orders:
            requests += self._carry_out(now, each)
        return requests

    def _carry_out(self, now: float, order: Order) -> list[Request]:
        """Return what to do about one order: most are passed on, and some are the agent's."""
        match order:
            case SendBoundary():
                return relay_boundary(self.state, order)
            case InjectFault():
                return relay_fault(self.state, self.identity, self.spec, now, order)
            case TakeStacks():
                return [*relay(self.state, order), *self._take_stacks(order)]
            case RankOrder() | FenceAbort():
                return relay(self.state, order)
        return [CarryOut(order)]

    def _assign(self, now: float, new: Assignment) -> list[Request]:
        state = self.state
        held = state.assignment.number if state.assignment else -1
        if new.number < held:
            return []
        if new.number == held:
            return self._reconcile(now)
        state.assignment = new
        if new.phase == "end":
            state.end_deadline_s = now + new.grace_s + new.writer_s + END_TIMEOUT_S
        return self._reconcile(now)

    def _take_stacks(self, order: TakeStacks) -> list[Request]:
        """Take stacks of the ranks named; every rank of the node writes its trace meanwhile."""
        keeper = self.state.keeper
        if keeper is None or keeper.generation != order.generation:
            return []
        pids = {rank: keeper.running[rank] for rank in order.ranks if rank in keeper.running}
        return [CollectStacks(order.generation, pids)] if pids else []

    # --- towards the assignment --------------------------------------------------------------

    def _reconcile(self, now: float) -> list[Request]:
        """Return what is missing between what the keeper holds and what was assigned."""
        state, wanted, keeper = self.state, self.state.assignment, self.state.keeper
        if wanted is None or keeper is None or state.leaving or state.orphaned:
            return []
        if wanted.phase == "run" and keeper.generation == wanted.generation:
            return self._report_started(keeper) + self._add_members(keeper, wanted)
        requests: list[Request] = []
        older = wanted.generation - 1
        if keeper.stopped < older and keeper.kill_asked < older:
            keeper.kill_asked = older
            requests.append(TellKeeper(KeeperKill(older, wanted.grace_s, wanted.writer_s)))
        if wanted.phase == "store" and wanted.group_of(self.identity.node) == 0:
            requests += self._serve_store(keeper, wanted)
        if keeper.stopped < older:
            return requests
        if wanted.phase == "end":
            return requests + self._end(now, wanted)
        if older > state.reported_stopped:
            requests.append(self._report_stopped(now, older))
        if wanted.phase == "run":
            requests += self._run(now, keeper, wanted)
        return requests

    def _serve_store(self, keeper: KeeperView, wanted: Assignment) -> list[Request]:
        generation = wanted.generation
        if keeper.store_generation == generation and keeper.store_port:
            return self._report_store(generation, keeper.store_port, agent_store=True)
        if keeper.store_asked >= generation:
            return []
        keeper.store_asked = generation
        size = self.spec.nproc if wanted.replica >= 0 else self.spec.world_size
        return [TellKeeper(KeeperStore(generation, size, self.identity.host))]

    def _report_store(self, generation: int, port: int, *, agent_store: bool) -> list[Request]:
        if self.state.reported_store == (generation, port):
            return []
        self.state.reported_store = (generation, port)
        event = StoreReady(
            generation=generation, host=self.identity.host, port=port, agent_store=agent_store
        )
        return [Report(event)]

    def _run(self, now: float, keeper: KeeperView, wanted: Assignment) -> list[Request]:
        """Start the ranks: once, or never where this generation was lost with its keeper."""
        state, generation = self.state, wanted.generation
        if keeper.generation > generation or keeper.spawn_asked >= generation:
            return []
        store = (keeper.store_generation, keeper.store_port)
        group, members = wanted.group_of(self.identity.node), self._list_unstarted(keeper, wanted)
        placed = 0 <= group < self.spec.nodes
        if not placed and not wanted.extra_of(self.identity.node):
            return []  # A spare node stands ready, its image warm.
        serves = wanted.agent_store and group == 0 and not wanted.extra
        begun = generation <= state.newest_spawned and state.spawned_by != keeper.pid
        begun = begun or any(
            (generation, m) in state.begun for m in wanted.extra_of(self.identity.node)
        )
        if begun or (serves and store != (generation, wanted.master_port)):
            if keeper.lost_reported < generation:
                keeper.lost_reported = generation
                return [self._report_lost(now, generation)]
            if not members:
                return []
        elif placed and not set(self.spec.ranks_of(group)) <= set(wanted.gone):
            members = ()
        elif not members:
            return []  # It is filled once the controller says with whom.
        self._begin(keeper, generation)
        keeper.members_asked = set(members)
        return [SpawnRanks(wanted, members)]

    def _begin(self, keeper: KeeperView, generation: int) -> None:
        """Note that the keeper is asked for the first processes of `generation`."""
        state = self.state
        keeper.spawn_asked = state.newest_spawned = generation
        state.spawned_by = keeper.pid
        state.boundaries.clear()
        state.newest.clear()
        state.faults.clear()

    def _add_members(self, keeper: KeeperView, wanted: Assignment) -> list[Request]:
        """Start the members that the world was given beside its first ranks, each once."""
        missing = self._list_unstarted(keeper, wanted)
        keeper.members_asked |= set(missing)
        return [SpawnRanks(wanted, missing, beside=True)] if missing else []

    def _list_unstarted(self, keeper: KeeperView, wanted: Assignment) -> tuple[int, ...]:
        """Return the newest member of each slot here that was never started."""
        newest = {self.spec.slot_of(m): m for m in wanted.extra_of(self.identity.node)}
        return tuple(
            member
            for member in newest.values()
            if member not in keeper.running
            and member not in keeper.members_asked
            and (wanted.generation, member) not in self.state.exited | self.state.begun
        )

    def _report_started(self, keeper: KeeperView) -> list[Request]:
        begun = keeper.running or any(g == keeper.generation for g, _ in self.state.exited)
        if self.state.reported_started >= keeper.generation or not begun:
            return []  # Told already, or being forked at this moment: `KeeperSpawned` follows.
        self.state.reported_started = keeper.generation
        event = RanksStarted(
            node=self.identity.node,
            generation=keeper.generation,
            pids=dict(keeper.running),
            at_s=keeper.started_s,
            warm=keeper.warm,
            why_cold=keeper.why_cold,
        )
        return [Report(event)]

    def _report_stopped(self, now: float, generation: int, *after: Request) -> Report:
        self.state.reported_stopped = generation
        event = GenerationStopped(node=self.identity.node, generation=generation, at_s=now)
        return Report(event, after)

    def _report_lost(self, at_s: float, generation: int) -> Report:
        cause, self.state.lost_cause = self.state.lost_cause, ""
        begun = tuple(sorted(rank for g, rank in self.state.begun if g == generation))
        node = self.identity.node
        return Report(
            KeeperLost(node=node, generation=generation, at_s=at_s, cause=cause, begun=begun)
        )

    def _end(self, now: float, wanted: Assignment) -> list[Request]:
        """Leave once the controller knows that nothing is left here."""
        older = wanted.generation - 1
        if older < 0:
            return self._leave(wanted.reason)
        if older <= self.state.reported_stopped:
            return []
        farewell = (TellKeeper(KeeperExit()), Leave(wanted.reason))
        return [self._report_stopped(now, older, *farewell)]

    def _leave(self, reason: str, *, replaced: bool = False) -> list[Request]:
        if self.state.leaving:
            return []
        self.state.leaving = True
        return [TellKeeper(KeeperExit()), Leave(reason, replaced)]

    def _give_up(self, now: float) -> list[Request]:
        """End everything: nobody is left to run for. Tell the controller, which ends as well."""
        state = self.state
        if state.leaving or state.orphaned:
            return []
        if state.keeper is None:
            return self._leave("`perdure run` is gone")
        state.orphaned = True
        state.end_deadline_s = now + ORPHANED_TIMEOUT_S
        return [TellKeeper(KeeperExit())]

    def _fire(self, now: float) -> list[Request]:
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return []
        return self._leave("everything has ended, and nobody took note of it in time")

    # --- the keeper --------------------------------------------------------------------------

    def _greet_keeper(self, now: float, up: KeeperUp) -> list[Request]:
        state, held = self.state, up.state
        view = state.keeper = KeeperView(
            pid=held.pid,
            generation=held.generation,
            running=dict(held.running),
            started_s=up.started_s or now,
            warm=held.warm,
            why_cold=held.why_cold,
            store_generation=held.store_generation,
            store_port=held.store_port,
        )
        state.newest_spawned = max(state.newest_spawned, up.newest_on_disk, held.generation)
        state.begun |= set(up.begun)
        requests: list[Request] = []
        if state.registered_s == float("-inf"):
            requests.append(self._register(now, view))
        for exited in up.exits:
            requests += self._note_exit(now, exited)
        view.lost_reported, state.lost_generation = state.lost_generation, -1
        return requests + self._reconcile(now)

    def _register(self, now: float, keeper: KeeperView) -> Report:
        me, self.state.registered_s = self.identity, now
        return Report(
            NodeRegistered(
                node=me.node,
                incarnation=me.incarnation,
                host=me.host,
                boot_id=me.boot_id,
                slots=self.spec.nproc,
                generation=keeper.generation,
                running=tuple(sorted(keeper.running)),
                keeper_pid=keeper.pid,
                device_ids=me.device_ids,
                speaks=me.speaks,
            )
        )

    def _lose_keeper(self, now: float, gone: KeeperGone) -> list[Request]:
        """Tell of the ranks that died with it; then start another, or be done."""
        self.state.begun |= set(gone.begun)
        told = [request for exited in gone.exits for request in self._note_exit(now, exited)]
        return told + self._replace_keeper(now, gone.at_s)

    def _replace_keeper(self, now: float, died_s: float) -> list[Request]:
        """Start a new one, unless the job is ending: then the node is as empty as asked for.

        The loss is told before, at its own time: the others of a world fail of it within a
        moment, and are not to be taken for its cause.
        """
        state, lost = self.state, self.state.keeper
        state.keeper = state.silence = None
        if state.leaving:
            return []
        wanted = state.assignment
        if state.orphaned:
            newest = max(wanted.generation if wanted else -1, lost.generation if lost else -1)
            return [self._report_stopped(now, newest, Leave("`perdure run` is gone"))]
        if wanted is not None and wanted.phase == "end":
            older = wanted.generation - 1
            if older < 0:
                state.leaving = True
                return [Leave(wanted.reason)]
            if older > state.reported_stopped:
                return [self._report_stopped(now, older, Leave(wanted.reason))]
            return []
        if lost is not None:
            generation = max(lost.generation, lost.store_generation, lost.spawn_asked)
            if generation >= 0:
                if wanted is not None and wanted.phase == "run":
                    state.lost_generation = max(generation, state.lost_generation)
                return [self._report_lost(died_s, generation), StartKeeper()]
        return [StartKeeper()]

    def _hear_keeper(self, now: float, said: KeeperSaid) -> list[Request]:
        keeper = self.state.keeper
        if keeper is None:
            return []
        match said.message:
            case KeeperSpawned() as spawned:
                told = self._note_spawned(keeper, spawned, said.awaited)
                return [*told, *self._reconcile(now)]
            case KeeperWaits() as waits:
                return [self._tell_room(now, waits)]
            case KeeperStoreReady(generation=generation, port=port):
                if self.state.assignment is None or self.state.assignment.generation != generation:
                    return []
                keeper.store_generation = generation
                keeper.store_port = port
                return self._report_store(
                    generation, port or said.free_port, agent_store=bool(port)
                )
            case KeeperStopped(generation=generation):
                keeper.stopped = max(keeper.stopped, generation)
                if keeper.generation <= generation:
                    keeper.running.clear()
                return self._reconcile(now)

    def _tell_room(self, now: float, waits: KeeperWaits) -> Report:
        why = f"node {self.identity.node} waits to start its ranks: {waits.why}"
        noted = RoomNoted(
            grade="short",
            reason=why,
            place=waits.place,
            at_s=now,
            node=self.identity.node,
            generation=waits.generation,
        )
        return Report(noted)

    def _note_spawned(
        self, keeper: KeeperView, spawned: KeeperSpawned, awaited: str
    ) -> list[Request]:
        if spawned.generation < keeper.generation:
            return []
        if spawned.beside:
            return self._note_members(keeper, spawned, awaited)
        keeper.generation = spawned.generation
        keeper.started_s, keeper.warm = spawned.at_s, spawned.warm
        keeper.why_cold = spawned.why_cold
        keeper.running = {
            rank: pid
            for rank, pid in spawned.pids.items()
            if (spawned.generation, rank) not in self.state.exited
        }
        if self.state.reported_started >= spawned.generation:
            return []
        self.state.reported_started = spawned.generation
        return [self._tell_started(spawned, spawned.pids, awaited)]

    def _note_members(
        self, keeper: KeeperView, spawned: KeeperSpawned, awaited: str
    ) -> list[Request]:
        new = {rank: pid for rank, pid in spawned.pids.items() if rank not in keeper.running}
        if spawned.generation != keeper.generation or not new:
            return []
        exited = self.state.exited
        keeper.running |= {r: p for r, p in new.items() if (spawned.generation, r) not in exited}
        return [self._tell_started(spawned, new, awaited)]

    def _tell_started(self, spawned: KeeperSpawned, pids: dict[int, int], awaited: str) -> Report:
        return Report(
            RanksStarted(
                node=self.identity.node,
                generation=spawned.generation,
                pids=pids,
                at_s=spawned.at_s,
                warm=spawned.warm,
                why_cold=spawned.why_cold,
                awaited=awaited,
            )
        )

    def _note_exit(self, now: float, exited: RankExited) -> list[Request]:
        keeper, record = self.state.keeper, exited.record
        if (record.generation, record.rank) in self.state.exited:
            return []
        self.state.exited.add((record.generation, record.rank))
        if keeper is not None and record.generation == keeper.generation:
            keeper.running.pop(record.rank, None)
        return [Report(msgspec.structs.replace(exited, detected_s=now))]
