"""What a live replay was worth: from committed steps and who was there, to ledger and costs.

Its stamps are its own: ranks say when a step was committed and by whom, the replay knows which
places had a machine, and the reference is the measured throughput. The job's own record of its
recoveries only tells in which phases a step was late.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.report import Recovery
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure_lab.report import PHASES, MadeStep, MeasuredCosts, Phases
from perdure_lab.simulation.ledger import Ledger

Present = Sequence[tuple[float, frozenset[int]]]
"""(seconds, places with a machine from then on), in order."""
_LATE = 2.0
"""A step of so many times its reference is late for a change; less is steady overhead."""
_CALM_STEPS = 20


@dataclass(slots=True)
class Run:
    """One system's replay, in seconds of the replay."""

    steps: Sequence[MadeStep]
    """In order of time, one for each commit; the last one before 0 among them."""
    present: Present
    end_s: float
    rates: Mapping[int, float]
    """Reference: samples a second by number of nodes."""
    told: Sequence[tuple[int, float, float]] = ()
    """(place, since when it was announced to leave, when it left)."""
    recoveries: Sequence[Recovery] = ()
    """Of the job's own report, their `at_s` in seconds of the replay."""

    def compute_step_s(self, step: MadeStep) -> float:
        """Return how long a step takes where nothing happens."""
        return step.samples / self.rates[len(step.places)]


def join_steps(rows: Sequence[MadeStep]) -> list[MadeStep]:
    """Return the commits among `rows`: parts of one step that come together are one."""
    found: list[MadeStep] = []
    for row in sorted(rows, key=lambda row: row.at_s):
        last = found[-1] if found else None
        if last is not None and last.step == row.step and not set(last.places) & set(row.places):
            places = tuple(sorted({*last.places, *row.places}))
            found[-1] = MadeStep(row.at_s, row.step, last.samples + row.samples, places)
        else:
            found.append(row)
    return found


def count_committed(run: Run) -> tuple[float, int]:
    """Return the samples that were committed within the replay, and the steps made again."""
    within = [(step, again) for step, again in _tell_again(run) if 0 < step.at_s <= run.end_s]
    samples = float(sum(step.samples for step, again in within if not again))
    return samples, sum(again for _, again in within)


def _tell_again(run: Run) -> Iterator[tuple[MadeStep, bool]]:
    """Yield each commit, and whether its step had been made before."""
    seen: set[int] = set()
    for step in run.steps:
        yield step, step.step in seen
        seen.add(step.step)


def refresh_rates(run: Run) -> dict[int, float]:
    """Return the reference, with what the replay itself has shown of it.

    The machine is not equally fast all the time: where there are enough steps between which
    nobody came or went, their median is what so many nodes could do meanwhile.
    """
    seen = {
        nodes: 1.0 / median(seconds / samples for seconds, samples in times)
        for nodes, times in _group_calm(run).items()
        if len(times) >= _CALM_STEPS
    }
    return {**run.rates, **seen}


def average_rates(run: Run, enough_s: float) -> dict[int, float]:
    """Return the reference as `refresh_rates` does, of steps whose single times are not known.

    Means, over at least so many seconds in which nobody came or went.
    """
    found = dict[int, float]()
    for nodes, times in _group_calm(run).items():
        calm_s = sum(seconds for seconds, _ in times)
        if calm_s >= enough_s:
            found[nodes] = sum(samples for _, samples in times) / calm_s
    return {**run.rates, **found}


def _group_calm(run: Run) -> dict[int, list[tuple[float, int]]]:
    """Return (seconds, samples) of undisturbed steps, by number of nodes."""
    times: dict[int, list[tuple[float, int]]] = {}
    for old, new in _list_calm_pairs(run):
        times.setdefault(len(new.places), []).append((new.at_s - old.at_s, new.samples))
    return times


def _list_calm_pairs(run: Run) -> list[tuple[MadeStep, MadeStep]]:
    """Return the pairs of commits between which nobody came or went."""
    return [
        (old, new)
        for old, new in pairwise(run.steps)
        if old.at_s > 0
        and old.places == new.places
        and new.step == old.step + 1
        and len(_cut(run.present, old.at_s, new.at_s)) == 1
    ]


def compute_pace(run: Run) -> float:
    """Return how long undisturbed steps took, as a multiple of their reference; 0 without any."""
    calm = _list_calm_pairs(run)
    wanted_s = sum(run.compute_step_s(new) for _, new in calm)
    return sum(new.at_s - old.at_s for old, new in calm) / wanted_s if wanted_s else 0.0


def _compute_steady(run: Run) -> float:
    """Return how much longer than their reference undisturbed steps took, early ones deducted."""
    pace = compute_pace(run)
    return max(0.0, 1.0 - 1.0 / pace) if pace else 0.0


