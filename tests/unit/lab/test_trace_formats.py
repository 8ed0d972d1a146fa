"""Every format of traces: recognised, read, written; and where a malformed one is wrong."""

import pytest
from hypothesis import given
from tests.traces import traces

from perdure.model.errors import ConfigError
from perdure_lab.traces import (
    FORMATS,
    AvailabilityTrace,
    Stay,
    TraceNode,
    find_format,
    list_changes,
    list_intervals,
    read_trace,
)
from perdure_lab.traces.formats import DAY_S, add_quiet

EVENTS = "0,add,a\r\n0,add,b\n60000,remove,b\r\n90000,add,c\r\n"
PARCAE = (
    '# hh\n[0, "add", {"nodes": ["a", "b"], "duration": 60000, "plan": [1, 2]}]\n'
    '[60000, "remove", {"nodes": ["b"], "duration": 30000}]\n'
    '[90000, "migration", {"nodes": [], "duration": 60000}]\n'
)
SAILOR = '[\n  {"Time": 0, "GPUs": 4},\n\n  {"Time": 63, "GPUs": 4},\n  {"Time": 126, "GPUs": 2}\n]'
SKYPILOT = '{"metadata": {"gap_seconds": 300, "zone": "z"}, "data": [2, 2, 0, 1]}'
POLLS = "2021-12-11, 23:59:30, 5\n2021-12-12, 00:00:30, 4\n2021-12-12, 00:01:30, 4\n"
FAULTS = """[
 {"node_id": "x", "event_time": 1.0, "event_type": "fault_start", "fault_type": {"Level": "L"}},
 {"node_id": "y", "event_time": 2.0, "event_type": "fault_start"},
 {"node_id": "x", "event_time": 2.5, "event_type": "fault_start"},
 {"node_id": "x", "event_time": 3.0, "event_type": "fault_end"},
 {"node_id": "x", "event_time": 4.0, "event_type": "fault_end"},
 {"node_id": "y", "event_time": 5.0, "event_type": "fault_end"}
]"""


def counts(trace: AvailabilityTrace) -> list[tuple[float, int]]:
    return [(i.begin_s, len(i.living)) for i in list_intervals(trace)]


@pytest.mark.parametrize(
    ("text", "expected", "duration_s"),
    [
        (EVENTS, [(0, 2), (60, 1), (90, 2)], 150),  # gaps of 60 and 30: the upper median
        (PARCAE, [(0, 2), (60, 1)], 150),
        (SAILOR, [(0, 4), (126, 2)], 189),
        (SKYPILOT, [(0, 2), (600, 0), (900, 1)], 1200),
        (POLLS, [(0, 5), (60, 4)], 180),
        (FAULTS, [(0, 2), (DAY_S, 1), (2 * DAY_S, 0), (4 * DAY_S, 1), (5 * DAY_S, 2)], 6 * DAY_S),
    ],
    ids=["events", "parcae", "sailor", "skypilot", "polls", "faults"],
)
def test_formats_are_recognised(
    text: str, expected: list[tuple[float, int]], duration_s: float
) -> None:
    trace = read_trace(text, "t")
    assert counts(trace) == expected
    assert trace.duration_s == duration_s  # the last entry lasts: it does not end the trace


def test_names_are_kept_and_made_up_ones_are_told_apart() -> None:
    changes = list_changes(read_trace(EVENTS, "t"))
    assert [(c.at_s, [d.node for d in c.left], c.joined) for c in changes] == [
        (0.0, [], ("a", "b")),
        (60.0, ["b"], ()),
        (90.0, [], ("c",)),
    ]
    assert read_trace(EVENTS, "t").named
    assert not read_trace(SAILOR, "t").named


def test_quiet_nodes_join_a_trace_of_faults() -> None:
    trace = add_quiet(read_trace(FAULTS, "t"), 5)
    assert counts(trace)[0] == (0.0, 5)
    assert min(n for _, n in counts(trace)) == 3


def whole() -> AvailabilityTrace:
    nodes = (
        TraceNode("a", (Stay(0.0, 60.0, 30.0), Stay(120.0)), slots=8),
        TraceNode("b", (Stay(0.0),)),
        TraceNode("c", (Stay(60.0, 180.0),)),
    )
    return AvailabilityTrace("whole", 240.0, nodes)


def test_the_native_format_keeps_everything() -> None:
    assert read_trace(find_format("perdure").write(whole(), 60.0), "other") == whole()


@given(traces())
def test_random_traces_come_back_as_they_were(trace: AvailabilityTrace) -> None:
    assert read_trace(find_format("perdure").write(trace, 60.0), "t") == trace
    for name in ("events", "parcae"):
        again = read_trace(find_format(name).write(trace, 60.0), "t", duration_s=2400.0)
        assert [(i.begin_s, set(i.living)) for i in list_intervals(again)] == [
            (i.begin_s, set(i.living)) for i in list_intervals(trace)
        ]


