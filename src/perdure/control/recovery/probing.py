"""Active probes: begun where evidence alone cannot settle a verdict, or where somebody asks.

One runs at a time. It touches none of the training's communicators, and what it finds goes into
the journal (`ProbeJudged`), where the detector hears of it as of every other event.
"""

from perdure.control.job import JobState, OpenCommand
from perdure.control.membership import membership_of
from perdure.control.membership.members import node_of_member
from perdure.control.membership.observed import describe_withheld
from perdure.model.events import ProbeEnded
from perdure.model.orders import AnyAction, NoteFinding, RunProbe
from perdure.model.signals.links import ProbeFinding
from perdure.model.verdicts import Verdict
from perdure.plan.probe import ProbeSession


def probe_verdict(state: JobState, now: float, verdict: Verdict) -> list[AnyAction]:
    """Begin the probe that a verdict asks for in its evidence, if there is room for one."""
    wanted = verdict.evidence.get("probe")
    if not wanted or state.probe is not None or not state.the_spec().policy.probe:
        return []
    nodes = [node for node in wanted if node in state.nodes]
    links = []
    if verdict.culprit.link is not None:
        src, dst = (node_of_member(state, r) for r in verdict.culprit.link)
        links = [(src, dst)] if src != dst else []
    why = f"{verdict.kind} of {verdict.culprit} leaves open what is slow"
    event = describe_withheld(now, verdict, why, would="probed the links")
    held = membership_of(state).withhold(state.world, event)
    if held is not None:
        return held
    return _begin(state, now, nodes, links, why)


def receive_probe(state: JobState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Begin a probe of all nodes for an operator; refused while another runs."""
    if state.probe is not None:
        return state.answer(command.id, False, "a probe is running already", {})
    state.commands[command.id] = command
    why = f"asked for by {command.who or 'an operator'}"
    return _begin(state, now, [], [], why, command.id)


def take_probe(state: JobState, now: float, event: ProbeEnded) -> list[AnyAction]:
    """Take one node's answer."""
    return _go_on(state, state.probe.take(now, event)) if state.probe is not None else []


def probe_overdue(state: JobState, now: float) -> list[AnyAction]:
    """Go on without the answers that did not come in time."""
    return _go_on(state, state.probe.tick(now)) if state.probe is not None else []


def probe_again(state: JobState) -> list[AnyAction]:
    """Return the open round's order once more."""
    return [state.probe.order] if state.probe is not None and state.probe.order else []


def _begin(
    state: JobState,
    now: float,
    suspects: list[int],
    links: list[tuple[int, int]],
    why: str,
    command: str = "",
) -> list[AnyAction]:
    state.probes += 1
    state.probe = ProbeSession(id=f"p{state.probes}", why=why, command=command)
    nodes = [node for node in sorted(state.nodes) if node not in state.lost]
    return [state.probe.start(now, nodes, suspects, links)]


def _go_on(state: JobState, step: RunProbe | ProbeFinding | None) -> list[AnyAction]:
    probe = state.probe
    if step is None or probe is None:
        return []
    if isinstance(step, RunProbe):
        return [step]
    state.probe = None
    actions: list[AnyAction] = [NoteFinding(id=probe.id, finding=step, reason=step.reason)]
    if probe.command in state.commands:
        result = {
            "kind": step.kind,
            "node": step.node,
            "link": list(step.link) if step.link else None,
            "confidence": step.confidence,
            **step.evidence,
        }
        actions += state.answer(probe.command, True, step.reason, result)
    return actions
