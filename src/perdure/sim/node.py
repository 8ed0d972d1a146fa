"""One simulated node: a real agent machine above a played keeper, its ranks and its outbox."""

from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.agent import Agent
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
from perdure.model.events import AnyEvent, ExitRecord, RankExited, RankJoined
from perdure.model.job import JobSpec
from perdure.model.orders import Assignment, SendBoundary
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)
from perdure.sim.clock import VirtualClock
from perdure.sim.ranks import Agreements, Rank
from perdure.sim.training import World

_SIGKILL = 9
_KILL_S, _SPAWN_S, _STORE_S, _KEEPER_START_S = 0.02, 0.05, 0.02, 0.3
_LINE_S = 0.001
"""From an agent to a rank of its node, or back."""


@dataclass(slots=True)
class Outgoing:
    """What an agent has to tell the controller, and the rank's word behind it."""

    report: Report
    word: int = 0


@dataclass(slots=True)
class Keeper:
    """What a keeper holds, and outlives its agent with."""

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
    ) -> None:
        """Boot: keeper and agent come up; `send` takes batches of events to the controller.

        `late_s` draws how much later than the first a rank comes to each step.
        """
        self.spec, self.node, self.clock = spec, node, clock
        self.world_of, self.send = world_of, send
        self.witness, self.late_s = witness, late_s
        self.words: dict[int, tuple[int, int, AnyEvent]] = {}
        """Number -> (generation, rank, event) that no agent has taken over for good."""
        self.word = 0
        self.keeper: Keeper | None = None
        self.pids = node * 1_000_000
        self.newest_spawned = -1
        self.begun: set[tuple[int, int]] = set()
        """(generation, rank) of every ring that lies on this node."""
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
            case SpawnRanks(assignment=assignment, members=()):
                self.clock.after(_SPAWN_S, lambda: self._spawn(agent, assignment))
            case CollectStacks(generation=generation, pids=pids):
                stacks = dict.fromkeys(sorted(pids), "simulated")
                answer = StacksCollected(generation=generation, stacks=stacks)
                self.clock.after(0.05, lambda: self._feed_same(agent, answer))
            case TellWorker(rank=rank, message=SendBoundary() as order):
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
        exits = tuple(held.exits[rank] for rank in sorted(held.exits))
        state = KeeperState(
            pid=held.pid,
            generation=held.generation,
            running=dict(held.running),
            exits=tuple(ended.record for ended in exits),
            store_generation=held.store[0],
            store_port=held.store[1],
            warm=True,
        )
        self.feed(
            KeeperUp(
                state=state,
                exits=exits,
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

    def _tell(self, agent: Agent | None, rank: int, order: SendBoundary) -> None:
        held = self.keeper
        if held is None or agent is not self.agent or order.generation != held.generation:
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
        for rank in [r for r, played in held.ranks.items() if played.open]:
            alive = rank in held.running and rank not in held.stopped
            if alive and not held.ranks[rank].advance(now):
                self.end_rank(rank, code=1)

    def finish_ranks(self) -> bool:
        """Let the ranks that have come to the last step end; return whether all have."""
        held, now = self.keeper, self.clock.now
        if held is None:
            return True
        for rank in sorted(held.running):
            played = held.ranks[rank]
            committed = played.look(now)
            due = any(order.step <= committed for order, _ in played.open.values())
            if rank not in held.stopped and committed == played.world.target and not due:
                played.leave(now)
                self.end_rank(rank)
        return not held.running

    # --- the keeper's ranks ------------------------------------------------------------------

    def kill_keeper(self) -> None:
        """Lose the keeper, and with it every rank of the node."""
        held, self.keeper = self.keeper, None
        if held is None:
            return
        if held.running:
            self.world_of(held.generation).freeze(self.clock.now)
        self.feed(KeeperGone())

    def _spawn(self, agent: Agent | None, assignment: Assignment) -> None:
        held, generation = self.keeper, assignment.generation
        ranks = self.spec.ranks_of(assignment.slots_of(self.node))
        if held is None or generation <= held.generation:
            return
        if generation <= held.ended:
            self._feed_same(agent, KeeperSaid(message=KeeperStopped(generation)))
            return
        held.generation, held.exits, held.spawned_s = generation, {}, self.clock.now
        self.newest_spawned = max(self.newest_spawned, generation)
        held.stopped.clear()
        world = self.world_of(generation)
        held.ranks = {}
        for rank in ranks:
            self.pids += 1
            held.running[rank] = self.pids
            held.ranks[rank] = self._make_rank(rank, generation, world)
            self.begun.add((generation, rank))
            world.spawn(rank, self.clock.now)
        said = KeeperSpawned(generation, dict(held.running), self.clock.now, warm=True)
        self._feed_same(agent, KeeperSaid(message=said))
        for rank in ranks:
            self._emit(generation, rank, RankJoined(generation=generation, rank=rank))

    def _make_rank(self, rank: int, generation: int, world: World) -> Rank:
        return Rank(
            rank,
            world,
            self.late_s(),
            emit=lambda event: self._emit(generation, rank, event),
            ask=lambda id_: self._ask(generation, rank, id_),
            witness=self.witness,
        )

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
        step = world.step_at(now)
        comm = CommProgress("world", world.size, step, step, since_s=now)
        held.exits[rank] = RankExited(
            node=self.node,
            record=record,
            account=self._account(world),
            detected_s=now,
            comms=(comm,),
        )
        held.stopped.discard(rank)
        self.feed(held.exits[rank])

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
        world = self.world_of(held.generation) if held.running else None
        rows = (
            tuple(self._progress(held, world, rank) for rank in sorted(held.running))
            if world is not None
            else ()
        )
        incarnation = self.agent.identity.incarnation
        now = self.clock.now
        return NodeBeat(self.node, incarnation, self.beats, now, held.generation, rows)

    def _progress(self, held: Keeper, world: World, rank: int) -> RankProgress:
        now, step = self.clock.now, world.step_at(self.clock.now)
        stepping = world.first_step_s and now >= world.first_step_s
        stopped = rank in held.stopped
        at_s = min(now, world.frozen_s) if world.frozen_s is not None else now
        comm = CommProgress("world", world.size, step + (not stopped), step, since_s=at_s)
        return RankProgress(
            rank=rank,
            pid=held.running[rank],
            phase="step" if stepping else "spawned",
            phase_since_s=world.first_step_s or held.spawned_s,
            heartbeat_s=max(held.spawned_s, at_s - world.step_s),
            account=self._account(world),
            comms=(comm,) if stepping else (),
            proc=ProcSample(state="T" if stopped else "S", cpu_s=1.0 if stopped else now),
        )

    def _account(self, world: World) -> RankAccount:
        now, step = self.clock.now, world.step_at(self.clock.now)
        spawned_s = self.keeper.spawned_s if self.keeper is not None else now
        if not world.first_step_s or now < world.first_step_s:
            return RankAccount(start_step=world.start_step, spawned_s=spawned_s)
        done = step - world.start_step
        marks = range(
            -(-(world.start_step + 1) // world.save_every) * world.save_every,
            step + 1,
            world.save_every,
        )
        first = world.first_step_s
        last_s = world.time_of(step)
        return RankAccount(
            start_step=world.start_step,
            step=step,
            step_s=done * world.step_s,
            boundary_s=world.paused_s,
            spawned_s=spawned_s,
            script_s=spawned_s,
            init_s=spawned_s,
            group_s=first,
            restored_s=first,
            first_step_s=first,
            last_step_s=last_s,
            finished_s=last_s if step == world.target else 0.0,
            marks=tuple((mark, (mark - world.start_step) * world.step_s) for mark in marks),
        )
