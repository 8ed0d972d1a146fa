"""T4: a node from elsewhere is missed within a second where its peers' connections ended as well.

A second without heartbeats alone says nothing: its ranks train on, one sign of them a step.
"""

import pytest

from perdure.detect.nodes import NodeWatch
from perdure.model.events import ExitRecord, NodeLost, RankExited
from perdure.model.job import DetectConfig
from perdure.model.progress import NodeBeat, RankAccount


def watch() -> NodeWatch:
    """Nodes 0 and 1 are here, 2 and 3 elsewhere."""
    return NodeWatch(15.0, 60.0, remote_lost_s=0.9, local_nodes=2)


def beat(nodes: NodeWatch, now: float, *numbers: int) -> list[int]:
    for node in numbers:
        sent = NodeBeat(node=node, incarnation="a", seq=1, sent_s=now - 0.001, generation=0)
        nodes.take_beat(now, sent)
    return [lost.node for lost in nodes.find_lost(now)]


def test_a_machine_that_vanishes_is_missed_within_a_second() -> None:
    nodes, lost = watch(), []
    for tick in range(40):
        now = 100.0 + 0.2 * tick
        there = (0, 1, 2, 3) if now < 102.0 else (0, 1, 3)
        if tick == 11:  # A peer of its ranks has failed, because its connection had ended.
            nodes.note_exit(now, lost_peer=True)
        lost += [(node, round(now - 101.8, 1)) for node in beat(nodes, now, *there)]
    assert lost == [(2, 1.0)]
    assert beat(nodes, 110.0, 0, 1, 2, 3) == []


def test_a_machine_that_is_merely_silent_has_the_time_of_every_node() -> None:
    nodes, lost = watch(), []
    for tick in range(100):
        now = 100.0 + 0.2 * tick
        lost += [
            (node, round(now - 100.0)) for node in beat(nodes, now, 0, 1, 3, *[2] * (not tick))
        ]
    assert lost == [(2, 15)]


def test_connections_that_ended_with_a_rank_that_failed_of_itself_accuse_no_node() -> None:
    nodes, lost = watch(), []
    for tick in range(1, 20):
        now = 100.0 + 0.2 * tick
        if tick == 4:
            nodes.note_exit(now, lost_peer=True)
            nodes.note_exit(now, lost_peer=False)
        lost += beat(nodes, now, 0, 1, 3, *[2] * (tick < 3))
    assert lost == []


@pytest.mark.parametrize("step_s", [0.3, 3.0, 8.0])
@pytest.mark.parametrize("gap_s", [1.0, 2.0, 3.0, 10.0])
def test_a_gap_of_heartbeats_loses_no_node_whose_ranks_train_on(
    make_world, step_s: float, gap_s: float
) -> None:
    world = make_world(size=4, nodes=4, remote=4)
    world.run(8 * step_s, duration=lambda rank, step: step_s)
    for node in (1, 3):
        world.mute = {node}
        world.run(gap_s, duration=lambda rank, step: step_s)
        world.mute = set()
        world.run(2 * step_s, duration=lambda rank, step: step_s)
    assert world.of(NodeLost) == []
    assert world.actionable == []


def test_the_excuse_of_a_long_step_lasts_a_step_longer_than_the_limit(make_world) -> None:
    world = make_world(size=2, nodes=2, remote=2, config=DetectConfig(node_lost_s=4.0))
    world.run(40, duration=lambda rank, step: 8.0)
    world.mute = {1}
    world.run(60, duration=lambda rank, step: 8.0)
    assert world.of(NodeLost) == [], "rank 0 gets a collective further every 8 s"
    world.run(30, duration=lambda rank, step: 8.0, hold=lambda rank: rank == 1)
    assert [lost.node for lost in world.of(NodeLost)] == [1]


@pytest.mark.parametrize("step_s", [0.3, 8.0])
def test_a_dead_node_whose_peers_lost_their_connections_is_missed_within_a_second(
    make_world, step_s: float
) -> None:
    world = make_world(size=4, nodes=4, remote=4)
    world.run(6.5 * step_s, duration=lambda rank, step: step_s)
    died_s, world.mute = world.now, {2}
    world.run(0.2, duration=lambda rank, step: step_s, hold=lambda rank: rank == 2)
    error = "RuntimeError: [enforce fail] Connection closed by peer [127.0.0.1]:3"
    record = ExitRecord(rank=1, generation=0, pid=1, at_s=world.now, code=1, error=error)
    world.take(RankExited(node=1, record=record, account=RankAccount(), detected_s=world.now))
    world.run(3, duration=lambda rank, step: step_s, hold=lambda rank: True)
    (lost,) = world.of(NodeLost)
    assert lost.node == 2
    assert lost.at_s - died_s <= 1.4
    assert "connections have ended" in lost.reason


def test_a_local_node_has_time_for_its_agent_to_be_restarted() -> None:
    nodes = watch()
    for tick in range(60):
        there = (0, 1, 2, 3) if tick < 3 else (0, 2, 3)
        assert beat(nodes, 100.0 + 0.2 * tick, *there) == []


def test_a_controller_that_was_busy_misses_nobody() -> None:
    nodes = watch()
    beat(nodes, 100.0, 0, 1, 2, 3)
    for begin in (105.0, 110.0, 111.3):
        assert beat(nodes, begin, 0) == [], "the first of many that had to wait"
        assert beat(nodes, begin + 0.1, 1, 2, 3) == []


def test_it_looks_in_time() -> None:
    nodes = watch()
    beat(nodes, 100.0, 0, 1, 2, 3)
    assert nodes.due_s is not None
    assert nodes.due_s <= 101.0


def test_while_nobody_is_heard_it_may_be_the_controller_that_is_cut_off() -> None:
    nodes = watch()
    beat(nodes, 100.0, 0, 1, 2, 3)
    for now in (100.95, 101.5, 103.0, 106.0):
        assert nodes.find_lost(now) == []
    assert beat(nodes, 106.1, 0, 1) == [], "the others get time to be heard as well"
    assert beat(nodes, 106.2, 2, 3) == []


def test_a_node_whose_platform_says_that_it_has_ended_is_missed_sooner() -> None:
    nodes, lost = watch(), []
    beat(nodes, 100.0, 0, 1, 2, 3)
    for tick in range(1, 7):
        now = 100.0 + 0.1 * tick
        if tick == 1:
            nodes.note_end(now, 2, "OOMKilled")
            nodes.note_end(now, 3, "an earlier pod in its place was OOMKilled")
        lost += [
            (node, round(now - 100.0, 1)) for node in beat(nodes, now, 0, 1, *[3] * (tick < 3))
        ]
    assert lost == [(2, 0.6)], "and 3 was heard of since"


@pytest.mark.parametrize("back_s", [0.5, 3.0, 3600.0])
def test_a_machine_that_comes_back_with_its_clock_set_back_is_heard(back_s: float) -> None:
    """T4: only the heartbeats of one agent are compared by its clock."""
    nodes, lost = watch(), []
    for tick in range(200):
        now = 100.0 + 0.2 * tick
        beat(nodes, now, 0, 1, 2)
        who, ahead_s = ("before", 0.0) if tick < 20 else ("after", -back_s)
        said = NodeBeat(node=3, incarnation=who, seq=tick, sent_s=now + ahead_s, generation=0)
        assert nodes.take_beat(now, said), "another incarnation's heartbeat is news"
        assert not nodes.take_beat(now, said), "and the same one twice is not"
        lost += nodes.find_lost(now)
    assert lost == []
