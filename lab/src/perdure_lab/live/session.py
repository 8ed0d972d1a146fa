"""All of a live replay: measure, play each system in turn, compare with what was possible.

The reference is plain DistributedDataParallel: how fast each number of nodes trains under torchrun
where nobody comes or goes. It is timed before the first system and after each, so that systems and
reference take turns, and a system that is slow all the time shows. Only a model that is cut into
stages, which DDP has nowhere to put, is measured by itself: the same elastic job loses one node
after another by drain. Two cores do not scale; virtual devices do, as long as what the machine
really computes fits beside them.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import NamedTuple

from perdure.model.codec import encode
from perdure.model.errors import PlatformError, SafetyError
from perdure.service.jobfiles import write_atomic
from perdure.service.processes import guarded
from perdure_lab.live.ledger import (
    close_ledger,
    compute_pace,
    compute_rates,
    count_changes,
    count_committed,
    measure_costs,
    refresh_rates,
)
from perdure_lab.live.live import Played, Schedule, plan_schedule, play, wait_ready
from perdure_lab.live.systems import (
    DEFAULT_TIMES,
    MICRO_BATCHES,
    Morphing,
    Perdure,
    System,
    Torchft,
    Torchrun,
    Trail,
    make_paced_spec,
)
from perdure_lab.policies.policies import POLICIES, apply_costs
from perdure_lab.policies.throughput import Shape, Throughput, read_throughput
from perdure_lab.report import Comparison, MeasuredCosts, Physics, ReplayResult, ReplayRow
from perdure_lab.simulation.compare import compare
from perdure_lab.traces import AvailabilityTrace, list_intervals
from perdure_lab.traces.transform import cut

STATE_BYTES = 3.2e6
"""Of the model in `paced`, with its moments."""
_WINDOW_S, _STEPS, _TIMED_S = 3.0, 6, 300.0

Say = Callable[[str, float, str], None]
"""What is being done, the share of it that is, and more in words."""


def locate_cache(home: str, count: int, pace_s: float, stages: int) -> Path:
    """Return where the table of this machine and of such a job is kept."""
    machine = (platform.node(), os.cpu_count(), platform.processor())
    words = (*machine, count, pace_s, stages, MICRO_BATCHES)
    return Path(home, "replay", f"tau-{sha256(repr(words).encode()).hexdigest()[:12]}.json")


def load_throughput(path: Path) -> Throughput | None:
    """Return the table that was measured earlier; None if there is none."""
    return read_throughput(path.read_text(), str(path), None) if path.exists() else None


def measure_throughput(
    system: Perdure, count: int, path: Path, progress: Callable[[int], None]
) -> Throughput:
    """Return samples a second by number of nodes, from all `count` down to one, and keep it.

    `progress` is told the number that is being measured.
    """
    rates: dict[int, float] = {}
    batch = 0
    for nodes in range(count, 0, -1):
        progress(nodes)
        system.shape(range(nodes), keep=True)
        rates[nodes], batch = _time_steps(system, tuple(range(nodes)))
    return _keep_throughput(rates, batch, path)


def _keep_throughput(rates: dict[int, float], batch: int, path: Path) -> Throughput:
    """Return samples a second by number of nodes as a table, which is kept at `path`."""
    configs = [{"D": n, "P": 1, "samples_per_s": rates[n]} for n in sorted(rates)]
    model = {"global_batch": batch, "state_bytes": STATE_BYTES, "configs": configs}
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    source = f"measured on this machine by trace replay, {when}, load {os.getloadavg()[0]:.1f}"
    write_atomic(str(path), encode({"models": {"replay": model}, "source": source}) + b"\n")
    table = load_throughput(path)
    assert table is not None
    return table


class Reference:
    """Plain DDP's samples a second by number of nodes, timed again between the systems."""

    def __init__(self, folder: Path, pace_s: float, path: Path) -> None:
        """Measure in `folder`; the table is kept at `path`."""
        self._folder, self._pace_s, self._path = folder, pace_s, path
        self._times = self._batch = 0
        self.rates: dict[int, list[float]] = {}
        """Of each time that it was measured."""

    def measure(self, counts: Sequence[int], say: Say) -> Throughput:
        """Time worlds of `counts` nodes once more; return the medians of all times so far."""
        for number, count in enumerate(counts):
            say("plain DDP", number / len(counts), f"{count} nodes")
            self._times += 1
            system = Torchrun(self._folder / f"ddp-{self._times}", self._pace_s)
            places = tuple(range(count))
            try:
                system.start(places)
                wait_ready(system, places)
                rate, self._batch = _time_steps(system, places)
            finally:
                system.end()
            self.rates.setdefault(count, []).append(rate)
        return self.tabulate()

    def tabulate(self) -> Throughput:
        """Return the medians of all times so far, which are kept."""
        rates = {n: median(each) for n, each in self.rates.items()}
        return _keep_throughput(rates, self._batch, self._path)

    def compute_spread(self) -> float:
        """Return the largest difference between two times of one world, as a share of them."""
        return max((max(each) / min(each) - 1.0 for each in self.rates.values()), default=0.0)


