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
    RankEnded,
    Report,
    Request,
    SpawnRanks,
    StacksCollected,
    StartKeeper,
    TellKeeper,
)
from perdure.agent.state import NodeIdentity
from perdure.model.events import AnyEvent, ExitRecord, RankJoined
from perdure.model.job import JobSpec
from perdure.model.progress import CommProgress, NodeBeat, ProcSample, RankAccount, RankProgress
from perdure.model.wire import (
    EventMessage,
    KeeperExit,
    KeeperKill,
    KeeperSpawned,
    KeeperState,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    NodeOrder,
)
from perdure.sim.clock import VirtualClock
from perdure.sim.training import World

_SIGKILL = 9
_KILL_S, _SPAWN_S, _STORE_S, _KEEPER_START_S = 0.02, 0.05, 0.02, 0.3


@dataclass(slots=True)
class Keeper:
    """What a keeper holds, and outlives its agent with."""

    pid: int
    generation: int = -1
    running: dict[int, int] = field(default_factory=dict)
    exits: dict[int, RankEnded] = field(default_factory=dict)
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
    ) -> None:
        """Boot: keeper and agent come up; `send` takes batches of events to the controller."""
        self.spec, self.node, self.clock = spec, node, clock
        self.world_of, self.send = world_of, send
        self.keeper: Keeper | None = None
        self.pids = node * 1_000_000
        self.newest_spawned = -1
        self.agents = 0
        self.agent: Agent | None = None
        self.left = False
        self.outbox: list[Report] = []
        self.first_seq = 1
        self.beats = 0
        self.start_agent()

    # --- the agent ---------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Start an agent, or its successor."""
        self.agents += 1
        identity = NodeIdentity(node=self.node, incarnation=f"a{self.node}.{self.agents}")
        self.agent = Agent(self.spec, identity)
        self.outbox, self.first_seq = [], 1
        self.feed(AgentStarted())
        self._resend(self.agent)

    def kill_agent(self, down_s: float) -> None:
        """Lose the agent and all it had not sent; the next one comes after `down_s`."""
        if self.agent is not None and not self.left:
            self.agent = None
            self.clock.after(down_s, self.start_agent)

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
            case SpawnRanks(assignment=assignment):
                generation = assignment.generation
                self.clock.after(_SPAWN_S, lambda: self._spawn(agent, generation))
            case CollectStacks(generation=generation, pids=pids):
                stacks = dict.fromkeys(sorted(pids), "simulated")
                answer = StacksCollected(generation=generation, stacks=stacks)
                self.clock.after(0.05, lambda: self._feed_same(agent, answer))
            case Report():
                self.outbox.append(request)
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
            )
        )

    def kill_keeper(self) -> None:
        """Lose the keeper, and with it every rank of the node."""
        held, self.keeper = self.keeper, None
        if held is None:
            return
        if held.running:
            self.world_of(held.generation).freeze(self.clock.now)
        self.feed(KeeperGone())

    def _spawn(self, agent: Agent | None, generation: int) -> None:
        held = self.keeper
        if held is None or generation <= held.generation:
            return
        if generation <= held.ended:
            self._feed_same(agent, KeeperSaid(message=KeeperStopped(generation)))
            return
        held.generation, held.exits, held.spawned_s = generation, {}, self.clock.now
        self.newest_spawned = max(self.newest_spawned, generation)
        held.stopped.clear()
        world = self.world_of(generation)
        for rank in self.spec.ranks_of(self.node):
            self.pids += 1
            held.running[rank] = self.pids
            world.spawn(rank, self.clock.now)
        said = KeeperSpawned(generation, dict(held.running), self.clock.now, warm=True)
        self._feed_same(agent, KeeperSaid(message=said))
        for rank in self.spec.ranks_of(self.node):
            if self.agent is not None:
                self.outbox.append(Report(RankJoined(generation=generation, rank=rank)))
        self._send_batch()

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

    def end_rank(self, rank: int, *, signal: int = 0, asked: bool = False) -> None:
        """Let a rank end, by a signal or well; its keeper reaps it."""
        held = self.keeper
        if held is None or rank not in held.running:
            return
        now = self.clock.now
        world = self.world_of(held.generation)
        if signal:
            world.freeze(now)
        record = ExitRecord(
            rank=rank,
            generation=held.generation,
            pid=held.running.pop(rank),
            at_s=now,
            signal=signal,
            asked=asked,
        )
        step = world.step_at(now)
        comm = CommProgress("world", world.size, step, step, since_s=now)
        ended = RankEnded(record=record, account=self._account(world), comms=(comm,))
        held.exits[rank] = ended
        held.stopped.discard(rank)
        self.feed(ended)

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
        events: tuple[AnyEvent, ...] = tuple(report.event for report in self.outbox[:200])
        incarnation = self.agent.identity.incarnation
        self.send(EventMessage(incarnation, self.node, self.first_seq, events))

    def _resend(self, agent: Agent) -> None:
        if agent is self.agent and not (self.left and not self.outbox):
            self._send_batch()
            self.clock.after(0.5, lambda: self._resend(agent))

    def acknowledge(self, source: str, seq: int) -> None:
        """Take the controller's word that it has everything up to `seq`."""
        if self.agent is None or source != self.agent.identity.incarnation:
            return
        while self.outbox and self.first_seq <= seq:
            report = self.outbox.pop(0)
            self.first_seq += 1
            for request in report.after:
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
        return RankAccount(
            start_step=world.start_step,
            step=step,
            step_s=done * world.step_s,
            spawned_s=spawned_s,
            script_s=spawned_s,
            init_s=spawned_s,
            group_s=first,
            restored_s=first,
            first_step_s=first,
            last_step_s=first + done * world.step_s,
            finished_s=first + done * world.step_s if step == world.target else 0.0,
            marks=tuple((mark, (mark - world.start_step) * world.step_s) for mark in marks),
        )
