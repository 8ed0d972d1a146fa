"""What may be done to a trace, and what it must not do to it."""

from hypothesis import given
from hypothesis import strategies as st
from tests.traces import traces

from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode, list_intervals, read_trace
from perdure_lab.traces.transform import announce, coalesce, scale_to, speed_up

BURST = "0,add,a\n0,add,b\n10000,remove,a\n12000,add,c\n13000,remove,c\n14000,add,d\n99000,add,e\n"


def living(trace: AvailabilityTrace) -> list[tuple[float, tuple[str, ...]]]:
    return [(i.begin_s, i.living) for i in list_intervals(trace)]


def test_a_burst_becomes_one_departure_and_one_arrival() -> None:
    assert living(coalesce(read_trace(BURST, "t"), 5.0)) == [
        (0.0, ("a", "b")),
        (10.0, ("b",)),
        (14.0, ("b", "d")),  # c came and went within it
        (99.0, ("b", "d", "e")),
    ]


def test_a_notice_is_shorter_by_as_much_as_a_departure_is_earlier() -> None:
    nodes = (TraceNode("a", (Stay(0.0, 10.0),)), TraceNode("b", (Stay(0.0, 14.0, 30.0),)))
    burst = list_intervals(coalesce(AvailabilityTrace("t", 50.0, nodes), 5.0))[1].change
    assert [(d.node, d.notice_s) for d in burst.left] == [("a", 0.0), ("b", 26.0)]


@given(traces(), st.floats(0, 500))
def test_coalescing_counts_on_nobody_who_was_not_there(
    trace: AvailabilityTrace, window_s: float
) -> None:
    there = list_intervals(trace)
    for interval in list_intervals(coalesce(trace, window_s)):
        for old in there:
            if old.begin_s < interval.end_s and interval.begin_s < old.end_s:
                assert set(interval.living) <= set(old.living)


@given(traces(), st.integers(1, 40))
def test_scaling_keeps_the_share_that_is_there(trace: AvailabilityTrace, most: int) -> None:
    counts = [len(i.living) for i in list_intervals(trace)]
    scaled = scale_to(trace, most)
    at = {i.begin_s: len(i.living) for i in list_intervals(scaled)}
    now = 0
    for interval, count in zip(list_intervals(trace), counts, strict=True):
        now = at.get(interval.begin_s, now)
        if most <= max(counts):
            assert now == round(count * most / max(counts))


@given(traces())
def test_ten_times_as_fast_is_a_tenth_of_the_node_seconds(trace: AvailabilityTrace) -> None:
    def node_s(t: AvailabilityTrace) -> float:
        return sum(i.length_s * len(i.living) for i in list_intervals(t))

    fast = speed_up(trace, 10.0)
    assert abs(node_s(fast) * 10.0 - node_s(trace)) <= 1e-9 * node_s(trace)


def test_announcing_leaves_a_notice_that_is_there_alone() -> None:
    nodes = (TraceNode("a", (Stay(0.0, 10.0),)), TraceNode("b", (Stay(0.0, 40.0, 5.0),)))
    told = announce(AvailabilityTrace("t", 50.0, nodes), 30.0)
    assert [node.stays[0].notice_s for node in told.nodes] == [10.0, 5.0]