def check_rising(table: Throughput) -> None:
    """Refuse a machine on which more nodes are not faster.

    Raises:
        SafetyError: what a replay would show there is the machine, and not the system.
    """
    rates = [rate for _, rate in sorted(table.rates.items())]
    flat = [n for n, (a, b) in enumerate(pairwise(rates), 2) if b <= a]
    if flat:
        shown = ", ".join(f"{n}: {rate:.0f}" for n, rate in enumerate(rates, 1))
        raise SafetyError(
            f"{flat[0]} nodes are no faster here than {flat[0] - 1}: samples/s by nodes {shown}",
            hint="a larger --pace-ms, a smaller --nodes-max, or less beside it; --measure "
            "measures again",
        )


def _time_steps(system: System, places: tuple[int, ...]) -> tuple[float, int]:
    """Return samples a second of a world, and the samples of a step.

    Raises:
        PlatformError: it has not made enough steps in time.
    """
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + _TIMED_S:
        time.sleep(0.2)
        system.check()
        rows = [row for row in system.trail.poll() if row.at_s >= begun_s and row.places == places]
        if len(rows) > _STEPS and rows[-1].at_s - rows[0].at_s >= _WINDOW_S:
            step_s = median(b.at_s - a.at_s for a, b in pairwise(rows))
            return rows[-1].samples / step_s, rows[-1].samples
    raise PlatformError(
        f"{len(places)} nodes made no {_STEPS} steps in {_TIMED_S:g} s where nothing happens",
        hint="a smaller --pace-ms, or less beside it",
    )


SYSTEMS = ("perdure", "torchrun", "torchft", "torchft-default")
"""torchft with time-outs as short as a user may tune them, and at its own defaults."""
STAGED = ("perdure", "varuna")
"""Those that train a model in stages."""
NODES_MAX = 8


class Wish(NamedTuple):
    """A request for a replay: what is to be replayed, and how."""

    trace: AvailabilityTrace
    systems: Sequence[str]
    home: str
    pace_s: float
    """Declared time of a micro-batch on a virtual device."""
    stages: int
    """Of each copy of the model, under perdure."""
    measure: bool
    """Measure throughput even where that was done before."""
    speed: float
    notice_s: float
    seed: int | None


def check_trace(trace: AvailabilityTrace, most_allowed: int = NODES_MAX) -> int:
    """Return the most nodes that there are at once.

    Raises:
        SafetyError: nobody is left at some time, or there are too many for this machine.
    """
    counts = [(len(i.living), i.begin_s) for i in list_intervals(trace)]
    fewest, at_s = min(counts)
    if fewest == 0:
        raise SafetyError(
            f"{trace.name} has no node at {at_s:.1f} s: nobody would have the state",
            hint="a larger --nodes-max, or another --until",
        )
    most, _ = max(counts)
    if most > most_allowed:
        raise SafetyError(f"{most} nodes at once, and at most {most_allowed} are played here")
    return most