def close_ledger(run: Run) -> dict[str, float]:
    """Return each account's share of the slot-seconds that were paid for."""
    ledger, before_s, before = Ledger(), 0.0, frozenset[int]()
    for step, again in _tell_again(run):
        if step.at_s > 0 and before_s < run.end_s:
            _spend_step(ledger, run, step, before_s, before, again)
            before_s = step.at_s
        before = frozenset(step.places)
    for begin_s, end_s, here in _cut(run.present, before_s, run.end_s):
        ledger.spend("lost_work", (end_s - begin_s) * len(here & before))  # Of a step under way.
        ledger.spend("reconfiguration.warmup", (end_s - begin_s) * len(here - before))
    slot_s = sum((e - b) * len(here) for b, e, here in _cut(run.present, 0.0, run.end_s))
    return ledger.close(slot_s)


Waits = Sequence[tuple[int, float, float]]
"""(node, from, to): the trace had it, and the place had no machine for it yet."""


def cut_ledger(
    entries: Iterable[JournalEntry],
    spec: JobSpec,
    present: Present,
    zero_s: float,
    end_s: float,
    waits: Waits = (),
) -> dict[str, float]:
    """Return each account's share of what was paid for, by the job's own ledger.

    Job time `zero_s` is where the replay began; slots are paid for while their node is there.
    Those of a node that `waits` are idle, but for what the job itself knows of them.
    """
    fold, ledger = LedgerFold(), Ledger()
    known = [0.0] * len(waits)
    for entry in entries:
        fold.add(entry)
    for segment in fold.segments(zero_s + end_s):
        begin_s, until_s = max(0.0, segment.begin_s - zero_s), min(end_s, segment.end_s - zero_s)
        node = spec.node_of(segment.rank)
        for from_s, to_s, here in _cut(present, begin_s, until_s):
            if node in here:
                share = (to_s - from_s) / (segment.end_s - segment.begin_s)
                told = sum(s for name, s in segment.seconds if name != "unattributed")
                for number, (who, wait_s, come_s) in enumerate(waits):
                    within_s = min(to_s, come_s) - max(from_s, wait_s)
                    if who == node and within_s > 0:
                        known[number] += told * share * within_s / (to_s - from_s)
                for account, seconds in segment.seconds:
                    ledger.spend(account, seconds * share)
    for (node, wait_s, come_s), known_s in zip(waits, known, strict=True):
        cut = _cut(present, max(0.0, wait_s), min(end_s, come_s))
        waited_s = sum(e - b for b, e, here in cut if node in here)
        ledger.spend("idle", max(0.0, spec.nproc * waited_s - known_s))
    paid_s = sum((e - b) * len(here) for b, e, here in _cut(present, 0.0, end_s))
    return ledger.close(spec.nproc * paid_s)


def _spend_step(
    ledger: Ledger, run: Run, step: MadeStep, begin_s: float, before: frozenset[int], again: bool
) -> None:
    """Account for the time from one commit to the next."""
    places, wall_s = frozenset(step.places), step.at_s - begin_s
    useful = min(1.0, run.compute_step_s(step) / wall_s) if wall_s > 0 else 1.0
    shares = {"lost_work" if again else "useful": useful}
    late_s = (1.0 - useful) * wall_s
    phases = _sum_phases(run, begin_s, step.at_s)
    known_s = min(late_s, sum(phases.values()))
    for name, seconds in phases.items():
        shares[name] = shares.get(name, 0.0) + seconds * known_s / sum(phases.values()) / wall_s
    rest = "steady_overhead" if useful * _LATE > 1.0 or phases else "reconfiguration.communicator"
    if late_s > known_s:
        shares[rest] = shares.get(rest, 0.0) + (late_s - known_s) / wall_s
    for from_s, to_s, here in _cut(run.present, begin_s, min(step.at_s, run.end_s)):
        for name, share in shares.items():
            ledger.spend(name, (to_s - from_s) * len(here & places) * share)
        for place in here - places:
            told = any(p == place and a <= from_s < b for p, a, b in run.told)
            lost = "idle" if told else "lost_work"
            ledger.spend(
                lost if place in before or told else "reconfiguration.warmup", to_s - from_s
            )


def _sum_phases(run: Run, begin_s: float, end_s: float) -> dict[str, float]:
    """Return what the job says of its recoveries that began between two commits."""
    began = [r for r in run.recoveries if begin_s < r.at_s + r.total_s and r.at_s < end_s]
    sums = {phase: sum(getattr(r, f"{phase}_s") for r in began) for phase in PHASES}
    return {f"reconfiguration.{phase}": seconds for phase, seconds in sums.items() if seconds > 0}


def _cut(
    present: Present, begin_s: float, end_s: float
) -> list[tuple[float, float, frozenset[int]]]:
    """Return (begin, end, places) of a stretch of time, cut where places change."""
    ends = [at_s for at_s, _ in present[1:]] + [max(end_s, present[-1][0])]
    pieces = [
        (max(begin_s, at_s), min(end_s, until_s), here)
        for (at_s, here), until_s in zip(present, ends, strict=True)
    ]
    return [(b, e, here) for b, e, here in pieces if e > b]


