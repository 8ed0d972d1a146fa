"""Plays a trace against one system in real time, and reads what it has committed.

First it becomes a schedule: which place is emptied, filled, or told of its end. A place is room for
one machine, numbered from 0. A node that comes takes the place that has been empty for longest, so
that what its predecessor has left there is over.
"""

import bisect
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from perdure.model.events import JournalEntry, WorldReformed
from perdure.model.report import Recovery
from perdure.telemetry.accounting.ledger import make_report
from perdure_lab.live.ledger import Run, join_steps
from perdure_lab.live.systems import System
from perdure_lab.report import FormedShape, MadeStep
from perdure_lab.traces import AvailabilityTrace, list_changes, list_intervals

_ORDER = ("leave", "come", "notice")
"""At one instant."""


class Act(NamedTuple):
    """Done to `places` together."""

    at_s: float
    kind: Literal["notice", "leave", "come"]
    places: tuple[int, ...]
    notice_s: float = 0.0
    """Of a notice: how long until they leave."""


class Schedule(NamedTuple):
    """All of a trace, by places."""

    first: tuple[int, ...]
    """Places that are taken at 0."""
    acts: tuple[Act, ...]
    """In order of time; those of one instant as in `_ORDER`."""


def plan_schedule(trace: AvailabilityTrace) -> Schedule:
    """Return what a replay of `trace` does; places are as many as it ever has nodes at once."""
    changes = list_changes(trace)
    size = max(len(interval.living) for interval in list_intervals(trace))
    places: dict[str, int] = {}
    empty_since_s = dict.fromkeys(range(size), -1.0)
    first: tuple[int, ...] = ()
    acts: list[Act] = []
    for change in changes:
        notices: dict[float, list[int]] = {}
        gone: list[int] = []
        for departure in change.left:
            place = places.pop(departure.node)
            gone.append(place)
            empty_since_s[place] = change.at_s
            if departure.notice_s > 0:
                notices.setdefault(departure.notice_s, []).append(place)
        for notice_s, told in notices.items():
            at_s = max(0.0, change.at_s - notice_s)
            acts.append(Act(at_s, "notice", tuple(sorted(told)), change.at_s - at_s))
        if gone:
            acts.append(Act(change.at_s, "leave", tuple(sorted(gone))))
        for node in change.joined:
            place = min(empty_since_s, key=lambda p: (empty_since_s[p], p))
            del empty_since_s[place]
            places[node] = place
        new = tuple(sorted(places[node] for node in change.joined))
        if change.at_s == 0:
            first = new
        elif new:
            acts.append(Act(change.at_s, "come", new))
    acts.sort(key=lambda act: (act.at_s, _ORDER.index(act.kind)))
    return Schedule(first, tuple(acts))


_POLL_S = 0.2
_READY_S = 180.0

Progress = Callable[[float, int, int], None]
"""Seconds played, nodes there, and the nodes of the newest step."""


@dataclass(slots=True)
class Played:
    """The result of one system's replay."""

    run: Run
    complete: bool
    load: float
    recoveries: list[Recovery] = field(default_factory=list)
    shapes: tuple[FormedShape, ...] = ()
    over: bool = False
    """The system ended by itself, before the trace did."""
    begun_s: float = 0.0
    """Seconds of CLOCK_MONOTONIC."""


def wait_ready(system: System, places: Sequence[int]) -> None:
    """Wait until `places` have made five steps together."""
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        system.check()
        steps = join_steps(system.trail.poll()[-200:])[-6:-1]
        if len(steps) == 5 and all(set(step.places) == set(places) for step in steps):
            return
        time.sleep(_POLL_S)


