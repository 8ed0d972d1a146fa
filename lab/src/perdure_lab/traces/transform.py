"""What may be done to a trace: run faster, scaled to another size, announced, coalesced."""

from msgspec.structs import replace

from perdure_lab.traces.nouns import (
    AvailabilityTrace,
    Builder,
    Change,
    Stay,
    list_changes,
    list_intervals,
)


def speed_up(trace: AvailabilityTrace, factor: float) -> AvailabilityTrace:
    """Return `trace` with all of its times, notice too, divided by `factor`."""

    def shorten(stay: Stay) -> Stay:
        end_s = None if stay.end_s is None else stay.end_s / factor
        return Stay(stay.begin_s / factor, end_s, stay.notice_s / factor)

    nodes = tuple(replace(n, stays=tuple(map(shorten, n.stays))) for n in trace.nodes)
    return replace(trace, nodes=nodes, duration_s=trace.duration_s / factor)


def announce(trace: AvailabilityTrace, notice_s: float) -> AvailabilityTrace:
    """Return `trace` with every departure that has no notice announced `notice_s` before.

    No longer than the node was there.
    """

    def warn(stay: Stay) -> Stay:
        if stay.end_s is None or stay.notice_s > 0:
            return stay
        return replace(stay, notice_s=min(notice_s, stay.end_s - stay.begin_s))

    nodes = tuple(replace(n, stays=tuple(map(warn, n.stays))) for n in trace.nodes)
    return replace(trace, nodes=nodes)


def cut(trace: AvailabilityTrace, end_s: float) -> AvailabilityTrace:
    """Return the beginning of `trace`, up to `end_s`."""
    if end_s >= trace.duration_s:
        return trace

    def shorten(stay: Stay) -> Stay:
        over = stay.end_s is None or stay.end_s >= end_s
        return replace(stay, end_s=None, notice_s=0.0) if over else stay

    kept = ((n, tuple(s for s in n.stays if s.begin_s < end_s)) for n in trace.nodes)
    nodes = tuple(replace(n, stays=tuple(map(shorten, stays))) for n, stays in kept if stays)
    return replace(trace, nodes=nodes, duration_s=end_s)


def delay(trace: AvailabilityTrace, start_s: float) -> AvailabilityTrace:
    """Return `trace` with nodes that come later than at 0 of use only `start_s` after that."""

    def shift(stay: Stay) -> Stay | None:
        begin_s = stay.begin_s + (start_s if stay.begin_s > 0 else 0.0)
        end_s = trace.duration_s if stay.end_s is None else stay.end_s
        if begin_s >= end_s:
            return None
        return replace(stay, begin_s=begin_s, notice_s=min(stay.notice_s, end_s - begin_s))

    moved = ((n, tuple(s for s in map(shift, n.stays) if s)) for n in trace.nodes)
    nodes = tuple(replace(n, stays=stays) for n, stays in moved if stays)
    return replace(trace, nodes=nodes) if start_s else trace


def scale_to(trace: AvailabilityTrace, nodes_max: int) -> AvailabilityTrace:
    """Return `trace` with as many of its nodes as fit, `nodes_max` where it had most.

    At every moment round(n * nodes_max / peak) of its n nodes are kept. Who is kept stays kept
    while that number allows it; else the one that came last is left out.
    """
    intervals = list_intervals(trace)
    peak = max((len(i.living) for i in intervals), default=0)
    if peak <= 0 or peak == nodes_max:
        return trace
    builder, kept = Builder(), dict[str, None]()
    for interval in intervals:
        builder.go_to(interval.begin_s)
        for departure in interval.change.left:
            if departure.node in kept:
                del kept[departure.node]
                builder.remove(departure.node, departure.notice_s)
        target = round(len(interval.living) * nodes_max / peak)
        while len(kept) > target:
            node, _ = kept.popitem()
            builder.remove(node)
        for node in interval.living:
            if len(kept) >= target:
                break
            if node not in kept:
                kept[node] = None
                builder.add(node)
    return builder.finish(trace.name, trace.duration_s, named=trace.named, slots=trace.slots)


def coalesce(trace: AvailabilityTrace, window_s: float) -> AvailabilityTrace:
    """Return `trace` with changes within `window_s` of a first one taken together.

    Of such a burst, who leaves leaves with its first change and who comes comes with its last:
    nobody is counted on while it was not there. Who came and left within it was never there. What
    is there at 0 is no part of a burst.
    """
    changes = list_changes(trace)
    bursts: list[list[Change]] = []
    for change in changes[1:]:
        if bursts and change.at_s <= bursts[-1][0].at_s + window_s:
            bursts[-1].append(change)
        else:
            bursts.append([change])
    builder = Builder()
    for node in changes[0].joined:
        builder.add(node)
    for burst in bursts:
        before, left, here = set(builder.here), dict[str, float](), dict.fromkeys(builder.here)
        for change in burst:
            for departure in change.left:
                here.pop(departure.node, None)
                early_s = change.at_s - burst[0].at_s
                left.setdefault(departure.node, max(0.0, departure.notice_s - early_s))
            here.update(dict.fromkeys(change.joined))
        builder.go_to(burst[0].at_s)
        for node, notice_s in left.items():
            if node in before:
                builder.remove(node, notice_s)
        builder.go_to(burst[-1].at_s)
        for node in here:
            if node not in builder.here:
                builder.add(node)
    return builder.finish(trace.name, trace.duration_s, named=trace.named, slots=trace.slots)
