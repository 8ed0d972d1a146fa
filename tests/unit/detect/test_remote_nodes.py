"""A node from elsewhere is missed within a second; a controller that was busy misses nobody."""

from perdure.detect.nodes import NodeWatch
from perdure.model.progress import NodeBeat


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
        lost += [(node, round(now - 101.8, 1)) for node in beat(nodes, now, *there)]
    assert lost == [(2, 1.0)]
    assert beat(nodes, 110.0, 0, 1, 2, 3) == []


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
