"""A trace's nodes become places that are filled and emptied."""

from hypothesis import given
from tests.traces import traces

from perdure_lab.live.live import Act, plan_schedule
from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode, list_intervals


def make(*nodes: tuple[str, tuple[tuple[float, float | None, float], ...]]) -> AvailabilityTrace:
    made = tuple(TraceNode(name, tuple(Stay(*stay) for stay in stays)) for name, stays in nodes)
    return AvailabilityTrace("t", 100.0, made)


def test_entry_0_counts_and_who_comes_takes_the_place_that_was_empty_for_longest() -> None:
    trace = make(
        ("a", ((0.0, 10.0, 0.0),)),
        ("b", ((0.0, 20.0, 0.0),)),
        ("c", ((0.0, None, 0.0),)),
        ("d", ((30.0, None, 0.0),)),
        ("e", ((40.0, None, 0.0),)),
    )
    schedule = plan_schedule(trace)
    assert schedule.first == (0, 1, 2)
    assert schedule.acts == (
        Act(10.0, "leave", (0,)),
        Act(20.0, "leave", (1,)),
        Act(30.0, "come", (0,)),
        Act(40.0, "come", (1,)),
    )


def test_a_notice_comes_as_long_before_as_it_says_and_no_earlier_than_the_node() -> None:
    trace = make(("a", ((0.0, None, 0.0),)), ("b", ((5.0, 20.0, 4.0), (30.0, 40.0, 10.0))))
    acts = plan_schedule(trace).acts
    assert acts == (
        Act(5.0, "come", (1,)),
        Act(16.0, "notice", (1,), 4.0),
        Act(20.0, "leave", (1,)),
        Act(30.0, "come", (1,)),
        Act(30.0, "notice", (1,), 10.0),
        Act(40.0, "leave", (1,)),
    )


@given(traces(nodes_max=8))
def test_at_every_moment_as_many_places_are_taken_as_the_trace_has_nodes(
    trace: AvailabilityTrace,
) -> None:
    intervals = list_intervals(trace)
    schedule = plan_schedule(trace)
    here, acts = set(schedule.first), list(schedule.acts)
    peak = max(len(i.living) for i in intervals)
    for interval in intervals:
        while acts and acts[0].at_s <= interval.begin_s:
            act = acts.pop(0)
            here -= set(act.places) if act.kind == "leave" else set()
            here |= set(act.places) if act.kind == "come" else set()
        assert len(here) == len(interval.living)
        assert here <= set(range(peak))