def play(
    system: System,
    schedule: Schedule,
    duration_s: float,
    rates: dict[int, float],
    progress: Progress,
) -> Played:
    """Carry out `schedule` from now on; Ctrl-C ends it with what was measured so far.

    Raises:
        PlatformError: the system has ended by itself.
    """
    begun_s, complete = time.monotonic(), True
    told: list[tuple[int, float, float]] = []
    here, acts = set(schedule.first), list(schedule.acts)
    done_s: list[tuple[float, frozenset[int]]] = [(0.0, frozenset(here))]
    try:
        while (now_s := time.monotonic() - begun_s) < duration_s and not system.over():
            while acts and acts[0].at_s <= now_s:
                act = acts.pop(0)
                at_s = time.monotonic() - begun_s
                if act.kind == "notice":
                    told += [(place, at_s, at_s + act.notice_s) for place in act.places]
                    system.warn(act.places, act.notice_s)
                    continue
                change = here.difference_update if act.kind == "leave" else here.update
                change(act.places)
                (system.kill if act.kind == "leave" else system.add)(act.places)
                done_s.append((at_s, frozenset(here)))
            system.check()
            rows = system.trail.poll()
            progress(now_s, len(here), len(rows[-1].places) if rows else 0)
            next_s = acts[0].at_s if acts else duration_s
            time.sleep(max(0.0, min(_POLL_S, begun_s + next_s - time.monotonic())))
    except KeyboardInterrupt:
        complete = False
    over = system.over()
    complete = complete and not over
    end_s = min(duration_s, time.monotonic() - begun_s)
    steps = select_steps(system.trail.poll(), begun_s, end_s)
    load = os.getloadavg()[0]
    system.end()
    entries, offset_s = system.read_told()
    if not entries:
        run = Run(steps, done_s, end_s, rates, told)
        return Played(run, complete, load, over=over, begun_s=begun_s)
    zero_s = begun_s + offset_s
    recoveries = read_recoveries(entries, zero_s, end_s)
    run = Run(steps, done_s, end_s, rates, told, recoveries)
    shapes = read_formed_shapes(entries, zero_s, end_s)
    return Played(run, complete, load, recoveries, shapes, over, begun_s)


def select_steps(rows: Sequence[MadeStep], begun_s: float, end_s: float) -> list[MadeStep]:
    """Return the commits of the replay, times as its seconds, the last one before it among them."""
    steps = [
        MadeStep(step.at_s - begun_s, step.step, step.samples, step.places)
        for step in join_steps(rows)
    ]
    first = max(0, bisect.bisect_right([step.at_s for step in steps], 0.0) - 1)
    return [step for step in steps[first:] if step.at_s <= end_s]


def read_formed_shapes(
    entries: Sequence[JournalEntry], zero_s: float, end_s: float
) -> tuple[FormedShape, ...]:
    """Return the shapes of a pipelined world that differ from the one before; the first at 0."""
    formed: dict[tuple[int, int], FormedShape] = {}
    for entry in entries:
        event = entry.body
        if isinstance(event, WorldReformed) and event.shape:
            number = (event.generation, event.epoch)
            known = formed.get(number, FormedShape(-math.inf, event.shape, False))
            at_s = max(known.at_s, event.formed_s - zero_s)
            formed[number] = FormedShape(at_s, event.shape, known.morphed or event.morphed)
    shapes: list[FormedShape] = []
    for _, one in sorted(formed.items()):
        if one.at_s <= 0.0:
            shapes = [FormedShape(0.0, one.shape, False)]
        elif one.at_s <= end_s and (one.morphed or one.shape not in [s.shape for s in shapes[-1:]]):
            shapes.append(one)
    return tuple(shapes)


def read_recoveries(entries: Sequence[JournalEntry], zero_s: float, end_s: float) -> list[Recovery]:
    """Return what the job itself has stamped, in seconds of the replay."""
    moved = [
        msgspec.structs.replace(recovery, at_s=recovery.at_s - zero_s)
        for recovery in make_report(entries, zero_s + end_s).recoveries
    ]
    return [recovery for recovery in moved if 0.0 <= recovery.at_s <= end_s]
