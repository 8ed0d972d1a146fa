"""All policies and the oracles on one trace: the same table, the same victims, the same physics."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from perdure_lab.policies.oracle import ChangeCosts, compute_area, score_best_plan
from perdure_lab.policies.policies import POLICIES, Policy
from perdure_lab.policies.throughput import Throughput
from perdure_lab.report import Bounds, Comparison, Physics, PolicyRow, SweepRow
from perdure_lab.simulation.engine import Outcome, Replay
from perdure_lab.traces import AvailabilityTrace, list_intervals
from perdure_lab.traces.transform import delay

Progress = Callable[[str, float], None]
"""What is being done, and the share of it that is."""


def derive_online_costs(policy: Policy, physics: Physics) -> ChangeCosts:
    """Return what `policy` pays for changes, as costs of the oracle U2'."""
    told = policy.announced
    loss = msgspec.structs.replace(policy.loss, state_s=0.0)
    return ChangeCosts(
        loss_s=loss.total_s - loss.detect_s + max(loss.detect_s, physics.detect_s),
        announced_s=min(loss.total_s, told.total_s) if told else loss.total_s,
        voluntary_s=policy.join.total_s,
        bytes_per_s=physics.bytes_per_s,
    )


def compare(
    trace: AvailabilityTrace,
    table: Throughput,
    policies: Sequence[Policy],
    physics: Physics,
    *,
    seed: int | None = None,
    progress: Progress = lambda *_: None,
) -> tuple[Comparison, dict[str, Outcome]]:
    """Return all policies' rows and outcomes. U2' has perdure's costs, measured or as changed.

    `seed` is the one that the trace's victims were drawn with, for the record.
    """
    intervals = list_intervals(trace)
    floor = ChangeCosts(loss_s=physics.detect_s, bytes_per_s=physics.bytes_per_s)
    reference = next((p for p in policies if p.name == "perdure"), POLICIES["perdure"])
    online = derive_online_costs(reference, physics)
    u2 = score_best_plan(intervals, table, floor, partial(progress, "U2"))
    late = list_intervals(delay(trace, reference.start_s))
    u2_online = score_best_plan(late, table, online, partial(progress, "U2'"))
    outcomes = {
        p.name: Replay(p, trace, table, physics).run(partial(progress, p.name)) for p in policies
    }
    bounds = Bounds(
        trace=trace.name,
        u1=compute_area(intervals, table),
        u2=u2,
        u2_online=u2_online,
        duration_s=trace.duration_s,
        slot_s=max((o.slot_s for o in outcomes.values()), default=0.0),
        seed=seed,
    )
    rows = tuple(
        PolicyRow(
            policy=p.name,
            committed=o.committed,
            **bounds.weigh(o.committed),
            ledger=o.ledger,
            losses=o.losses,
            changes=o.changes,
            restarts=o.restarts,
            source=p.source,
        )
        for p, o in zip(policies, outcomes.values(), strict=True)
    )
    source = f"{table.name} ({table.source})"
    known = msgspec.structs.asdict(bounds)
    return Comparison(**known, policies=rows, throughput=source, physics=physics), outcomes


def sweep_communicator(
    trace: AvailabilityTrace,
    table: Throughput,
    policy: Policy,
    physics: Physics,
    values_s: Sequence[float],
    progress: Progress = lambda *_: None,
) -> tuple[SweepRow, ...]:
    """Return what `policy` would have, were its communicator formed in other times."""
    intervals = list_intervals(trace)
    floor = ChangeCosts(loss_s=physics.detect_s, bytes_per_s=physics.bytes_per_s)
    u2 = score_best_plan(intervals, table, floor)
    if not u2:
        return ()
    rows = []
    for number, value_s in enumerate(values_s):
        slower = _with_communicator(policy, value_s)
        late = list_intervals(delay(trace, slower.start_s))
        online = score_best_plan(late, table, derive_online_costs(slower, physics))
        outcome = Replay(slower, trace, table, physics).run()
        rows.append(SweepRow(value_s, outcome.committed / u2, online / u2))
        progress("communicator", (number + 1) / len(values_s))
    return tuple(rows)


def _with_communicator(policy: Policy, value_s: float) -> Policy:
    change = msgspec.structs.replace
    told = policy.announced
    return change(
        policy,
        loss=change(policy.loss, communicator_s=value_s),
        join=change(policy.join, communicator_s=value_s),
        announced=change(told, communicator_s=value_s) if told else None,
    )
