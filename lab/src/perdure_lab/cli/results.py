"""How `perdure dash` lists and shows the kinds of results that the lab keeps."""

from collections.abc import Iterable

from perdure.cli.page.results import Kind
from perdure_lab.cli.plans import make_plan_document
from perdure_lab.report import DriveResult
from perdure_lab.results import KeptDrive, KeptPlan, KeptReplay, KeptSimulation, KeptTrace
from perdure_lab.screens import (
    make_replay_document,
    make_simulation_document,
    make_trace_document,
    render_time,
)


def tell_trace(kept: KeptTrace) -> tuple[str, str, str]:
    """Return a trace's row."""
    f = kept.figures
    said = (
        f"{f.availability:.1%} of the most; {f.nodes_min} to {f.nodes_max} nodes, "
        f"{render_time(f.duration_s)}, {f.changes} changes"
    )
    return f.name, said, ""


def tell_simulation(kept: KeptSimulation) -> tuple[str, str, str]:
    """Return a simulation's row."""
    best = sorted(kept.comparison.policies, key=lambda row: -row.fraction_of_u2)
    shares = list_shares((r.policy, r.fraction_of_u2) for r in best[:3])
    return kept.comparison.trace, shares, ""


def tell_play(kept: KeptReplay | KeptDrive) -> tuple[str, str, str]:
    """Return the row of a replay or a drive."""
    r = kept.result
    shares = list_shares((row.system, row.fraction_of_u2) for row in r.systems)
    said = f"{shares}; {render_time(r.duration_s)} played"
    state = "" if r.complete else "interrupted"
    if not isinstance(r, DriveResult):
        return r.trace, said, state
    why = r.trouble or r.ended
    return f"{r.trace}, {r.job}", f"{said}; {why}" if why else said, "failed" if why else state


def tell_plan(kept: KeptPlan) -> tuple[str, str, str]:
    """Return a plan's row."""
    title = f"{kept.profile}, {kept.devices} devices"
    if not kept.plan.options:
        return title, "no world fits", "failed"
    best = kept.plan.options[0]
    return title, f"{best.world.shape}: {best.samples_per_s:.1f} samples/s", ""


def list_shares(shares: Iterable[tuple[str, float]]) -> str:
    """Return each system's share of the upper bound U2."""
    told = ", ".join(f"{name} {share:.4f}" for name, share in shares)
    return f"{told} of U2" if told else "nothing was played"


KINDS = {
    "drive": Kind(
        "Traces played against a job",
        KeptDrive,
        tell_play,
        lambda kept: make_replay_document(kept.result),
    ),
    "replay": Kind(
        "Replays", KeptReplay, tell_play, lambda kept: make_replay_document(kept.result)
    ),
    "simulation": Kind(
        "Simulations",
        KeptSimulation,
        tell_simulation,
        lambda kept: make_simulation_document(kept.comparison, kept.counts, kept.rates),
    ),
    "plan": Kind("Plans", KeptPlan, tell_plan, make_plan_document),
    "trace": Kind(
        "Traces", KeptTrace, tell_trace, lambda kept: make_trace_document(kept.figures, kept.counts)
    ),
}
"""In the order of the page."""
