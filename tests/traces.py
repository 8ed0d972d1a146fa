"""Random traces for property tests: a few nodes that come, leave and come again."""

from hypothesis import strategies as st

from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode


@st.composite
def traces(
    draw: st.DrawFn,
    nodes_max: int = 10,
    notices: tuple[float, ...] = (0.0, 0.0, 5.0, 60.0),
    stays_max: int = 5,
    anchored: bool = False,
) -> AvailabilityTrace:
    """Whole seconds, so that changes meet; at least one node at the beginning; slots differ.

    `anchored`: the first never leaves.
    """
    nodes = []
    for number in range(draw(st.integers(1, nodes_max))):
        times = sorted(draw(st.sets(st.integers(1, 2000), max_size=stays_max)))
        if number == 0 and anchored:
            times = [0]
        elif number == 0 or draw(st.booleans()):
            times = [0, *times]
        stays = []
        for index in range(0, len(times), 2):
            end_s = float(times[index + 1]) if index + 1 < len(times) else None
            notice_s = draw(st.sampled_from(notices)) if end_s is not None else 0.0
            stays.append(Stay(float(times[index]), end_s, notice_s))
        if stays:
            slots = draw(st.sampled_from((1, 1, 8)))
            nodes.append(TraceNode(f"n{number}", tuple(stays), slots))
    return AvailabilityTrace("random", 2400.0, tuple(nodes))
