"""What can be expected of who knows a whole trace but which nodes leave (U2").

A mean over who leaves, for `bench_traces.py`: how much less than hindsight nobody can avoid who is
not told. The exact oracles are in `perdure_lab.policies.oracle`, with what a change earns.
"""

from collections.abc import Sequence
from math import comb

from perdure_lab.policies.oracle import NEVER, STOPPED, ChangeCosts, State, Step
from perdure_lab.policies.throughput import Throughput
from perdure_lab.traces import Interval


def find_blind_plan(intervals: Sequence[Interval], table: Throughput, costs: ChangeCosts) -> float:
    """Return the samples to be expected of who knows everything but which nodes leave (U2").

    In the mean over them, each node that is there being as likely to leave as any other, no
    policy with these costs has more: it would have to know what nobody told it. From the end,

        W_k(c) = mean over whether c loses a node of max over c' of (c' from c until the next
                 change) + W_{k+1}(c')

    A loss takes as few of the active nodes as it can. Who leaves with notice is known.
    """
    steps: list[tuple[Step, Interval, int]] = []
    before = 0
    for interval in intervals:
        steps.append((Step(table, costs, interval, before), interval, before))
        before = len(interval.living)
    after: dict[State, float] = {}
    for step, interval, nodes in reversed(steps):
        fitting = table.list_fitting_shapes(len(interval.living))
        now: dict[State, float] = {}
        states: list[State] = [NEVER, STOPPED, *table.list_fitting_shapes(nodes)]
        for old in states:
            value = 0.0
            for chance, lost in find_losses(step, old, nodes):
                ways = (step.earn(old, new, lost) + after.get(new, 0.0) for new in fitting)
                idle = after.get(old if old == NEVER else STOPPED, 0.0)
                value += chance * max(idle, *ways) if fitting else chance * idle
            now[old] = value
        after = now
    return after[NEVER]


def find_losses(step: Step, old: State, nodes: int) -> list[tuple[float, int | None]]:
    """Return (chance, active nodes lost at the least), if any of `nodes` is as likely to go."""
    if isinstance(old, str) or step.announced or not step.left:
        return [(1.0, None)]
    spared = comb(nodes - old.nodes, step.left) / comb(nodes, step.left)
    found: list[tuple[float, int | None]] = [(1.0 - spared, max(1, old.nodes - step.survivors))]
    return found + ([(spared, 0)] if spared else [])
