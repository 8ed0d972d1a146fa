"""A plan of worlds as a page: the chosen one, and those that are slower."""

from perdure.dash.page import Document, render_html_paragraphs, render_html_table
from perdure_lab.cli.plan import describe_option, explain_excluded
from perdure_lab.results import KeptPlan

_WORLDS = ("world", "slower", "bubble", "step s", "samples/s", "memory GB", "idle")
_STAGES = ("stage", "blocks", "recompute", "devices")


def make_plan_document(kept: KeptPlan) -> Document:
    """Return the chosen world beside the runners-up, its stages, and what cannot be."""
    plan = kept.plan
    best = plan.options[0] if plan.options else None
    worlds = [
        (
            o.world.shape,
            "chosen" if o is best else f"{o.step_s / best.step_s - 1:+.1%}",
            f"{o.bubble:.1%}",
            f"{o.step_s:.4f}",
            f"{o.samples_per_s:.1f}",
            f"{o.memory_bytes / 1e9:.2f}",
            o.idle,
        )
        for o in plan.options
        if best is not None
    ]
    how = [describe_option(option) for option in plan.options]
    stages = [
        (
            number,
            f"{stage.first} to {stage.stop - 1}",
            "yes" if stage.recompute else "no",
            ", ".join(stage.devices),
        )
        for number, stage in enumerate(best.world.stages if best else ())
    ]
    searched = (
        f"{plan.simulated} worlds simulated; {plan.slower} kinds of worlds cannot be faster",
        *plan.notes,
    )
    excluded = [explain_excluded(entry) for entry in plan.excluded]
    sections = (
        ("Worlds, the fastest first", render_html_table(_WORLDS, worlds, range(1, 7), how)),
        ("Stages of the chosen world", render_html_table(_STAGES, stages)),
        ("Not possible", render_html_paragraphs(excluded)),
        ("How it was searched", render_html_paragraphs(searched)),
    )
    return Document(f"plan for {kept.devices} devices", tuple(_tell_asked(kept)), sections)


def _tell_asked(kept: KeptPlan) -> list[str]:
    """Return what was chosen, and what was asked for."""
    best = kept.plan.options[0] if kept.plan.options else None
    chosen = (
        f"{best.world.shape}: {describe_option(best)}; {best.step_s:.4f} s a step, "
        f"{best.samples_per_s:.1f} samples/s"
        if best
        else "No world fits."
    )
    return [
        chosen,
        f"{kept.devices} devices of {kept.memory_bytes / 1e9:.4g} GB, {kept.per_node} a node; "
        f"global batch {kept.global_batch}; {kept.profile} (fingerprint {kept.fingerprint})",
    ]
