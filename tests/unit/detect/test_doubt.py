"""A node that is silent is lost sooner where an elastic world has broken as well."""

from perdure.detect.nodes import DOUBT_S, NodeWatch
from perdure.model.signals.progress import NodeBeat


def beat(watch: NodeWatch, now: float, *nodes: int) -> None:
    for node in nodes:
        watch.take_beat(now, NodeBeat(node, "a", 1, now, 0, ()))


def look(watch: NodeWatch, now: float) -> list[int]:
    return [lost.node for lost in watch.detect_lost(now)]


def listen(watch: NodeWatch, until: float, *nodes: int, since: float = 0.0) -> list[int]:
    """Return who is lost while `nodes` send five heartbeats a second."""
    lost, now = [], since
    while now < until:
        now += 0.2
        beat(watch, now, *nodes)
        lost += look(watch, now)
    return lost


def make(doubted: bool) -> NodeWatch:
    watch = NodeWatch(15.0, 60.0)
    beat(watch, 0.0, 0, 1)
    if doubted:
        watch.doubt(0.1)
    return watch


def test_a_silent_node_of_a_broken_world_is_lost_within_seconds() -> None:
    assert listen(make(True), DOUBT_S + 1.5, 0) == [1]
    assert listen(make(False), DOUBT_S + 1.5, 0) == []


def test_a_node_that_is_heard_again_in_time_is_not_lost() -> None:
    watch = make(True)
    assert listen(watch, DOUBT_S - 0.5, 0) == []
    assert listen(watch, 10.0, 0, 1, since=DOUBT_S - 0.5) == []


def test_a_world_that_is_whole_again_is_no_reason_for_haste() -> None:
    watch = make(True)
    watch.trust()
    assert listen(watch, 10.0, 0) == []


def test_where_nobody_is_heard_the_controller_is_cut_off() -> None:
    watch = make(True)
    assert [look(watch, 0.5 * at) for at in range(16)] == [[]] * 16