@pytest.mark.parametrize("format_", FORMATS, ids=lambda f: f.name)
def test_every_format_is_written_as_it_is_read(format_: object) -> None:
    name = format_.name  # type: ignore[attr-defined]
    trace = read_trace(find_format(name).write(whole(), 60.0), "w")
    if name == "faults":  # b never failed, and such a record does not know it
        trace = add_quiet(trace, 3)
    if name in ("sailor", "skypilot", "polls"):  # at 60 and 120 s one comes as another leaves
        assert counts(trace)[:2] == [(0.0, 2), (120.0, 3)]
    else:
        assert counts(trace) == counts(whole())


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("0,add,a\n60000,remove,b\n", "2:14", "a node that is there, got b"),
        ("0,add,a\n0,add,a\n", "2:7", "not there yet"),
        ("0,add,a\n60000,drop,a\n", "2:7", "add or remove, got 'drop'"),
        ("0,add,a\nsoon,add,b\n", "2:1", "milliseconds, got 'soon'"),
        ("60000,add,a\n0,add,b\n", "2:1", "not before the 60 s above"),
        ("0,add,a\nnan,add,b\n", "2:1", "time from 0 on"),
        ("0,add,a\n1,2\n", "2:1", "t_ms,add|remove,node"),
        ("0,add,\n", "1:7", "a node's name"),
        ('[0, "add", {"nodes": ["a"], "duration": 1}]\n[1, "add", {"nodes": ["a"]}]', "2:12",
         "missing required field `duration`"),
        ('[0, "add", {"nodes": ["a"], "duration": 1}]\n[5, "vanish", {}]', "2:5", "vanish"),
        ('[0, "remove", {"nodes": ["a"], "duration": 1}]', "1:26", "there, got a"),
        ('[0, "add"', "1:1", "one JSON array on the line"),
        ('[{"Time": 0, "GPUs": 4},\n {"Time": 1, "GPUs": "x"}]', "2:22", "got `str`"),
        ('[{"Time": 0, "GPUs": 4},\n {"Time": 1}]', "2:2", "missing required field `GPUs`"),
        ('[{"Time": 9, "GPUs": 4},\n {"Time": 1, "GPUs": 4}]', "2:11", "not before the 9 s"),
        ('[{"Time": 0, "GPUs": -4}]', "1:22", ">= 0"),
        ('[{"Time": 0, "GPUs": 4},\n {"Time": 1, "GPUs" 4}]', "2:21", "expected JSON"),
        ('[{"Time": 0, "GPUs": 4},\n', "1:25", "expected JSON"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "1:30", "> 0"),
        ('{"metadata": {"gap_seconds": 9}, "data": [1, 2.5]}', "1:46", "got `float`"),
        ('{"metadata": {"gap_seconds": 1e308}, "data": [1, 2, 3]}', "1:30", "an end, got 3 such"),
        ("2021-12-11, 11:11:30, 5\n2021-12-11, 11:11, 5\n", "2:1", "HH:MM:SS"),
        ("2021-12-11, 11:11:30, 5\n2021-12-11, 11:12:30, many\n", "2:22", "number of nodes"),
        ("2021-12-11, 11:11:30, 5\n2021-12-11, 10:10:30, 5\n", "2:1", "not long before"),
        ('[{"node_id": "x", "event_time": 1, "event_type": "fault_end"}]', "1:50",
         "a fault that has started"),
        ('{"perdure_trace": 2, "name": "n", "duration_s": 1, "nodes": []}', "1:19", "version 1"),
        ('{"perdure_trace": 1, "name": "n", "duration_s": 9, "nodes": [\n{"name": "a", "stays": '
         '[{"begin_s": 4, "end_s": 2}]}]}', "2:49", "a time after 4 s"),
        ("hello\n", "1:1", "t_ms,add|remove,node (events)"),
        ("", "1:1", "got ''"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(text: str, place: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(text, "file.txt")
    assert caught.value.message.startswith(f"file.txt:{place}: ")
    assert expected in caught.value.message
    assert caught.value.exit_code == 2


def test_one_instant_has_no_length_unless_it_is_given() -> None:
    with pytest.raises(ConfigError, match="no end"):
        read_trace("0,add,a\n", "t")
    assert read_trace("0,add,a\n", "t", duration_s=60.0).duration_s == 60.0


def test_polls_of_several_pollers_are_sorted_and_told() -> None:
    lines = [
        "2023-01-01, 00:00:30, 4",
        "2023-01-01, 00:00:00, 5",  # Earlier than the first line.
        "2023-01-01, 00:02:00, 3",
        "2023-01-01, 00:01:30, 2",
        "2023-01-01, 00:05:00, 4",
    ]
    told: list[str] = []
    mixed = read_trace("\n".join(lines), "t", tell=told.append)
    assert told == ["t: 2 lines were not in the order of time, and sorted: 2, 4"]
    assert mixed == read_trace("\n".join(sorted(lines)), "t")
