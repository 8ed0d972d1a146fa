"""One simulated node: a real agent machine above a played keeper, its ranks and its outbox."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import structs

from perdure.agent.machine import Agent
from perdure.agent.messages import (
    AgentStarted,
    CollectStacks,
    Input,
    KeeperGone,
    KeeperSaid,
    KeeperUp,
    Leave,
    OrderReceived,
    Report,
    Request,
    SpawnRanks,
    StacksCollected,
    StartKeeper,
    TellKeeper,
    TellWorker,
    WorkerSaid,
)
from perdure.agent.state import NodeIdentity
from perdure.model.bus.wire import (
    EventAck,
    EventBatch,
    EventMessage,
    KeeperExit,
    KeeperKill,
    KeeperSpawned,
    KeeperState,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    NodeOrder,
    WorkerHello,
    WorkerQuery,
)
from perdure.model.events import AnyEvent, RankExited, RankJoined
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.orders import Order
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
)
from tests.simulator.network import VirtualClock
from tests.simulator.ranks import Agreements, Rank, World

_SIGKILL = 9
_KILL_S, _SPAWN_S, _STORE_S, _KEEPER_START_S = 0.02, 0.05, 0.02, 0.3
_BURY_S = 0.02
"""From a keeper's death until its agent has ended what it had left, and knows."""
_LOST = "keeper lost"
"""The error of a rank's end that no keeper has recorded."""
_LINE_S = 0.001
"""From an agent to a rank of its node, or back."""


@dataclass(slots=True)
class Outgoing:
    """An event that an agent has to tell the controller, and the rank's word behind it."""

    report: Report
    word: int = 0


@dataclass(slots=True)
class Keeper:
    """A keeper's state, which outlives its agent."""

    pid: int
    generation: int = -1
    running: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    exits: dict[int, RankExited] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    """Ranks in state T."""
    spawned_s: float = 0.0
    ended: int = -1
    """Generations up to this one are never started again, however late the order arrives."""
    store: tuple[int, int] = (-1, 0)


