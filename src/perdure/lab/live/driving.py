"""A trace played against a user's own job: its nodes are really killed, and let start again.

The job begins with all its nodes, which is when it is timed; then those that the trace does not
have at 0 are taken, and the trace begins. What it could have made is told by its own pace: of so
many nodes as were seen to train undisturbed for long enough, and in proportion to the nearest of
these elsewhere.
"""

import bisect
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from perdure.lab.live.ledger import average_rates, count_moves, cut_ledger
from perdure.lab.live.live import Played, Schedule, plan_schedule, play
from perdure.lab.live.session import (
    Say,
    Wish,
    check_trace,
    compare_with,
)
from perdure.lab.live.systems import Driven
from perdure.lab.policies.throughput import Shape, Throughput
from perdure.lab.report import DriveResult, MadeStep
from perdure.lab.traces import AvailabilityTrace
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.events import (
    GenerationStepping,
    JobEnded,
    JournalEntry,
    RankJoined,
    RanksStarted,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.service.controller.journal import read_journal
from perdure.service.processes import guarded

_LOOK_S = 0.2
_CALM_S = 60.0
_ENOUGH_S, _ENOUGH = 10.0, 6
"""While nobody comes or goes, so long, and so many steps, tell how fast so many nodes are."""
_TIMES, _STEADY = 5, 1.1
"""It is timed so often at most, and until it is no faster than that times as fast as before."""


class DriveWish(NamedTuple):
    """A request: which job is driven by which trace, and how."""

    spec: JobSpec
    trace: AvailabilityTrace
    home: str
    speed: float
    notice_s: float
    seed: int | None
    start_s: float
    """How long the job may take until it trains."""


def check_drive(wish: DriveWish) -> Schedule:
    """Return what will be done to the job's nodes.

    Raises:
        ConfigError: the job has one node, or some that are not started here.
        SafetyError: the trace has no node at some time, or more than the job.
    """
    spec = wish.spec
    if spec.groups:
        raise ConfigError("replica groups of torchft are not driven", hint="perdure trace replay")
    if spec.first_nodes < 2:
        raise ConfigError("the job has one node, and none to lose", hint="nodes = N in its file")
    if spec.remote or spec.growth:
        raise ConfigError(
            "nodes that join from elsewhere cannot be taken away from here",
            hint="leave `remote` and `nodes_max` out: all nodes are then of this machine",
        )
    check_trace(wish.trace, spec.first_nodes)
    return plan_schedule(wish.trace)


def drive(wish: DriveWish, say: Say) -> DriveResult:
    """Start the job, play the trace against it, stop it, and compare with what was possible.

    Ctrl-C, or the job's own end, ends the play with what was measured so far.

    Raises:
        ConfigError, SafetyError: as `check_drive`.
        PlatformError: the job did not come to train, or made too few steps to be timed.
    """
    schedule, spec = check_drive(wish), wish.spec
    end_s = wish.trace.duration_s
    folders = Path(wish.home, "replay")
    folders.mkdir(parents=True, exist_ok=True)

    def progress(now_s: float, nodes: int, members: int) -> None:
        say("drive", now_s / end_s, f"{now_s:.0f} of {end_s:.0f} s, {nodes} nodes, {members} train")

    def ending() -> None:
        say("stop", 1.0, f"{spec.name}; Ctrl-C ends it at once")

    _sweep(folders)
    with (
        guarded("PERDURE_REPLAY"),
        tempfile.TemporaryDirectory(prefix=f"drive-{os.getpid()}-", dir=folders) as folder,
    ):
        system = Driven(spec, Path(folder), wish.home, ending)
        try:
            say("start", 0.0, f"{spec.name}, {spec.first_nodes} nodes")
            system.launch()
            _wait_steps(system, 1, wish.start_s)
            if not system.trail.poll():
                what = "has ended" if system.over() else f"made no step within {wish.start_s:g} s"
                raise PlatformError(f"job {system.job} {what}", hint=_explain(system.job))
            say("time it", 0.0, f"{spec.nodes} nodes")
            rate = _time_steadily(system, spec.nodes, wish.start_s)
            away = [place for place in range(spec.first_nodes) if place not in schedule.first]
            system.kill(away)
            if away and system.goes_on():  # Any other waits for its nodes.
                say("settle", 0.0, f"{len(schedule.first)} nodes")
                _wait_steps(system, 3, _CALM_S)
            if system.over():
                raise PlatformError(
                    f"job {system.job} ended before the trace began", hint=_explain(system.job)
                )
            played = play(system, schedule, end_s, {}, progress)
        finally:
            system.end()
        return _tell(wish, played, {spec.nodes: rate}, system)


def _sweep(folders: Path) -> None:
    """Remove what drives that were killed have left."""
    for path in folders.glob("drive-*"):
        if not os.path.exists(f"/proc/{path.name.split('-')[1]}"):
            shutil.rmtree(path, ignore_errors=True)


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


def _tell(
    wish: DriveWish, played: Played, timed: Mapping[int, float], system: Driven
) -> DriveResult:
    """Return what the job made of the trace, and how it ended where that was before the trace."""
    entries, zero_s = list(read_journal(system.paths)), played.begun_s + system.compute_offset_s()
    played.run.steps = place_steps(played.run.steps, read_worlds(entries, zero_s))
    played.run.rates = timed
    seen = average_rates(played.run, _ENOUGH_S)
    played.run.rates = _scale(seen, wish.spec)
    state_bytes, ended = 0, ""
    for entry in entries:
        match entry.body:
            case RankJoined() as event:
                state_bytes = max(state_bytes, event.state_bytes)
            case JobEnded() as event:
                ended = f"{event.status}: {event.reason}"
    table = Throughput(
        wish.spec.name,
        {Shape(nodes, 1): rate for nodes, rate in played.run.rates.items()},
        global_batch=1.0,
        state_bytes=float(state_bytes),
        source="its own steps",
    )
    asked = Wish(
        wish.trace, ("perdure",), wish.home, 0.0, 1, False, wish.speed, wish.notice_s, wish.seed
    )
    result = compare_with(asked, table, {"perdure": played})
    losses, joins = count_moves(played.run)
    ledger = cut_ledger(entries, wish.spec, played.run.present, zero_s, played.run.end_s)
    row = msgspec.structs.replace(result.systems[0], losses=losses, joins=joins, ledger=ledger)
    fields = msgspec.structs.asdict(result) | {"systems": (row,)}
    if result.costs is not None and result.costs.losses < losses:  # A world of a fixed size waits.
        fields |= {"costs": None, "simulated": None}
    return DriveResult(
        **fields | {"unit": "steps", "reference": wish.spec.name},
        job=wish.spec.name,
        assumed=tuple(n for n in range(1, wish.spec.nodes + 1) if n not in seen),
        ended=ended if played.over else "",
    )
