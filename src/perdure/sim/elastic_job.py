"""A whole elastic job under virtual time: the real controller and agents above played members."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from perdure.agent import Agent
from perdure.agent.messages import KeeperSaid, Request, SpawnRanks, TellWorker
from perdure.model.bus.wire import KeeperSpawned, KeeperStopped
from perdure.model.orders import Assignment, ReformWorld
from perdure.model.signals.progress import ProcSample, RankAccount, RankProgress
from perdure.sim.elastic import Fabric, Member
from perdure.sim.node import Keeper, Node
from perdure.sim.simulation import Scenario, Simulation
from perdure.sim.training import World

_SPAWN_S, _LINE_S = 0.05, 0.001


@dataclass(slots=True)
class ElasticWorld(World):
    """One generation of an elastic job, as what surrounds its members looks at it."""

    fabric: Fabric | None = None

    def step_at(self, now: float) -> int:
        """Return the steps that the furthest member has applied."""
        assert self.fabric is not None
        return max(self.start_step, self.fabric.furthest)

    def freeze(self, now: float) -> None:
        """A death stops nobody."""


class ElasticNode(Node):
    """A machine whose ranks are members."""

    fabric_of: Callable[[int], Fabric]

    def members(self, generation: int) -> dict[int, Member]:
        """Return those of a generation that this node has ever started."""
        return {n: m for n, m in self.fabric_of(generation).members.items() if m.node == self.node}

    def _do(self, request: Request) -> None:
        agent = self.agent
        match request:
            case SpawnRanks(members=members) if members:
                self.clock.after(_SPAWN_S, lambda: self._spawn_members(agent, request))
            case TellWorker(rank=rank, message=ReformWorld() as order):
                self.clock.after(_LINE_S, lambda: self._tell_order(agent, rank, order))
            case _:
                super()._do(request)

    def _tell_order(self, agent: Agent | None, rank: int, order: ReformWorld) -> None:
        held = self.keeper
        if held is None or agent is not self.agent or order.generation != held.generation:
            return
        if rank in held.running:
            self.members(held.generation)[rank].take(order)

    def _spawn(self, agent: Agent | None, assignment: Assignment) -> None:
        before = self.newest_spawned
        super()._spawn(agent, assignment)
        held = self.keeper
        if held is not None and held.generation == assignment.generation > before:
            for rank in sorted(held.running):
                self._bring_up(held, rank, joins=False)

    def _spawn_members(self, agent: Agent | None, request: SpawnRanks) -> None:
        """Start members that come into a world that exists."""
        held, generation = self.keeper, request.assignment.generation
        if held is None or generation < held.generation:
            return
        if generation <= held.ended:
            self._feed_same(agent, KeeperSaid(message=KeeperStopped(generation)))
            return
        if generation > held.generation:
            held.generation, held.exits, held.spawned_s = generation, {}, self.clock.now
            self.newest_spawned = max(self.newest_spawned, generation)
        new = [m for m in request.members if (generation, m) not in self.begun]
        for rank in new:
            self.pids += 1
            self.begun.add((generation, rank))
            held.running[rank] = self.pids
            held.ranks[rank] = self._make_rank(rank, generation, self.world_of(generation))
            self._bring_up(held, rank, joins=True)
        pids = {rank: held.running[rank] for rank in request.members if rank in held.running}
        said = KeeperSpawned(generation, pids, self.clock.now, warm=True, beside=request.beside)
        self._feed_same(agent, KeeperSaid(message=said))

    def _bring_up(self, held: Keeper, rank: int, *, joins: bool) -> None:
        generation = held.generation
        fabric = self.fabric_of(generation)
        fabric.members[rank] = Member(
            rank,
            self.node,
            fabric,
            emit=lambda event: self._emit(generation, rank, event),
            end=lambda code: self.end_member(generation, rank, code),
            joins=joins,
            size=self.spec.world_size,
        )
        self.clock.after(self.world_of(generation).startup_s, fabric.members[rank].start)

    def end_member(self, generation: int, rank: int, code: int) -> None:
        """Let a member of a generation end by itself."""
        if self.keeper is not None and self.keeper.generation == generation:
            self.end_rank(rank, code=code)

    def end_rank(self, rank: int, *, signal: int = 0, code: int = 0, asked: bool = False) -> None:
        """Let a member end; its connections close with it."""
        held = self.keeper
        if held is None or rank not in held.running:
            return
        member = self.members(held.generation)[rank]
        super().end_rank(rank, signal=signal, code=code, asked=asked)
        member.die()

    def kill_keeper(self) -> None:
        """Lose the keeper, and with it every member of the node."""
        held = self.keeper
        super().kill_keeper()
        for rank in sorted(held.running) if held is not None else ():
            self.members(held.generation)[rank].die()  # type: ignore[union-attr]

    def crash(self, chance: random.Random) -> None:
        """Lose one of the processes that live here."""
        running = sorted(self.keeper.running) if self.keeper is not None else []
        if running:
            self.end_rank(chance.choice(running), signal=9)

    def finish_ranks(self) -> bool:
        """Members end by themselves."""
        return True

    def _progress(self, held: Keeper, world: World, rank: int) -> RankProgress:
        member, now = self.members(held.generation)[rank], self.clock.now
        return RankProgress(
            rank=rank,
            pid=held.running[rank],
            phase="step" if member.epoch >= 0 else "spawned",
            phase_since_s=held.spawned_s,
            heartbeat_s=now,
            account=RankAccount(start_step=0, step=member.applied, spawned_s=held.spawned_s),
            proc=ProcSample(state="S", cpu_s=now),
        )

    def _account(self, world: World) -> RankAccount:
        spawned_s = self.keeper.spawned_s if self.keeper is not None else self.clock.now
        return RankAccount(start_step=world.start_step, spawned_s=spawned_s)


class ElasticSimulation(Simulation):
    """One run of an elastic job."""

    node_type = ElasticNode

    def __init__(self, scenario: Scenario) -> None:
        """Set everything up; `run` lets time pass."""
        self.fabrics: dict[int, Fabric] = {}
        self.truth: dict[int, int] = {}
        super().__init__(scenario)
        for node in self.nodes:
            assert isinstance(node, ElasticNode)
            node.fabric_of = self.fabric_of

    def fabric_of(self, generation: int) -> Fabric:
        """Return what the members of a generation share."""
        self.world_of(generation)
        return self.fabrics[generation]

    def world_of(self, generation: int) -> World:
        """Return the world of `generation`, made at its first rank's start."""
        if generation not in self.worlds:
            s = self.scenario
            fabric = Fabric(
                generation, self.clock, self.chance, self.disk, self.truth, s.steps, s.save_every
            )
            self.fabrics[generation] = fabric
            self.worlds[generation] = ElasticWorld(
                generation, s.nodes * s.nproc, s.steps, s.step_s, s.startup_s, s.save_every,
                0.1, self.disk, start_step=self.disk.verified, fabric=fabric,
            )  # fmt: skip
        return self.worlds[generation]

    @property
    def reformed(self) -> int:
        """Epochs after each generation's first that some member has formed."""
        epochs = {
            (number, epoch)
            for number, fabric in self.fabrics.items()
            for epoch in fabric.connected
            if epoch
        }
        return len(epochs)

    def _fault(self, kind: str, node: int, rank: int, down_s: float) -> Callable[[], None]:
        strike, struck = super()._fault(kind, node, rank, down_s), self.nodes[node]
        if kind != "crash":
            return strike

        def crash() -> None:
            if self.ended is None:
                self.injected.append(f"crash on node {node} at {self.clock.now - self.start_s:.3f}")
                assert isinstance(struck, ElasticNode)
                struck.crash(self.chance)

        return crash

    def _save(self) -> None:
        """Members tell of their checkpoints themselves."""
