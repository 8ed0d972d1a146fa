"""A whole elastic job under virtual time: the real controller and agents above played members."""

from collections.abc import Callable
from dataclasses import dataclass

from perdure.agent import Agent
from perdure.agent.messages import KeeperSaid, Request, SpawnRanks, TellWorker
from perdure.model.actions import ReformWorld
from perdure.model.progress import ProcSample, RankAccount, RankProgress
from perdure.model.wire import KeeperSpawned
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
        mine = self.fabric_of(generation).members
        return {n: m for n, m in mine.items() if self.spec.node_of(n) == self.node}

    def _do(self, request: Request) -> None:
        agent = self.agent
        match request:
            case SpawnRanks(assignment=assignment, members=beside) if beside:
                number = assignment.generation
                self.clock.after(_SPAWN_S, lambda: self._spawn_beside(agent, number, beside))
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

    def _spawn(self, agent: Agent | None, generation: int) -> None:
        before = self.newest_spawned
        super()._spawn(agent, generation)
        held = self.keeper
        if held is not None and held.generation == generation > before:
            for rank in sorted(held.running):
                self._bring_up(held, rank, joins=False)

    def _spawn_beside(self, agent: Agent | None, generation: int, beside: tuple[int, ...]) -> None:
        held = self.keeper
        if held is None or generation != held.generation or generation <= held.ended:
            return
        known = self.members(generation)
        for rank in (r for r in beside if r not in known):
            self.pids += 1
            held.running[rank] = self.pids
            held.ranks[rank] = self._make_rank(rank, generation, self.world_of(generation))
            self._bring_up(held, rank, joins=True)
        pids = {rank: held.running[rank] for rank in beside if rank in held.running}
        said = KeeperSpawned(generation, pids, self.clock.now, warm=True, beside=True)
        self._feed_same(agent, KeeperSaid(message=said))

    def _bring_up(self, held: Keeper, rank: int, *, joins: bool) -> None:
        generation = held.generation
        fabric = self.fabric_of(generation)
        member = Member(
            rank,
            fabric,
            emit=lambda event: self._emit(generation, rank, event),
            end=lambda code: self.end_member(generation, rank, code),
            joins=joins,
            size=self.spec.world_size,
        )
        fabric.members[rank] = member
        self.clock.after(self.world_of(generation).startup_s, member.start)

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

    def _save(self) -> None:
        """Members tell of their checkpoints themselves."""