def replay(wish: Wish, say: Say) -> ReplayResult:
    """Play the trace against each system, one after another; all of them end with this process.

    Raises:
        SafetyError: throughput does not rise with the number of nodes, or the trace has none.
        PlatformError: a system does not run here.
    """
    count, schedule = check_trace(wish.trace), plan_schedule(wish.trace)
    replays = Path(wish.home, "replay")
    replays.mkdir(parents=True, exist_ok=True)
    visited = sorted({len(i.living) for i in list_intervals(wish.trace)})
    played: dict[str, Played] = {}
    with guarded("PERDURE_REPLAY"):
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=replays))
        reference, running = None, None
        try:
            if wish.stages > 1:
                table, running = _obtain_table(wish, count, folder, say)
            else:
                path = locate_cache(wish.home, count, wish.pace_s, wish.stages)
                reference = Reference(folder, wish.pace_s, path)
                table = reference.measure(range(1, count + 1), say)
            check_rising(table)
            for name in wish.systems:
                known = running if name == "perdure" else None
                system: System = known or _make_system(name, wish, count, folder)
                played[name] = _play_one(name, system, schedule, wish, table, say)
                if not played[name].complete:
                    break
                if reference is not None and not measure_again(reference, visited, say):
                    break
        finally:
            if running is not None:
                running.end()
        shutil.rmtree(folder, ignore_errors=True)
        return compare_played(wish, reference.tabulate() if reference else table, played, reference)


def measure_again(reference: Reference, counts: Sequence[int], say: Say) -> bool:
    """Time the reference once more, and return whether to go on; what was played is kept."""
    try:
        reference.measure(counts, say)
    except KeyboardInterrupt:
        return False
    except PlatformError as error:  # Then the times before stand for it.
        say("plain DDP", 1.0, error.message)
    return True


def _obtain_table(
    wish: Wish, count: int, folder: Path, say: Say
) -> tuple[Throughput, Perdure | None]:
    """Return the measured throughput, and the job that it was measured with, if it was now."""
    path = locate_cache(wish.home, count, wish.pace_s, wish.stages)
    table = None if wish.measure else load_throughput(path)
    if table is not None:
        return table, None
    system = _make_perdure(wish, count, folder / "perdure")
    try:
        say("start", 0.0, f"{count} nodes")
        system.start(range(count))
        table = measure_throughput(
            system, count, path, lambda n: say("measure", 1 - n / count, f"{n} nodes")
        )
    except BaseException:
        system.end()
        raise
    return table, system


def _make_perdure(wish: Wish, count: int, where: Path) -> Perdure:
    trail = Trail(where)
    spec = make_paced_spec(f"replay-{token_hex(3)}", where, count, wish.pace_s, wish.stages)
    return Perdure(spec, where, wish.home, trail)


def _make_system(name: str, wish: Wish, count: int, folder: Path) -> System:
    where = folder / name
    makers: dict[str, Callable[[], System]] = {
        "perdure": lambda: _make_perdure(wish, count, where),
        "torchrun": lambda: Torchrun(where, wish.pace_s),
        "torchft": lambda: Torchft(where, count, wish.pace_s),
        "torchft-default": lambda: Torchft(where, count, wish.pace_s, DEFAULT_TIMES),
        "varuna": lambda: Morphing(where, wish.pace_s, wish.stages),
    }
    return makers[name]()


def _play_one(
    name: str, system: System, schedule: Schedule, wish: Wish, table: Throughput, say: Say
) -> Played:
    rates = {shape.nodes: rate for shape, rate in table.rates.items()}
    end_s = wish.trace.duration_s

    def progress(now_s: float, nodes: int, members: int) -> None:
        say(name, now_s / end_s, f"{now_s:.0f} of {end_s:.0f} s, {nodes} nodes, {members} train")

    try:
        say(name, 0.0, "starts")
        system.start(schedule.first)
        wait_ready(system, schedule.first)
        return play(system, schedule, end_s, rates, progress)
    finally:
        system.end()


