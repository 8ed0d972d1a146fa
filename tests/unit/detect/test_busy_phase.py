"""A declared busy phase: silence of the rank, and of those that wait for it, is no verdict.

Row T5: an evaluation on rank 0 that outlasts every allowance had its world restarted.
"""

import msgspec
import pytest

from perdure.model.job import DetectConfig
from perdure.model.signals.progress import BusyPhase

LONG_S = 400.0
TOLD = DetectConfig(hang_action_s=300.0)
"""An action threshold that it outlasts: by default there is none so short."""


def declare(world, rank=0, at_most_s=600.0):
    world.ranks[rank].busy_phase = BusyPhase("evaluate", world.now, world.now + at_most_s)
    world.ranks[rank].heartbeat_s = world.now


def end(world, rank=0):
    world.ranks[rank].busy_phase = None
    world.ranks[rank].heartbeat_s = world.now


@pytest.mark.parametrize("resumable", [True, False])
@pytest.mark.parametrize("ends_known", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_a_silent_evaluation_of_400_s_on_rank_0(make_world, declared, ends_known, resumable):
    world = make_world(3, resumable=resumable, ends_known=ends_known, config=TOLD)
    world.run(20)
    if declared:
        declare(world)
    world.ranks[0].busy = False  # Neither CPU nor I/O: it waits for a device, or for storage.
    world.run(LONG_S, hold=lambda rank: rank == 0)
    if declared:
        end(world)
    world.run(20)
    assert bool(world.verdicts) is not declared
    assert bool(world.actionable) is not declared


def test_where_no_collective_is_seen_nobody_who_may_be_waiting_is_accused(make_world):
    """Without a recorder only silence is known, and rank 1 may be waiting for rank 0."""
    world = make_world()
    recorded = world.progress
    world.progress = lambda r: msgspec.structs.replace(recorded(r), comms=())
    world.run(20)
    declare(world)
    world.run(LONG_S, hold=lambda rank: rank == 0)
    end(world)
    world.run(20)
    assert not world.verdicts


def test_after_at_most_s_it_counts_as_nothing(make_world):
    world = make_world()
    world.run(20)
    declare(world, at_most_s=60.0)
    world.run(59, hold=lambda rank: rank == 0)
    assert not world.verdicts
    world.run(3, hold=lambda rank: rank == 0)
    (verdict,) = world.verdicts
    assert (verdict.kind, verdict.culprit.rank) == ("ComputeHang", 0)


def test_a_hang_elsewhere_is_found_meanwhile(make_world):
    world = make_world(3)
    world.run(20)
    declare(world)
    world.run(10, hold=lambda rank: rank in (0, 2))
    (verdict,) = world.verdicts
    assert (verdict.kind, verdict.culprit.rank) == ("ComputeHang", 2)


def test_a_hang_after_it_is_found_as_soon_as_without_it(make_world):
    world = make_world()
    world.run(20)
    declare(world)
    world.run(100, hold=lambda rank: rank == 0)
    end(world)
    world.run(20)
    assert not world.verdicts
    began_s = world.now
    world.run(10, hold=lambda rank: rank == 1)
    (verdict,) = world.verdicts
    assert verdict.culprit.rank == 1
    assert verdict.confirmed_s - began_s < 3.0


def test_a_stopped_process_is_in_no_evaluation(make_world):
    world = make_world()
    world.run(20)
    declare(world)
    world.run(2, hold=lambda rank: rank == 0)
    world.ranks[0].state = "T"
    world.run(5)
    (verdict,) = world.actionable
    assert (verdict.culprit.rank, verdict.activity) == (0, "stopped")


@pytest.mark.parametrize("until_s", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_rank_that_lies_about_its_end_stops_nobodys_watch(make_world, until_s):
    world = make_world(3)
    world.run(20)
    world.ranks[0].busy_phase = BusyPhase("evaluate", world.now, until_s)
    world.run(10, hold=lambda rank: rank == 2)
    (verdict,) = world.verdicts
    assert verdict.culprit.rank == 2
