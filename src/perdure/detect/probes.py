"""What an active probe settles: a slow link, a slow card or a slow host.

Pairs of nodes transferred data and each node computed a fixed piece, outside the training. With
re-pairing, a card is slow with every partner and a link only with one. Ratios to the median of
what was measured, nothing absolute.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from perdure.model.events import ProbeEnded
from perdure.model.job import JobSpec
from perdure.model.links import HostProbe, PairProbe
from perdure.model.verdicts import Culprit, Verdict, VerdictKind

SLOW_RATIO = 2.0
PROBES_KEPT = 4
SETTLED = 0.95
_K = TypeVar("_K")


class ProbeResults:
    """Parts of the last probes."""

    def __init__(self) -> None:
        """Begin with none."""
        self._parts: dict[str, dict[tuple[int, int], ProbeEnded]] = {}

    def take(self, event: ProbeEnded) -> None:
        """Take one node's part of one round; the same part twice counts once."""
        self._parts.setdefault(event.id, {})[event.round, event.node] = event
        while len(self._parts) > PROBES_KEPT:
            del self._parts[next(iter(self._parts))]

    def of(self, probe_id: str) -> tuple[ProbeEnded, ...]:
        """Return all parts of one probe."""
        parts = self._parts.get(probe_id, {})
        return tuple(parts[key] for key in sorted(parts))


def judge_probe(spec: JobSpec, verdict: Verdict, parts: tuple[ProbeEnded, ...]) -> Verdict | None:
    """Return a better verdict than the open one, where the probe settles it; else None.

    Only a verdict that asked for a probe is settled by one.
    """
    if "probe" not in verdict.evidence:
        return None
    pairs = [pair for part in parts for pair in part.pairs]
    slow_hosts = _find_slow_hosts([host for part in parts for host in part.hosts])
    slow, nodes = _find_slow_pairs(pairs)
    probe: dict[str, object] = {
        "pairs": [[p.src, p.dst, round(p.seconds, 4)] for p in pairs[:32]],
        "slow_hosts": slow_hosts,
    }
    if slow_hosts and len(slow_hosts) == 1 and verdict.kind in ("CommSlow", "Straggler"):
        (node,) = slow_hosts
        reason = f"probe: node {node} computes slowly, and so does what it takes part in"
        return _settle(verdict, "Straggler", Culprit(node=node), reason, probe)
    if len(nodes) == 1:
        (node,) = nodes
        reason = f"probe: every transfer of node {node} is slow, whatever its partner"
        return _settle(verdict, verdict.kind, Culprit(node=node), reason, probe)
    if len(slow) == 1 and not nodes:
        src, dst = slow[0]
        link = verdict.culprit.link
        if link is None or (spec.node_of(link[0]), spec.node_of(link[1])) != (src, dst):
            link = (spec.ranks_of(src)[0], spec.ranks_of(dst)[0])
        reason = f"probe: only transfers from node {src} to node {dst} are slow"
        return _settle(verdict, verdict.kind, Culprit(link=link), reason, probe)
    return None


def _settle(
    verdict: Verdict,
    kind: VerdictKind,
    culprit: Culprit,
    reason: str,
    probe: dict[str, object],
) -> Verdict:
    evidence = {k: v for k, v in verdict.evidence.items() if k != "probe"}
    return msgspec.structs.replace(
        verdict,
        kind=kind,
        culprit=culprit,
        confidence=SETTLED,
        reason=f"{reason}; {verdict.reason}",
        evidence={**evidence, "probed": probe},
    )


def _find_slow_hosts(hosts: list[HostProbe]) -> list[int]:
    best: dict[int, float] = {}
    for host in hosts:
        seconds = host.seconds or float("inf")
        best[host.node] = min(best.get(host.node, float("inf")), seconds)
    if len(best) < 2:
        return []
    return [n for n, s in sorted(best.items()) if s >= SLOW_RATIO * _median_without(best, n)]


def _find_slow_pairs(pairs: list[PairProbe]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return slow directed pairs, and the nodes that are slow with each of several partners."""
    best: dict[tuple[int, int], float] = {}
    for pair in pairs:
        seconds = pair.seconds or float("inf")
        key = (pair.src, pair.dst)
        best[key] = min(best.get(key, float("inf")), seconds)
    if len(best) < 2:
        return [], []
    slow = [k for k, s in sorted(best.items()) if s >= SLOW_RATIO * _median_without(best, k)]
    nodes = []
    for node in sorted({n for key in slow for n in key}):
        mine = [k for k in best if node in k]
        partners = {k[0] + k[1] - node for k in mine if k in slow}
        if len(partners) > 1 and 2 * len([k for k in mine if k in slow]) > len(mine):
            nodes.append(node)
    explained = [k for k in slow if not any(n in k for n in nodes)]
    return (slow if not nodes else explained), nodes


def _median_without(best: Mapping[_K, float], key: _K) -> float:
    others = sorted(seconds for other, seconds in best.items() if other != key)
    return others[len(others) // 2]