def compare_played(
    wish: Wish, table: Throughput, played: dict[str, Played], reference: Reference | None
) -> ReplayResult:
    """Return what the systems made, beside what was possible; perdure itself says how fast that is.

    Where there is a reference, it does.
    """
    if reference is None and "perdure" in played:
        table = _refresh(table, played)
    return compare_with(wish, table, played, reference)


def compare_with(
    wish: Wish,
    table: Throughput,
    played: dict[str, Played],
    reference: Reference | None = None,
    costs: MeasuredCosts | None = None,
) -> ReplayResult:
    """Return what the systems made, beside what was possible at this throughput.

    What changes cost perdure is measured on its own steps where no `costs` are given.
    """
    policy = POLICIES["perdure"]
    for one in played.values():
        one.run.rates = {shape.nodes: rate for shape, rate in table.rates.items()}
    if "perdure" in played:
        perdure = played["perdure"]
        costs = costs or measure_costs(perdure.run, _describe(wish, perdure))
        policy = apply_costs(policy, costs)
    ends = {name: one.run.end_s for name, one in played.items()}
    bounds = {
        end_s: compare(cut(wish.trace, end_s), table, [policy], Physics())[0]
        for end_s in set(ends.values())
    }
    first = next(iter(played.values()))
    whole = bounds[first.run.end_s]
    trace = cut(wish.trace, first.run.end_s)
    return ReplayResult(
        trace=wish.trace.name,
        duration_s=first.run.end_s,
        complete=len(played) == len(wish.systems) and all(o.complete for o in played.values()),
        slot_s=whole.slot_s,
        nodes_max=max(len(i.living) for i in list_intervals(trace)),
        speed=wish.speed,
        notice_s=wish.notice_s,
        seed=wish.seed,
        throughput={str(shape.nodes): rate for shape, rate in table.rates.items()},
        u1=whole.u1,
        u2=whole.u2,
        u2_online=whole.u2_online,
        systems=tuple(_make_row(name, one, bounds[ends[name]]) for name, one in played.items()),
        costs=costs,
        simulated=bounds[ends["perdure"]].policies[0] if costs else None,
        counts=tuple((i.begin_s, len(i.living)) for i in list_intervals(trace)),
        reference="plain DDP" if reference is not None else "perdure itself",
        reference_spread=reference.compute_spread() if reference is not None else 0.0,
    )


def _refresh(table: Throughput, played: dict[str, Played]) -> Throughput:
    """Return the throughput of the time of the replay."""
    rates = refresh_rates(played["perdure"].run)
    return Throughput(
        table.name,
        {Shape(nodes, 1): rate for nodes, rate in rates.items()},
        global_batch=table.global_batch,
        state_bytes=table.state_bytes,
        source=table.source,
    )


def _describe(wish: Wish, played: Played) -> str:
    speed = f", {wish.speed:g} times as fast" if wish.speed != 1 else ""
    notice = f", {wish.notice_s:g} s of notice" if wish.notice_s else ""
    return f"trace replay of {wish.trace.name}{speed}{notice}, load {played.load:.1f}"


def _make_row(name: str, one: Played, bound: Comparison) -> ReplayRow:
    committed, again = count_committed(one.run)
    losses, joins, gap_s = count_changes(one.run)
    return ReplayRow(
        system=name,
        committed=committed,
        **bound.weigh(committed),
        ledger=close_ledger(one.run),
        losses=losses,
        joins=joins,
        steps_again=again,
        longest_gap_s=gap_s,
        load=one.load,
        pace=compute_pace(one.run),
        shapes=one.shapes,
        recoveries_s=tuple(r.total_s for r in one.recoveries if r.failed),
        rates=compute_rates(one.run),
    )
