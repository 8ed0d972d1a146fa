"""What a trace of availability is like, in figures, and a model of it that can be drawn from.

The same seed draws the same trace.
"""

import random
from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec
from msgspec.structs import replace

from perdure_lab.traces import AvailabilityTrace, list_intervals
from perdure_lab.traces.nouns import Builder


class Availability(msgspec.Struct, frozen=True):
    """`perdure trace show --json`, without the counts over time."""

    name: str
    duration_s: float
    named: bool
    nodes: int
    """Different machines, over all of it."""
    nodes_min: int
    nodes_mean: float
    nodes_max: int
    slots_max: int
    availability: float
    """Mean over maximum."""
    node_hours: float
    changes: int
    """Instants at which anyone came or left, the beginning not counted."""
    changes_per_h: float
    departures: int
    arrivals: int
    """After the beginning."""
    node_mtbf_s: float | None
    """Time on a node for each departure; None: nobody left."""
    job_mtbf_s: float | None
    """Time for each instant at which anyone left: what a job on all of the nodes would see."""
    announced: float
    """Share of the departures that were announced."""
    notice_s: float
    """Median notice of those."""
    losses: dict[int, int]
    """How often so many left at one instant."""
    gains: dict[int, int]
    """How often so many came at one instant."""


def describe_availability(trace: AvailabilityTrace) -> Availability:
    """Return the figures of `trace`."""
    intervals = list_intervals(trace)
    slots = trace.slots
    counts = [len(i.living) for i in intervals]
    node_s = sum(i.length_s * len(i.living) for i in intervals)
    later = [i.change for i in intervals[1:]]
    losses = Counter(len(c.left) for c in later if c.left)
    gains = Counter(len(c.joined) for c in later if c.joined)
    notices = [d.notice_s for c in later for d in c.left]
    given = [notice for notice in notices if notice > 0]
    peak, mean = max(counts), node_s / trace.duration_s
    return Availability(
        name=trace.name,
        duration_s=trace.duration_s,
        named=trace.named,
        nodes=len(trace.nodes),
        nodes_min=min(counts),
        nodes_mean=mean,
        nodes_max=peak,
        slots_max=max(sum(slots[n] for n in i.living) for i in intervals),
        availability=mean / peak if peak else 0.0,
        node_hours=node_s / 3600,
        changes=len(later),
        changes_per_h=len(later) / trace.duration_s * 3600,
        departures=len(notices),
        arrivals=sum(len(c.joined) for c in later),
        node_mtbf_s=node_s / len(notices) if notices else None,
        job_mtbf_s=trace.duration_s / losses.total() if losses else None,
        announced=len(given) / len(notices) if notices else 0.0,
        notice_s=median(given) if given else 0.0,
        losses=dict(sorted(losses.items())),
        gains=dict(sorted(gains.items())),
    )


class AvailabilityModel(msgspec.Struct, frozen=True):
    """A fleet of `nodes_max` machines that leave and come in bursts, without memory.

    Departures come at `losses_per_node_h` for every node that is there, arrivals at
    `gains_per_vacancy_h` for every one that is not; so the number returns to its mean. How many go
    or come at once is drawn from the sizes, each with its weight.
    """

    nodes_max: int
    nodes_first: int
    losses_per_node_h: float
    gains_per_vacancy_h: float
    loss_sizes: tuple[tuple[int, int], ...] = ((1, 1),)
    gain_sizes: tuple[tuple[int, int], ...] = ((1, 1),)
    announced: float = 0.0
    notice_s: float = 0.0
    slots: int = 1


def fit_availability(trace: AvailabilityTrace) -> AvailabilityModel:
    """Return the model whose rates and sizes are those counted in `trace`."""
    figures = describe_availability(trace)
    vacant_h = figures.nodes_max * trace.duration_s / 3600 - figures.node_hours
    gains, losses = sum(figures.gains.values()), sum(figures.losses.values())
    return AvailabilityModel(
        nodes_max=figures.nodes_max,
        nodes_first=len(list_intervals(trace)[0].living),
        losses_per_node_h=losses / figures.node_hours if figures.node_hours else 0.0,
        gains_per_vacancy_h=gains / vacant_h if vacant_h else 0.0,
        loss_sizes=tuple(figures.losses.items()) or ((1, 1),),
        gain_sizes=tuple(figures.gains.items()) or ((1, 1),),
        announced=figures.announced,
        notice_s=figures.notice_s,
        slots=max((node.slots for node in trace.nodes), default=1),
    )


def generate(model: AvailabilityModel, duration_s: float, seed: int) -> AvailabilityTrace:
    """Return `duration_s` of a fleet like `model`; who leaves is any of those that are there."""
    chance, builder = random.Random(seed), Builder()
    here = [builder.add_new() for _ in range(model.nodes_first)]
    came, now_s = dict.fromkeys(here, 0.0), 0.0
    while True:
        losses_per_s = model.losses_per_node_h * len(here) / 3600
        gains_per_s = model.gains_per_vacancy_h * (model.nodes_max - len(here)) / 3600
        rate = losses_per_s + gains_per_s
        now_s += chance.expovariate(rate) if rate > 0 else duration_s
        if now_s >= duration_s:
            break
        builder.go_to(now_s)
        if chance.random() * rate < losses_per_s:
            for _ in range(min(len(here), _draw(chance, model.loss_sizes))):
                gone = here.pop(chance.randrange(len(here)))
                warned = chance.random() < model.announced
                notice_s = min(model.notice_s, now_s - came[gone]) if warned else 0.0
                builder.remove(gone, notice_s)
        else:
            for _ in range(min(model.nodes_max - len(here), _draw(chance, model.gain_sizes))):
                here.append(builder.add_new())
                came[here[-1]] = now_s
    trace = builder.finish(f"generated-{seed}", duration_s)
    return replace(trace, nodes=tuple(replace(n, slots=model.slots) for n in trace.nodes))


def _draw(chance: random.Random, sizes: Sequence[tuple[int, int]]) -> int:
    return chance.choices([size for size, _ in sizes], [weight for _, weight in sizes])[0]


def draw_victims(trace: AvailabilityTrace, seed: int) -> AvailabilityTrace:
    """Return `trace` with as many nodes at every moment, but others of them leaving.

    Each departure takes any of the nodes that are there, with its notice; each arrival is a new
    machine. For traces of counts, which do not know who left.
    """
    chance, builder = random.Random(seed), Builder()
    here: list[str] = []
    for interval in list_intervals(trace):
        builder.go_to(interval.begin_s)
        for departure in interval.change.left:
            builder.remove(here.pop(chance.randrange(len(here))), departure.notice_s)
        here += [builder.add_new() for _ in interval.change.joined]
    drawn = builder.finish(trace.name, trace.duration_s)
    slots = max((node.slots for node in trace.nodes), default=1)
    return replace(drawn, nodes=tuple(replace(n, slots=slots) for n in drawn.nodes))
