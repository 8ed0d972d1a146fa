"""A trace played against a user's own job: its nodes are really taken away, and given back.

Where they are is the fleet's business (`fleets`). The job begins with all its nodes, which is when
it is timed; then those that the trace does not have at 0 are taken, and the trace begins. What it
could have made is told by its own pace: of so many nodes as were seen to train undisturbed for long
enough, and in proportion to the nearest of these elsewhere.
"""

import bisect
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from perdure.drill.here import sweep
from perdure.model.errors import ConfigError, PlatformError, SafetyError
from perdure.model.events import (
    GenerationStepping,
    JobEnded,
    JournalEntry,
    RankJoined,
    RanksStarted,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.service.processes import guarded
from perdure_lab.live.fleets.fleet import Fleet, Node
from perdure_lab.live.ledger import Run, average_rates, count_moves, cut_ledger
from perdure_lab.live.live import Played, Schedule, plan_schedule, play
from perdure_lab.live.session import Say, Wish, check_trace, compare_with
from perdure_lab.live.systems import Driven
from perdure_lab.policies.throughput import Shape, Throughput
from perdure_lab.report import DriveResult, MadeStep, MeasuredCosts, Phases
from perdure_lab.traces import AvailabilityTrace, list_intervals

_LOOK_S = 0.2
_CALM_S = 60.0
_ENOUGH_S, _ENOUGH = 10.0, 6
"""While nobody comes or goes, so long, and so many steps, tell how fast so many nodes are."""
_UNHEARD = "nothing more was heard of the job"
_TIMES, _STEADY = 5, 1.1
"""It is timed so often at most, and until it is no faster than that times as fast as before."""


class DriveWish(NamedTuple):
    """A request: by which trace a job is driven, and how."""

    trace: AvailabilityTrace
    home: str
    speed: float
    notice_s: float
    seed: int | None
    start_s: float
    """How long the job may take until it trains."""
    stop: bool = True
    """Stop it at the end; else it goes on with all its nodes."""


def check_drive(wish: DriveWish, spec: JobSpec, nodes: Sequence[Node]) -> Schedule:
    """Return what will be done to the job's nodes.

    Raises:
        ConfigError: the job has none that could be taken.
        SafetyError: the trace has no node at some time, more than the job, or takes one that stays.
    """
    if spec.groups:
        raise ConfigError("replica groups of torchft are not driven", hint="perdure trace replay")
    if len(nodes) < 2:
        raise ConfigError("the job has one node, and none to lose", hint="nodes = N in its file")
    check_trace(wish.trace, len(nodes))
    return assign_nodes(plan_schedule(wish.trace), nodes)


def assign_nodes(schedule: Schedule, nodes: Sequence[Node]) -> Schedule:
    """Return `schedule` for these nodes: places that are filled throughout for those that stay.

    Raises:
        SafetyError: a node that cannot be taken would have to be.
    """
    emptied = {place for act in schedule.acts if act.kind == "leave" for place in act.places}
    filled = [place for place in schedule.first if place not in emptied]
    staying = [node for node in nodes if node.stays]
    free = [node.number for node in nodes if not node.stays]
    if len(filled) < len(staying):
        node, able = staying[len(filled)], ", ".join(map(str, free)) or "none"
        raise SafetyError(
            f"node {node.number} ({node.machine}) cannot be taken: {node.stays}; nodes that may "
            f"be driven: {able}",
            hint="--keep leaves it out of the trace, which is then played on the others",
        )
    chosen = dict(zip(filled, (node.number for node in staying), strict=False))
    places = {*schedule.first, *(place for act in schedule.acts for place in act.places)}
    rest = [place for place in sorted(places) if place not in chosen]
    chosen |= dict(zip(rest, free, strict=False))
    return Schedule(
        tuple(sorted(chosen[place] for place in schedule.first)),
        tuple(
            act._replace(places=tuple(sorted(chosen[place] for place in act.places)))
            for act in schedule.acts
        ),
    )


def compute_enough(trace: AvailabilityTrace, needed: int) -> float:
    """Return for which share of its time a trace has so many nodes."""
    there_s = [(i.end_s - i.begin_s) for i in list_intervals(trace) if len(i.living) >= needed]
    return sum(there_s) / trace.duration_s


def tell_enough(trace: AvailabilityTrace, spec: JobSpec) -> str:
    """Return what a world of a fixed size makes of a trace; empty where it always has enough."""
    share, first = compute_enough(trace, spec.nodes), len(list_intervals(trace)[0].living)
    if share >= 1.0:
        return ""
    begins = f", and begins with {first}" if first < spec.nodes else ""
    return (
        f"a world of a fixed size trains only while {spec.nodes} nodes are there: {share:.1%} of "
        f"this trace{begins}"
    )


def drive(wish: DriveWish, fleet: Fleet, say: Say) -> DriveResult:
    """Have the job run, play the trace against it, and compare with what was possible.

    Ctrl-C, or the job's own end, ends the play with what was measured so far.

    Raises:
        ConfigError, SafetyError: as `check_drive`; a fixed world never has enough nodes.
        PlatformError: the job did not come to train, or made too few steps to be timed.
    """
    schedule, spec = check_drive(wish, fleet.spec, fleet.list_nodes()), fleet.spec
    end_s = wish.trace.duration_s

    def progress(now_s: float, nodes: int, members: int) -> None:
        say("drive", now_s / end_s, f"{now_s:.0f} of {end_s:.0f} s, {nodes} nodes, {members} train")

    def ending() -> None:
        say("stop" if wish.stop else "leave", 1.0, f"{spec.name}; Ctrl-C ends it at once")

    system, begun_s = Driven(fleet, stop=wish.stop, ending=ending), time.monotonic()
    try:
        say("start", 0.0, f"{spec.name}, {spec.first_nodes} nodes")
        system.start(schedule.first)
        _wait_steps(system, 1, wish.start_s)
        if not system.trail.poll():
            what = "has ended" if system.over() else f"made no step within {wish.start_s:g} s"
            raise PlatformError(f"job {system.job} {what}", hint=_explain(system.job))
        started_s = time.monotonic() - begun_s
        _check_enough(system, wish.trace, spec, say)
        say("time it", 0.0, f"{spec.nodes} nodes")
        rate = _time_steadily(system, spec.nodes, wish.start_s)
        away = [n.number for n in fleet.list_nodes() if n.number not in schedule.first]
        system.kill(away)
        if away and system.goes_on():  # Any other waits for its nodes.
            say("settle", 0.0, f"{len(schedule.first)} nodes")
            _wait_steps(system, 3, _CALM_S)
        if system.trouble is not None:
            raise system.trouble
        if system.over():
            raise PlatformError(
                f"job {system.job} ended before the trace began", hint=_explain(system.job)
            )
        fixed = not system.goes_on()
        played = play(system, schedule, end_s, {}, progress)
    finally:
        system.end()
    return _tell(wish, played, {spec.nodes: rate}, system, started_s if fixed else -1.0)


@contextmanager
def make_folder(home: str) -> Iterator[Path]:
    """Give a folder for what a drive of a job of this machine leaves; the job ends with us."""
    folders = Path(home, "replay")
    folders.mkdir(parents=True, exist_ok=True)
    sweep(folders, f"drive-{platform.node()}-")
    with (
        guarded("PERDURE_REPLAY"),
        tempfile.TemporaryDirectory(
            prefix=f"drive-{platform.node()}-{os.getpid()}-", dir=folders
        ) as folder,
    ):
        yield Path(folder)


def _check_enough(system: Driven, trace: AvailabilityTrace, spec: JobSpec, say: Say) -> None:
    """Say what a world of a fixed size has of the trace.

    Raises:
        SafetyError: it never has enough nodes to train.
    """
    told = "" if system.goes_on() else tell_enough(trace, spec)
    if told and compute_enough(trace, spec.nodes) == 0.0:
        raise SafetyError(
            f"job {system.job} would train at no time: {told}",
            hint="another trace, fewer `nodes`, or perdure.elastic, which trains on with fewer",
        )
    if told:
        say("note", 0.0, told)


def _time_steadily(system: Driven, nodes: int, at_most_s: float) -> float:
    """Return steps a second once they grow no faster: the first ones load, compile and warm up.

    Raises:
        PlatformError: too few steps were made in time, or the job has ended.
    """
    rate, deadline = 0.0, time.monotonic() + at_most_s
    for _ in range(_TIMES):
        begun_s, before = time.monotonic(), rate
        rows: Sequence[MadeStep] = ()
        while len(rows) <= _ENOUGH or rows[-1].at_s - rows[0].at_s < _ENOUGH_S:
            if system.over() or time.monotonic() > deadline:
                what = "has ended" if system.over() else f"took {at_most_s:g} s and more"
                raise PlatformError(
                    f"job {system.job} {what} before it had made {_ENOUGH} steps on {nodes} nodes "
                    f"that it could be timed by",
                    hint="more steps, or a longer --start",
                )
            time.sleep(_LOOK_S)
            rows = [row for row in system.trail.poll() if row.at_s >= begun_s]
        rate = (len(rows) - 1) / (rows[-1].at_s - rows[0].at_s)
        if rate < _STEADY * before:
            break
    return rate


def _wait_steps(system: Driven, count: int, at_most_s: float) -> None:
    """Wait until the job has made so many steps more; it may have ended, or not be able to."""
    wanted, deadline = len(system.trail.poll()) + count, time.monotonic() + at_most_s
    while time.monotonic() < deadline and not system.over():
        if len(system.trail.poll()) >= wanted:
            return
        time.sleep(_LOOK_S)


def _explain(job: str) -> str:
    return (
        f"`perdure logs {job}`, `perdure diagnose {job}`; a script whose steps are not seen cannot "
        "be driven: perdure.init() and run.steps() show them"
    )


def read_worlds(
    entries: Sequence[JournalEntry], zero_s: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Return (seconds, nodes that trained from then on), in order.

    A world that is formed again tells of each member; any other has all ranks of its generation.
    """
    worlds: dict[tuple[int, int], tuple[float, frozenset[int]]] = {}
    homes: dict[int, dict[int, int]] = {}
    for entry in entries:
        match entry.body:
            case RanksStarted() as event:
                nodes = homes.setdefault(event.generation, {})
                nodes |= dict.fromkeys(event.pids, event.node)
            case GenerationStepping() as event:
                all_nodes = frozenset(homes.get(event.generation, {}).values())
                worlds.setdefault((event.generation, -1), (event.at_s, all_nodes))
            case WorldReformed(finished=False) as event:
                key = (event.generation, event.epoch)
                formed_s, there = worlds.get(key, (0.0, frozenset[int]()))
                node = homes.get(event.generation, {}).get(event.rank, event.rank)
                worlds[key] = (max(formed_s, event.formed_s), there | {node})
    formed = {generation for generation, epoch in worlds if epoch >= 0}
    return sorted(
        (at_s - zero_s, tuple(sorted(there)))
        for (generation, epoch), (at_s, there) in worlds.items()
        if epoch >= 0 or generation not in formed
    )


def place_steps(
    steps: Sequence[MadeStep], worlds: Sequence[tuple[float, tuple[int, ...]]]
) -> list[MadeStep]:
    """Return `steps` with the nodes that made them: those of the newest world of their time."""
    begins = [at_s for at_s, _ in worlds]
    numbers = (bisect.bisect_right(begins, step.at_s) - 1 for step in steps)
    return [
        msgspec.structs.replace(step, places=worlds[number][1]) if number >= 0 else step
        for step, number in zip(steps, numbers, strict=True)
    ]


def _scale(known: Mapping[int, float], spec: JobSpec) -> dict[int, float]:
    """Return steps a second by number of nodes, in proportion to the nearest that is known.

    Spare nodes are no faster: the job does not train on more than its own number.
    """
    rates = {}
    for nodes in range(1, spec.first_nodes + 1):
        used = min(nodes, spec.nodes)
        nearest = min(known, key=lambda m: (abs(m - used), -m))
        rates[nodes] = known[nearest] * used / nearest
    return rates


def measure_restarts(run: Run, needed: int, started_s: float) -> tuple[float, int]:
    """Return what a change costs a world of a fixed size, median seconds; and of how many.

    It waits until enough nodes are there again, and trains once all ranks have started: what that
    takes beyond a step. Where the play ended before, it takes that long at least. Where none came
    back, it is what the job's own start took.
    """
    times = []
    for (_, before), (at_s, after) in pairwise(run.present):
        lost = len(before) >= needed and before - after
        if len(after) < needed or not (lost or len(before) < needed):
            continue
        later = (s.at_s for s in run.steps if s.at_s > at_s)
        times.append(max(0.0, next(later, run.end_s) - at_s - 1.0 / run.rates[needed]))
    return (median(times), len(times)) if times else (started_s, 0)


def _tell(
    wish: DriveWish,
    played: Played,
    timed: Mapping[int, float],
    system: Driven,
    started_s: float = -1.0,
) -> DriveResult:
    """Return what the job made of the trace, and how it ended where that was before the trace.

    A world of a fixed size took `started_s` to start; of any other that is negative.
    """
    (entries, offset_s), spec = system.read_told(), system.fleet.spec
    zero_s = played.begun_s + offset_s
    played.run.steps = place_steps(played.run.steps, read_worlds(entries, zero_s))
    played.run.rates = timed
    seen = average_rates(played.run, _ENOUGH_S)
    played.run.rates = _scale(seen, spec)
    state_bytes, ended = 0, ""
    for entry in entries:
        match entry.body:
            case RankJoined() as event:
                state_bytes = max(state_bytes, event.state_bytes)
            case JobEnded() as event:
                ended = f"{event.status}: {event.reason}"
    table = Throughput(
        spec.name,
        {Shape(nodes, 1): rate for nodes, rate in played.run.rates.items()},
        global_batch=1.0,
        state_bytes=float(state_bytes),
        source="its own steps",
    )
    asked = Wish(
        wish.trace, ("perdure",), wish.home, 0.0, 1, False, wish.speed, wish.notice_s, wish.seed
    )
    costs = _measure_fixed(played.run, spec, started_s) if started_s >= 0 else None
    result = compare_with(asked, table, {"perdure": played}, costs=costs)
    losses, joins = count_moves(played.run)
    ledger = result.systems[0].ledger  # By its steps alone, where its journal cannot be read.
    if entries:
        begun_s, waits = played.begun_s, system.fleet.list_waits()
        waited = [(node, from_s - begun_s, to_s - begun_s) for node, from_s, to_s in waits]
        ledger = cut_ledger(entries, spec, played.run.present, zero_s, played.run.end_s, waited)
    row = msgspec.structs.replace(result.systems[0], losses=losses, joins=joins, ledger=ledger)
    fields = msgspec.structs.asdict(result) | {"systems": (row,)}
    if costs is not None or (result.costs is not None and result.costs.losses < losses):
        fields |= {"costs": costs, "simulated": None}  # A simulated job trains on with fewer.
    return DriveResult(
        **fields | {"unit": "steps", "reference": spec.name},
        job=spec.name,
        assumed=tuple(n for n in range(1, spec.nodes + 1) if n not in seen),
        ended=ended or _UNHEARD if played.over and system.trouble is None else "",
        fixed=tell_enough(wish.trace, spec) if started_s >= 0 else "",
        trouble=str(system.trouble or ""),
    )


def _measure_fixed(run: Run, spec: JobSpec, started_s: float) -> MeasuredCosts:
    """Return what changes cost a world of a fixed size: each is a start of all of it."""
    cost_s, count = measure_restarts(run, spec.nodes, started_s)
    again = Phases(warmup_s=cost_s)
    losses, joins = count_moves(run)
    source = f"{count} starts of a world of a fixed size" if count else "the job's own start"
    return MeasuredCosts(
        source=source, losses=losses, joins=joins, loss=again, join=again, announced=again
    )