class Node:
    """A machine of the simulated cluster."""

    def __init__(
        self,
        spec: JobSpec,
        node: int,
        clock: VirtualClock,
        *,
        world_of: Callable[[int], World],
        send: Callable[[EventMessage], None],
        witness: Agreements,
        late_s: Callable[[], float] = lambda: 0.0,
        rank_type: type[Rank] = Rank,
    ) -> None:
        """Boot: keeper and agent come up; `send` takes batches of events to the controller.

        `late_s` draws how much later than the first a rank comes to each step; `rank_type` is
        what the ranks are.
        """
        self.spec, self.node, self.clock = spec, node, clock
        self.world_of, self.send = world_of, send
        self.witness, self.late_s, self.rank_type = witness, late_s, rank_type
        self.words: dict[int, tuple[int, int, AnyEvent]] = {}
        """Number -> (generation, rank, event) that no agent has taken over for good."""
        self.word = 0
        self.keeper: Keeper | None = None
        self.pids = node * 1_000_000
        self.newest_spawned = -1
        self.begun: set[tuple[int, int]] = set()
        """(generation, rank) of every ring that lies on this node."""
        self.ends: dict[tuple[int, int], RankExited] = {}
        """(generation, rank) -> its end, as its exit record, or only its ring, tells of it."""
        self.agents = 0
        self.agent: Agent | None = None
        self.left = False
        self.outbox: list[Outgoing] = []
        self.first_seq = 1
        self.beats = 0
        self.start_agent()

    # --- the agent ---------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Start an agent, or its successor."""
        self.agents += 1
        identity = NodeIdentity(node=self.node, incarnation=f"a{self.node}-{self.agents}")
        self.agent = Agent(self.spec, identity)
        self.outbox, self.first_seq = [], 1
        self.feed(AgentStarted())
        self._resend(self.agent)

    def kill_agent(self, down_s: float) -> None:
        """Lose the agent and all it had not sent; the next one comes after `down_s`."""
        if self.agent is not None and not self.left:
            self.agent = None
            self.clock.after(down_s, self.start_agent)

    def vanish(self) -> None:
        """Lose all that runs here, without a word; `start_agent` boots it again."""
        self.agent = None
        self.kill_keeper()

    def feed(self, input_: Input) -> None:
        """Give the machine something, and do what it says."""
        if self.agent is not None:
            for request in self.agent.handle(self.clock.now, input_):
                self._do(request)

    def _feed_same(self, agent: Agent | None, input_: Input) -> None:
        """Give it only to the agent that asked."""
        if agent is not None and agent is self.agent:
            self.feed(input_)

    def _do(self, request: Request) -> None:
        agent = self.agent
        match request:
            case StartKeeper():
                delay_s = 0.001 if self.keeper is not None else _KEEPER_START_S
                self.clock.after(delay_s, lambda: self._keeper_up(agent))
            case TellKeeper(message=KeeperKill() as kill):
                self.clock.after(_KILL_S, lambda: self._kill(agent, kill.generation))
            case TellKeeper(message=KeeperStore() as store):
                self.clock.after(_STORE_S, lambda: self._serve_store(agent, store.generation))
            case TellKeeper(message=KeeperExit()):
                self.clock.after(_KILL_S, self.kill_keeper)
            case SpawnRanks():
                self.clock.after(_SPAWN_S, lambda: self._spawn(agent, request))
            case CollectStacks(generation=generation, pids=pids):
                stacks = dict.fromkeys(sorted(pids), "simulated")
                answer = StacksCollected(generation=generation, stacks=stacks)
                self.clock.after(0.05, lambda: self._feed_same(agent, answer))
            case TellWorker(rank=rank, message=order):
                self.clock.after(_LINE_S, lambda: self._tell(agent, rank, order))
            case Report():
                self.outbox.append(Outgoing(request))
                self._send_batch()
            case Leave():
                self.left = True
            case _:
                pass

    # --- the keeper --------------------------------------------------------------------------

    def _keeper_up(self, agent: Agent | None) -> None:
        if agent is None or agent is not self.agent:
            return
        if self.keeper is None:
            self.pids += 1
            self.keeper = Keeper(self.pids)
        held = self.keeper
        exits = [held.exits[rank] for rank in sorted(held.exits)]
        state = KeeperState(
            pid=held.pid,
            generation=held.generation,
            running=dict(held.running),
            exits=tuple(ended.record for ended in exits),
            store_generation=held.store[0],
            store_port=held.store[1],
            warm=True,
        )
        mine = self.spec.ranks_of(self.node)
        newest = max((generation for generation, rank in self.begun if rank in mine), default=-1)
        if newest > held.generation:  # An earlier keeper's, which no agent saw die.
            exits += self._read_lost(newest, mine, self.clock.now)
        self.feed(
            KeeperUp(
                state=state,
                exits=tuple(exits),
                started_s=held.spawned_s,
                newest_on_disk=self.newest_spawned,
                begun=tuple(sorted(self.begun)),
            )
        )
        for rank in sorted(held.running):
            self._greet(held, rank)

    # --- the ranks' lines --------------------------------------------------------------------

    def _greet(self, held: Keeper, rank: int) -> None:
        """Let a rank connect: it says hello, and again what nobody has taken over."""
        if rank in held.stopped:
            return
        hello = WorkerHello("sim", rank, held.generation, held.running[rank])
        self.feed(WorkerSaid(rank=rank, generation=held.generation, message=hello))
        known = {outgoing.word for outgoing in self.outbox}
        for word, (generation, speaker, event) in self.words.items():
            if speaker == rank and generation == held.generation and word not in known:
                self.outbox.append(Outgoing(Report(event), word))
        self._send_batch()

    def _tell(self, agent: Agent | None, rank: int, order: Order) -> None:
        held = self.keeper
        if held is None or agent is not self.agent or not order.is_for(held.generation, rank):
            return
        if rank in held.running and rank not in held.stopped:
            held.ranks[rank].hear(self.clock.now, order)

    def _emit(self, generation: int, rank: int, event: AnyEvent) -> None:
        """Take a rank's event; it stays with the rank until the controller has it."""
        self.word += 1
        self.words[self.word] = (generation, rank, event)
        if self.agent is not None:
            self.outbox.append(Outgoing(Report(event), self.word))
            self._send_batch()

    def say(self, rank: int, event: AnyEvent) -> None:
        """Let a living rank report something of its own."""
        held = self.keeper
        if held is not None and rank in held.running and rank not in held.stopped:
            self._emit(held.generation, rank, event)

    def _ask(self, generation: int, rank: int, id_: str) -> None:
        said = WorkerSaid(rank=rank, generation=generation, message=WorkerQuery(id_))
        self.clock.after(_LINE_S, lambda: self.feed(said))

    def advance_ranks(self) -> None:
        """Let every rank do what is due at the step it has come to."""
        held, now = self.keeper, self.clock.now
        if held is None:
            return
        for rank in [r for r in held.running if r not in held.stopped]:
            if not held.ranks[rank].advance(now):
                self.end_rank(rank, code=1)

    def finish_ranks(self) -> bool:
        """Let the ranks that have come to the last step end; return whether all have."""
        held, now = self.keeper, self.clock.now
        if held is None:
            return True
        for rank in sorted(held.running):
            played = held.ranks[rank]
            if played.has_finished(now) and rank not in held.stopped:
                played.leave(now)
                self.end_rank(rank)
        return not held.running

    # --- the keeper's ranks ------------------------------------------------------------------

    def kill_keeper(self) -> None:
        """Lose the keeper, and with it, at once, every rank of the node.

        Nobody reaps these. The agent tells of their ends by what lies on disk, as soon as it knows
        that the keeper is gone; where it has died as well, its successor does.
        """
        held, self.keeper = self.keeper, None
        if held is None:
            return
        if held.running:
            self.world_of(held.generation).freeze(self.clock.now)
        for rank in sorted(held.running):
            self._note_end(held, rank, ExitRecord(
                rank, held.generation, held.running[rank], self.clock.now, signal=_SIGKILL,
                asked=True, error=_LOST,
            ))  # fmt: skip
            held.ranks[rank].die()
        agent, died_s = self.agent, self.clock.now
        self.clock.after(_BURY_S, lambda: self._miss_keeper(agent, held.pid, died_s))

    def _miss_keeper(self, agent: Agent | None, pid: int, died_s: float) -> None:
        """Let the agent know that its keeper is gone, with what the rings of its ranks say."""
        lost = agent.state.keeper if agent is not None else None
        if lost is not None and lost.pid == pid:
            exits = self._read_lost(lost.generation, sorted(lost.running), died_s)
            last = max((generation for generation, _ in self.begun), default=-1)
            begun = tuple(sorted(pair for pair in self.begun if pair[0] == last))
            self._feed_same(agent, KeeperGone(at_s=died_s, exits=tuple(exits), begun=begun))

    def _read_lost(self, generation: int, ranks: Iterable[int], at_s: float) -> list[RankExited]:
        """Return how ranks of a dead keeper ended; at `at_s`, where no record says when."""
        ends = [self.ends[generation, r] for r in ranks if (generation, r) in self.ends]
        return [
            structs.replace(end, record=structs.replace(end.record, at_s=at_s))
            if end.record.error == _LOST
            else end
            for end in ends
        ]

    def _spawn(self, agent: Agent | None, request: SpawnRanks) -> None:
        """Start the ranks of a world, or those (`members`) that come into one that exists."""
        held, generation = self.keeper, request.assignment.generation
        joins = bool(request.members)
        if held is None or generation < held.generation + (not joins):
            return
        if generation <= held.ended:
            self._feed_same(agent, KeeperSaid(message=KeeperStopped(generation)))
            return
        if generation > held.generation:
            held.generation, held.exits, held.spawned_s = generation, {}, self.clock.now
            self.newest_spawned = max(self.newest_spawned, generation)
            held.stopped.clear()
            held.ranks = {}
        ranks = request.members or self.spec.ranks_of(request.assignment.slots_of(self.node))
        for rank in [r for r in ranks if not joins or (generation, r) not in self.begun]:
            self.pids += 1
            held.running[rank] = self.pids
            held.ranks[rank] = self._make_rank(rank, generation, joins=joins)
            self.begun.add((generation, rank))
            if not joins:
                self.world_of(generation).spawn(rank, self.clock.now)
        pids = {rank: held.running[rank] for rank in ranks if rank in held.running}
        said = KeeperSpawned(generation, pids, self.clock.now, warm=True, beside=request.beside)
        self._feed_same(agent, KeeperSaid(message=said))
        for rank in () if joins else ranks:
            self._emit(generation, rank, RankJoined(generation=generation, rank=rank))

    def _make_rank(self, rank: int, generation: int, *, joins: bool) -> Rank:
        made = self.rank_type(
            rank,
            self.world_of(generation),
            self.late_s(),
            emit=lambda event: self._emit(generation, rank, event),
            ask=lambda id_: self._ask(generation, rank, id_),
            end=lambda code: self._end_of(generation, rank, code),
            witness=self.witness,
            joins=joins,
        )
        made.begin()
        return made

    def _end_of(self, generation: int, rank: int, code: int) -> None:
        """Let a rank of that generation end by itself."""
        if self.keeper is not None and self.keeper.generation == generation:
            self.end_rank(rank, code=code)

    def _serve_store(self, agent: Agent | None, generation: int) -> None:
        if self.keeper is not None:
            self.keeper.store = (generation, 40_000 + generation)
            self._feed_same(
                agent, KeeperSaid(message=KeeperStoreReady(generation, 40_000 + generation))
            )

    def _kill(self, agent: Agent | None, generation: int) -> None:
        held = self.keeper
        if held is None:
            return
        held.ended = max(held.ended, generation)
        if held.generation <= generation:
            for rank in sorted(held.running):
                self.end_rank(rank, signal=_SIGKILL, asked=True)
        self._feed_same(agent, KeeperSaid(message=KeeperStopped(generation)))

    def end_rank(self, rank: int, *, signal: int = 0, code: int = 0, asked: bool = False) -> None:
        """Let a rank end, by a signal or well; its keeper reaps it."""
        held = self.keeper
        if held is None or rank not in held.running:
            return
        now = self.clock.now
        world = self.world_of(held.generation)
        if signal or code:
            world.freeze(now)
        record = ExitRecord(
            rank=rank,
            generation=held.generation,
            pid=held.running.pop(rank),
            at_s=now,
            code=code,
            signal=signal,
            asked=asked,
        )
        held.exits[rank] = self._note_end(held, rank, record)
        held.stopped.discard(rank)
        self.feed(held.exits[rank])
        held.ranks[rank].die()

    def _note_end(self, held: Keeper, rank: int, record: ExitRecord) -> RankExited:
        """Put a rank's end on disk, with what its ring says by then; return it."""
        now, world = self.clock.now, self.world_of(held.generation)
        step = world.step_at(now)
        end = self.ends[held.generation, rank] = RankExited(
            node=self.node,
            record=record,
            account=held.ranks[rank].account(now, held.spawned_s),
            detected_s=now,
            comms=(CommProgress("world", world.size, step, step, since_s=now),),
        )
        return end

    def leave_rank(self, rank: int) -> None:
        """Let a rank end well in the middle of everything: the others wait for it."""
        held = self.keeper
        world = self.world_of(held.generation) if held is not None and held.running else None
        if world is not None and world.first_step_s and world.frozen_s is None:
            world.freeze(self.clock.now)
            self.end_rank(rank)

    def stop_rank(self, rank: int) -> None:
        """Let a rank hang, in state T."""
        held = self.keeper
        if held is not None and rank in held.running:
            held.stopped.add(rank)
            self.world_of(held.generation).freeze(self.clock.now)

    # --- what is sent ------------------------------------------------------------------------

    def _send_batch(self) -> None:
        if self.agent is None or not self.outbox:
            return
        events: tuple[AnyEvent, ...] = tuple(o.report.event for o in self.outbox[:200])
        incarnation = self.agent.identity.incarnation
        batch = EventBatch(incarnation, self.first_seq, events)
        self.send(EventMessage(self.node, (batch,)))

    def _resend(self, agent: Agent) -> None:
        if agent is self.agent and not (self.left and not self.outbox):
            self._send_batch()
            self.clock.after(0.5, lambda: self._resend(agent))

    def acknowledge(self, ack: EventAck) -> None:
        """Take the controller's word of what it has."""
        seq = ack.seqs.get(self.agent.identity.incarnation, 0) if self.agent is not None else 0
        while self.outbox and self.first_seq <= seq:
            outgoing = self.outbox.pop(0)
            self.first_seq += 1
            self.words.pop(outgoing.word, None)
            for request in outgoing.report.after:
                self._do(request)

    def order(self, order: NodeOrder) -> None:
        """Take an order from the controller."""
        self.feed(OrderReceived(order=order))

    def make_beat(self) -> NodeBeat | None:
        """Return the heartbeat of this moment; None without an agent."""
        held = self.keeper
        if self.agent is None or held is None or self.left:
            return None
        self.beats += 1
        now, spawned_s = self.clock.now, held.spawned_s
        rows = [
            held.ranks[rank].progress(now, pid, spawned_s, stopped=rank in held.stopped)
            for rank, pid in sorted(held.running.items())
        ]
        incarnation = self.agent.identity.incarnation
        return NodeBeat(self.node, incarnation, self.beats, now, held.generation, tuple(rows))
