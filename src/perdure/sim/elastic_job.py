"""A whole elastic job under virtual time: the real controller and agents above played members."""

from collections.abc import Callable

from perdure.sim.elastic import ElasticWorld, Fabric, Member
from perdure.sim.simulation import Scenario, Simulation
from perdure.sim.training import World


class ElasticSimulation(Simulation):
    """One run of an elastic job: its ranks are members."""

    rank_type = Member

    def __init__(self, scenario: Scenario) -> None:
        """Set everything up; `run` lets time pass."""
        self.truth: dict[int, int] = {}
        super().__init__(scenario)

    def world_of(self, generation: int) -> World:
        """Return the world of `generation`, made at its first rank's start."""
        if generation not in self.worlds:
            s = self.scenario
            fabric = Fabric(
                generation, self.clock, self.chance, self.disk, self.truth, s.steps, s.save_every
            )
            self.worlds[generation] = ElasticWorld(
                generation, s.nodes * s.nproc, s.steps, s.step_s, s.startup_s, s.save_every,
                0.1, self.disk, start_step=self.disk.verified, fabric=fabric,
            )  # fmt: skip
        return self.worlds[generation]

    @property
    def reformed(self) -> int:
        """Epochs after each generation's first that some member has formed."""
        worlds = [world for world in self.worlds.values() if isinstance(world, ElasticWorld)]
        return sum(bool(epoch) for world in worlds for epoch in world.fabric.connected)

    def _fault(self, kind: str, node: int, rank: int, down_s: float) -> Callable[[], None]:
        if kind != "crash":
            return super()._fault(kind, node, rank, down_s)

        def crash() -> None:
            """Lose one of the processes that live there."""
            if self.ended is None:
                self.injected.append(f"crash on node {node} at {self.clock.now - self.start_s:.3f}")
                keeper = self.nodes[node].keeper
                if keeper is not None and keeper.running:
                    running = sorted(keeper.running)
                    self.nodes[node].end_rank(self.chance.choice(running), signal=9)

        return crash

    def _save(self) -> None:
        """Members tell of their checkpoints themselves."""