Times = dict[Literal["loss", "told", "join", "start"], list[float]]
"""Seconds that changes took, by what they were."""


def measure_costs(run: Run, source: str) -> MeasuredCosts:
    """Return what changes took: medians, from a change to the commit that has survived it.

    A step that was broken by a loss takes, where nothing else is lost, its rest at the pace of
    those that are left, and what the lost one had done of it; what it took beyond is the loss's r.
    """
    times = _time_changes(run)
    known = [r for r in run.recoveries if r.failed]
    joins = [r for r in run.recoveries if r.rung == "join"]
    return MeasuredCosts(
        source=source,
        losses=len(times["loss"]),
        joins=len(times["join"]),
        loss=_split(_median(times["loss"]), known),
        join=_split(_median(times["join"]), joins),
        announced=_split(_median(times["told"] or times["join"]), joins),
        start_s=_median(times["start"]),
        steady=_compute_steady(run),
    )


def _time_changes(run: Run) -> Times:
    times: Times = {"loss": [], "told": [], "join": [], "start": []}
    changes = [
        (at_s, before - after, after - before)
        for (_, before), (at_s, after) in pairwise(run.present)
    ]
    for at_s, _, come in changes:
        for place in come:
            # Who leaves again, or sees the end, before it was ready has needed at least so long.
            left = (a for a, gone, _ in changes if a > at_s and place in gone)
            firsts = (s.at_s for s in run.steps if s.at_s > at_s and place in s.places)
            times["start"].append(min(next(firsts, run.end_s), next(left, run.end_s)) - at_s)
    for old, new in pairwise(run.steps):
        if not 0 < new.at_s <= run.end_s or new.places == old.places:
            continue
        lost, joined = set(old.places) - set(new.places), set(new.places) - set(old.places)
        told = {place for place, a, b in run.told if a <= new.at_s and old.at_s <= b}
        wall_s, new_s = new.at_s - old.at_s, run.compute_step_s(new)
        if joined and not lost:
            times["join"].append(max(0.0, wall_s - (run.compute_step_s(old) + new_s) / 2))
        elif lost and not joined and lost <= told:
            times["told"].append(max(0.0, wall_s - new_s))
        elif lost and not joined and not lost & told:
            kills = (at_s for at_s, gone, _ in reversed(changes) if at_s < new.at_s and gone & lost)
            killed_s = next(kills, None)
            if killed_s is not None:
                times["loss"].append(_compute_loss_s(run, old, new, killed_s, len(lost)))
    return times


def _compute_loss_s(run: Run, old: MadeStep, new: MadeStep, killed_s: float, lost: int) -> float:
    """Return what a loss has cost beyond the rest of the step, and what the lost had done of it."""
    done = min(1.0, max(0.0, killed_s - old.at_s) / run.compute_step_s(old))
    kept = done * (1.0 - lost / len(old.places))
    rest_s = (1.0 - kept) * run.compute_step_s(new)
    return max(0.0, new.at_s - max(killed_s, old.at_s) - rest_s)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _split(total_s: float, recoveries: Sequence[Recovery]) -> Phases:
    """Return `total_s` divided as the job's own stamps divide what they know of it."""
    parts = {
        phase: _median([getattr(recovery, f"{phase}_s") for recovery in recoveries])
        for phase in PHASES
    }
    whole_s = sum(parts.values())
    if whole_s <= 0:
        return Phases(communicator_s=total_s)
    return Phases(**{f"{name}_s": s * total_s / whole_s for name, s in parts.items()})


def compute_rates(run: Run) -> tuple[tuple[float, float], ...]:
    """Return (seconds, committed samples a second from then on), in equal stretches of time."""
    if run.end_s <= 0:
        return ()
    columns = max(10, min(120, len(run.steps) // 4))  # Of a few steps each, or they look ragged.
    width_s, sums = run.end_s / columns, [0.0] * columns
    for step, again in _tell_again(run):
        if 0 < step.at_s <= run.end_s and not again:
            sums[min(columns - 1, int(step.at_s / width_s))] += step.samples
    return tuple((width_s * i, total / width_s) for i, total in enumerate(sums))


def count_changes(run: Run) -> tuple[int, int, float]:
    """Return losses, joins, and the longest time between two commits, seconds."""
    times = _time_changes(run)
    return len(times["loss"]), len(times["join"]), find_longest_gap(run)


def find_longest_gap(run: Run) -> float:
    """Return the longest time between two commits, or to the beginning or end, seconds."""
    stamps = [0.0, *(step.at_s for step in run.steps if step.at_s > 0), run.end_s]
    return max(b - a for a, b in pairwise(stamps))


def count_moves(run: Run) -> tuple[int, int]:
    """Return the instants at which nodes were taken and at which some came, whoever trained."""
    moves = list(pairwise(here for _, here in run.present))
    return sum(bool(a - b) for a, b in moves), sum(bool(b - a) for a, b in moves)
