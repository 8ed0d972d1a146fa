"""Draws a trace from a model of availability: the same seed gives the same trace."""

import random
from collections.abc import Sequence

from msgspec.structs import replace

from perdure.lab.traces import AvailabilityTrace, find_intervals
from perdure.lab.traces.build import Builder
from perdure.lab.traces.figures import AvailabilityModel


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
    for interval in find_intervals(trace):
        builder.go_to(interval.begin_s)
        for departure in interval.change.left:
            gone = here.pop(chance.randrange(len(here)))
            builder.remove(gone, departure.notice_s)
        here += [builder.add_new() for _ in interval.change.joined]
    drawn = builder.finish(trace.name, trace.duration_s)
    slots = max((node.slots for node in trace.nodes), default=1)
    return replace(drawn, nodes=tuple(replace(n, slots=slots) for n in drawn.nodes))
