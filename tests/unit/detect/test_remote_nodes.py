"""T4: a node from elsewhere is missed within a second where its peers' connections ended as well.

A second without heartbeats alone says nothing: its ranks train on, one sign of them a step.
"""

import pytest

from perdure.detect.nodes import NodeWatch
from perdure.model.events import NodeLost, RankExited, WorldBroken, WorldReformed
from perdure.model.failures import ExitRecord
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import NodeBeat, RankAccount


def watch() -> NodeWatch:
    """Nodes 0 and 1 are here, 2 and 3 elsewhere."""
    return NodeWatch(15.0, 60.0, local_nodes=2)


def beat(nodes: NodeWatch, now: float, *numbers: int) -> list[int]:
    for node in numbers:
        sent = NodeBeat(node=node, incarnation="a", seq=1, sent_s=now - 0.001, generation=0)
        nodes.take_beat(now, sent)
    return [lost.node for lost in nodes.detect_lost(now)]


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
        assert nodes.detect_lost(now) == []
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
        lost += nodes.detect_lost(now)
    assert lost == []


CLOSED = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]:31337"


def train_elastic(make_world, nodes: int = 4):
    world = make_world(size=nodes, nodes=nodes, remote=nodes - 1)
    world.run(3)
    return world


def break_world(world, *ranks: int, epoch: int = 0, error: str = CLOSED) -> None:
    for rank in ranks:
        event = dict(generation=0, epoch=epoch, rank=rank, at_s=world.now, error=error)
        world.take(WorldBroken(**event))


def end_rank(world, rank: int, **how) -> None:
    record = ExitRecord(rank=rank, generation=0, pid=100 + rank, at_s=world.now, **how)
    exited = RankExited(node=rank, record=record, account=RankAccount(), detected_s=world.now)
    world.take(exited)


def reform(world, *ranks: int, epoch: int) -> None:
    for rank in ranks:
        world.take(
            WorldReformed(
                generation=0, epoch=epoch, rank=rank, step=9, began_s=world.now,
                ordered_s=world.now, formed_s=world.now,
            )
        )  # fmt: skip


def stand(world, seconds: float) -> list[int]:
    """Nobody computes; return who was lost."""
    world.run(seconds, hold=lambda rank: True)
    return [lost.node for lost in world.of(NodeLost)]


@pytest.mark.parametrize(
    "how", [{"signal": 9}, {"signal": 9, "asked": True}, {"code": 1, "error": "ValueError: x"}, {}]
)
@pytest.mark.parametrize("first", ["exit", "breaks"])
def test_a_gap_while_an_elastic_world_breaks_for_anothers_end_loses_no_node(
    make_world, how: dict, first: str
) -> None:
    """T4: the end of rank 2 explains why connections ended; node 1 is healthy, and mute."""
    world = train_elastic(make_world)
    world.mute = {1}
    if first == "breaks":
        break_world(world, 0, 3)
    end_rank(world, 2, **how)
    break_world(world, 0, 3)
    assert stand(world, 4.0) == []
    world.mute = set()
    break_world(world, 1)
    world.mute = {3}
    assert stand(world, 4.0) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_gap_while_a_world_breaks_without_a_connection_that_ended_loses_no_node(
    make_world, node: int
) -> None:
    """T4: neither a node from elsewhere nor one of the job's own machine."""
    world = train_elastic(make_world)
    world.mute = {node}
    break_world(world, 2, 3, error="Timed out waiting 30000ms for recv operation to complete")
    assert stand(world, 4.0) == []


def test_a_node_that_was_heard_after_the_world_broke_has_its_time(make_world) -> None:
    """T4: it cannot be the one whose connections ended."""
    world = train_elastic(make_world)
    break_world(world, 0, 2, 3)
    stand(world, 0.6)
    world.mute = {1}
    assert stand(world, 4.0) == []


@pytest.mark.parametrize("refused", [False, True])
def test_a_machine_that_vanishes_with_its_connections_is_missed_as_soon_as_ever(
    make_world, refused: bool
) -> None:
    """T4: its peers' connections ended, and nobody's end explains it."""
    world = train_elastic(make_world)
    died_s, world.mute = world.now, {2}
    error = "the store is gone: connect: Connection refused" if refused else CLOSED
    break_world(world, 0, 1, 3, error=error)
    assert stand(world, 3.0) == [2]
    assert world.of(NodeLost)[0].at_s - died_s <= 1.4


def test_what_explained_one_break_does_not_explain_the_next(make_world) -> None:
    """T4: one rank ends, and while the others form anew a machine vanishes."""
    world = train_elastic(make_world)
    end_rank(world, 3, signal=9)
    break_world(world, 0, 1, 2)
    world.mute = {2}
    assert stand(world, 0.2) == []
    break_world(world, 0, 1, epoch=1)
    assert stand(world, 2.0) == [2]


def test_words_about_a_break_that_is_over_accuse_nobody(make_world) -> None:
    """T4: what a node that was mute has to tell arrives late."""
    world = train_elastic(make_world)
    end_rank(world, 3, signal=9)
    break_world(world, 0)
    reform(world, 0, 1, 2, epoch=1)
    world.mute = {2}
    break_world(world, 1)
    assert stand(world, 4.0) == []
