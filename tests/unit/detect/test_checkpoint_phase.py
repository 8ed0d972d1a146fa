"""A rank that waits for a disk is not a hang, however quick its checkpoints were before."""

from dataclasses import dataclass, field

import msgspec
import pytest
from tests.unit.detect.conftest import Rank, World

from perdure.model.job import DetectConfig
from perdure.model.signals.progress import RankProgress


@dataclass
class SavingWorld(World):
    """A world whose ranks may be in a phase other than `step`."""

    phases: dict[int, tuple[str, float]] = field(default_factory=dict)

    def progress(self, r: Rank) -> RankProgress:
        shown = super().progress(r)
        phase, since_s = self.phases.get(r.rank, ("step", shown.phase_since_s))
        return msgspec.structs.replace(shown, phase=phase, phase_since_s=since_s)

    def save(self, rank: int, seconds: float) -> None:
        """Keep `rank` in its checkpoint, waiting for the disk, and moving nothing."""
        self.phases[rank] = ("checkpoint", self.now)
        self.ranks[rank].busy = False
        self.run(seconds, hold=lambda r: r == rank)
        self.phases[rank] = ("step", self.now)
        self.ranks[rank].busy = True
        self.run(5)


@pytest.fixture
def trained() -> SavingWorld:
    """A world that has seen three quick checkpoints; its job file says how long is too long."""
    world = SavingWorld(config=DetectConfig(hang_action_s=300.0))
    world.run(20)
    for _ in range(3):
        world.save(0, 0.5)
    return world


def test_a_save_much_slower_than_the_last_ones_is_no_verdict(trained: SavingWorld) -> None:
    trained.save(0, 55)
    assert not trained.verdicts


def test_a_save_that_never_ends_is_said_and_acted_upon(trained: SavingWorld) -> None:
    trained.save(0, 420)
    assert [(v.culprit.rank, v.actionable) for v in trained.verdicts] == [(0, False), (0, True)]
    (acted,) = trained.actionable
    assert acted.activity == "busy"
    assert acted.evidence["acted_after_s"] >= 300


def test_a_rank_stopped_in_its_save_is_acted_upon_at_once(trained: SavingWorld) -> None:
    trained.ranks[0].state = "T"
    trained.save(0, 4)
    assert [v.activity for v in trained.actionable] == ["stopped"]
