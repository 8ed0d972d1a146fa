"""What an active probe makes of an open verdict: one end of a link, a card, or a slow machine.

The probe itself is judged elsewhere (`plan.probe`), outside the training and from other evidence;
here its finding takes the place of what collectives and sockets alone could not settle.
"""

from collections.abc import Mapping

import msgspec

from perdure.model.signals.links import ProbeFinding
from perdure.model.verdicts import Culprit, Verdict


def settle_verdict(
    verdict: Verdict, finding: ProbeFinding, nodes: Mapping[int, int]
) -> Verdict | None:
    """Return the better verdict, where `verdict` asked for a probe and it found something.

    `nodes` says where each rank runs.
    """
    if "probe" not in verdict.evidence or finding.kind == "nothing":
        return None
    kind, culprit = verdict.kind, verdict.culprit
    if finding.kind == "slow link" and finding.link is not None:
        culprit = Culprit(link=_choose_link_ranks(verdict, finding.link, nodes))
    elif finding.kind == "slow host" and verdict.kind == "CommSlow":
        kind, culprit = "Straggler", Culprit(node=finding.node)
    else:
        culprit = Culprit(node=finding.node)
    evidence = {name: value for name, value in verdict.evidence.items() if name != "probe"}
    return msgspec.structs.replace(
        verdict,
        kind=kind,
        culprit=culprit,
        confidence=max(verdict.confidence, finding.confidence),
        reason=f"probe: {finding.reason}; {verdict.reason}",
        evidence={**evidence, "probed": finding.evidence},
    )


def _choose_link_ranks(
    verdict: Verdict, link: tuple[int, int], nodes: Mapping[int, int]
) -> tuple[int, int]:
    """Return the verdict's own ranks where they lie at the link's ends, else each node's first."""
    known = verdict.culprit.link
    if known is not None and (nodes.get(known[0]), nodes.get(known[1])) == link:
        return known
    first = {node: rank for rank, node in sorted(nodes.items(), reverse=True)}
    return first.get(link[0], -1), first.get(link[1], -1)
