"""Which nodes an active probe pairs, and what its transfers prove.

A slow transfer says that one of three things is slow: the one card, the other, or the path
between. Two rounds settle it: the members of the slowest pair are paired again with those of the
fastest. A card stays slow with whoever it is paired with; a link is slow only between its two
ends. Both directions of a pair are measured. Times are compared with the fastest quarter of what
the same probe measured, never with a constant: no probe knows the network it runs on, and a slow
card can be an end of two thirds of a small probe's pairs.

Two nodes have no third to compare with: a slow direction is told by the other one; where both are
slow alike, nothing is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeVar

import msgspec

from perdure.model.events import ProbeEnded
from perdure.model.orders import RunProbe
from perdure.model.signals.links import HostProbe, PairProbe, ProbeFinding

PAIR_RATIO, PAIR_FLOOR_S = 2.0, 0.02
"""A transfer is slow from this multiple of the reference, and this much above it."""
HOST_RATIO, HOST_FLOOR_S = 1.5, 0.01
ANSWER_S = 1.5
"""Beyond a round's own deadline: for orders and answers to arrive."""

Pair = tuple[int, int]
_Key = TypeVar("_Key", int, tuple[int, int])


def plan_first(
    nodes: Iterable[int], suspects: Iterable[int] = (), links: Iterable[Pair] = ()
) -> tuple[Pair, ...]:
    """Return round 1: suspected links as they are, each other suspect with one that is none.

    With an odd number of nodes, one is left out.
    """
    free = sorted(set(nodes))
    pairs: list[Pair] = []

    def take(one: int, other: int) -> None:
        pairs.append((one, other))
        free.remove(one)
        free.remove(other)

    for src, dst in links:
        if src != dst and src in free and dst in free:
            take(src, dst)
    wanted = set(suspects)
    for suspect in sorted(wanted):
        others = [node for node in free if node != suspect]
        if suspect in free and others:
            take(suspect, next((n for n in others if n not in wanted), others[0]))
    while len(free) > 1:
        take(free[0], free[1])
    return tuple(pairs)


def plan_next(nodes: Iterable[int], measured: Sequence[PairProbe]) -> tuple[Pair, ...]:
    """Return the next round: the slowest pairs' members with those of the fastest."""
    tested = {frozenset((p.src, p.dst)) for p in measured}
    last = max((p.round for p in measured), default=0)
    cost: dict[frozenset[int], float] = {}
    for p in measured:
        if p.round == last:
            key = frozenset((p.src, p.dst))
            cost[key] = max(cost.get(key, 0.0), p.seconds or float("inf"))
    ordered = [tuple(sorted(k)) for k in sorted(cost, key=lambda k: (-cost[k], sorted(k)))]
    idle = sorted(set(nodes) - {n for pair in ordered for n in pair})
    pairs: list[Pair] = []
    while len(ordered) > 1:
        (a, b), (c, d) = ordered.pop(0), ordered.pop()
        crossed = ((a, c), (b, d)), ((a, d), (b, c))
        pairs += min(crossed, key=lambda two: sum(frozenset(p) in tested for p in two))
    left = [n for pair in ordered for n in pair] + idle
    while len(left) > 1:
        pair = min(combinations(left, 2), key=lambda two: frozenset(two) in tested)
        left = [node for node in left if node not in pair]
        pairs.append(pair)
    return tuple(pairs)


def judge(pairs: Iterable[PairProbe], hosts: Iterable[HostProbe] = ()) -> ProbeFinding:
    """Return what all rounds together prove."""
    seconds = _fold(((p.src, p.dst), p.seconds) for p in pairs)
    machines = _fold((h.node, h.seconds) for h in hosts)
    slow = _list_slow(seconds, PAIR_RATIO, PAIR_FLOOR_S)
    slow_hosts = _list_slow(machines, HOST_RATIO, HOST_FLOOR_S)
    evidence = {
        "pairs": [[*key, _round(s)] for key, s in sorted(seconds.items())],
        "hosts": [[node, _round(s)] for node, s in sorted(machines.items())],
    }
    if slow:
        return _judge_network(seconds, slow, slow_hosts, evidence)
    if slow_hosts:
        node = max(slow_hosts, key=lambda n: (machines[n], n))
        return _blame_host(node, machines, evidence)
    return ProbeFinding(kind="nothing", reason=_say_nothing(seconds, machines), evidence=evidence)


def _judge_network(
    seconds: dict[Pair, float],
    slow: set[Pair],
    slow_hosts: set[int],
    evidence: dict[str, Any],
) -> ProbeFinding:
    partners = _count_partners(seconds)
    slow_partners = _count_partners(slow)
    cards = [
        node
        for node in sorted(slow_partners)
        if len(partners[node]) > 1 and slow_partners[node] == partners[node]
    ]
    explained = {key for key in slow if key[0] in cards or key[1] in cards}
    if cards and explained == slow:
        node = max(cards, key=lambda n: (_worst(seconds, slow, n), -n))
        if node in slow_hosts:
            finding = f"node {node} computes slowly, and so does whatever it transfers"
            return ProbeFinding(
                kind="slow host", node=node, reason=finding, confidence=0.9, evidence=evidence
            )
        count = len(partners[node])
        way = _describe_way(slow, node)
        reason = f"node {node} is slow {way} with each of its {count} partners"
        if len(cards) > 1:
            reason += f"; so are nodes {[n for n in cards if n != node]}"
        return ProbeFinding(
            kind="slow NIC", node=node, reason=reason, confidence=0.9, evidence=evidence
        )
    worst = max(slow, key=lambda key: (seconds[key], key))
    src, dst = worst
    both = (dst, src) in slow
    reason = f"transfers from node {src} to node {dst} are slow" + (", and back" if both else "")
    settled = len(partners[src]) > 1 and len(partners[dst]) > 1
    if (dst, src) not in seconds:
        reason += " (nothing came back, so the direction is not sure)"
    if settled:
        reason += "; both are fast with others"
    else:
        reason += "; whether the path or one of the two cards, no third node could tell"
    others = sorted({tuple(sorted(key)) for key in slow} - {tuple(sorted(worst))})
    if others:
        reason += f"; also slow: {others}"
    confidence = 0.9 if settled and not others else 0.6
    return ProbeFinding(
        kind="slow link", link=worst, reason=reason, confidence=confidence, evidence=evidence
    )


def _blame_host(node: int, machines: dict[int, float], evidence: dict[str, Any]) -> ProbeFinding:
    reference = _compute_reference(machines.values())
    took = machines[node]
    words = "did not end in time" if took == float("inf") else f"took {took / reference:.1f} times"
    return ProbeFinding(
        kind="slow host",
        node=node,
        reason=f"the same arithmetic {words} on node {node}; its transfers are not slow",
        confidence=0.8,
        evidence=evidence,
    )


def _say_nothing(seconds: dict[Pair, float], machines: dict[int, float]) -> str:
    if not seconds and not machines:
        return "nothing was measured: no node answered"
    parts = []
    if seconds:
        ratio = max(seconds.values()) / max(_compute_reference(seconds.values()), 1e-9)
        parts.append(f"{len(seconds)} transfers within {ratio:.1f} times of the fast ones")
    if len(machines) > 1:
        ratio = max(machines.values()) / max(_compute_reference(machines.values()), 1e-9)
        parts.append(f"arithmetic within {ratio:.1f} times")
    return "; ".join(parts) or "one node alone cannot be compared"


def _fold(measured: Iterable[tuple[_Key, float]]) -> dict[_Key, float]:
    """Return the best time of each direction, or machine; infinite where none ended (0)."""
    found: dict[_Key, float] = {}
    for key, seconds in measured:
        found[key] = min(found.get(key, float("inf")), seconds or float("inf"))
    return found


def _list_slow(times: dict[_Key, float], ratio: float, floor_s: float) -> set[_Key]:
    if len(times) < 2:
        return {key for key, s in times.items() if s == float("inf")}
    reference = _compute_reference(times.values())
    if reference == float("inf"):
        return set(times)
    limit = max(ratio * reference, reference + floor_s)
    return {key for key, s in times.items() if s > limit}


def _compute_reference(times: Iterable[float]) -> float:
    """Return the time that a quarter does not exceed."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 4]


def _count_partners(keys: Iterable[Pair]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for one, other in keys:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return found


def _worst(seconds: dict[Pair, float], slow: set[Pair], node: int) -> tuple[int, float]:
    mine = [seconds[key] for key in slow if node in key]
    return len(mine), max(mine)


def _describe_way(slow: set[Pair], node: int) -> str:
    sends = any(src == node for src, _ in slow)
    receives = any(dst == node for _, dst in slow)
    return "both ways" if sends and receives else "in sending" if sends else "in receiving"


def _round(seconds: float) -> float | None:
    return None if seconds == float("inf") else round(seconds, 5)


@dataclass(slots=True)
class ProbeSession:
    """One probe from its first order to its finding. Time is an argument; nothing is sent here."""

    id: str
    bytes: int = 8_000_000
    deadline_s: float = 2.0
    """The time that each round has."""
    why: str = ""
    """Put into the orders as their reason."""
    command: str = ""
    """Id of the operator's command behind it; empty for the controller's own."""
    nodes: tuple[int, ...] = ()
    order: RunProbe | None = None
    """The order of the round that is open."""
    answers: list[ProbeEnded] = field(default_factory=list)
    confirming: bool = False
    """The round is one more look at what seemed slow: a neighbour's burst is not seen twice."""
    due_s: float | None = None
    """When the open round is given up, and `tick` is to be called; None after the finding."""

    def start(
        self,
        now: float,
        nodes: Iterable[int],
        suspects: Iterable[int] = (),
        links: Iterable[Pair] = (),
    ) -> RunProbe:
        """Return the first round's order. `suspects` are nodes, `links` pairs of nodes."""
        self.nodes = tuple(sorted(set(nodes)))
        return self._ask(now, 1, plan_first(self.nodes, suspects, links))

    def take(self, now: float, event: ProbeEnded) -> RunProbe | ProbeFinding | None:
        """Take a node's answer; return the next order, the finding, or None while others miss."""
        order = self.order
        if order is None or self.due_s is None or event.id != self.id:
            return None
        if (event.round, event.node) not in {(a.round, a.node) for a in self.answers}:
            self.answers.append(event)
        if self._list_silent(order):
            return None
        return self._go_on(now, order)

    def tick(self, now: float) -> RunProbe | ProbeFinding | None:
        """Return what follows where answers did not come in time."""
        if self.order is None or self.due_s is None or now < self.due_s:
            return None
        return self._go_on(now, self.order)

    def _go_on(self, now: float, order: RunProbe) -> RunProbe | ProbeFinding:
        answers = sorted(self.answers, key=lambda answer: (answer.round, answer.node))
        measured = [p for answer in answers for p in answer.pairs]
        rounds = 3 if len(self.nodes) == 3 else 2
        if order.round < rounds and measured and not self.confirming:
            pairs = plan_next(self.nodes, measured)
            if pairs:
                return self._ask(now, order.round + 1, pairs)
        finding = judge(measured, [h for answer in answers for h in answer.hosts])
        if not self.confirming and (doubtful := _choose_doubtful(finding, measured)):
            self.confirming = True
            return self._ask(now, order.round + 1, doubtful)
        self.due_s = None
        silent = self._list_silent(order)
        errors = {str(answer.node): answer.error for answer in answers if answer.error}
        evidence = finding.evidence | {
            name: value for name, value in (("silent", silent), ("errors", errors)) if value
        }
        return msgspec.structs.replace(finding, evidence=evidence)

    def _list_silent(self, order: RunProbe) -> list[int]:
        answered = {answer.node for answer in self.answers if answer.round == order.round}
        asked = {node for pair in order.pairs for node in pair} | set(order.hosts)
        return sorted(asked - answered)

    def _ask(self, now: float, number: int, pairs: tuple[Pair, ...]) -> RunProbe:
        self.due_s = now + self.deadline_s + ANSWER_S
        self.order = RunProbe(
            id=self.id,
            round=number,
            pairs=pairs,
            hosts=self.nodes if number == 1 else (),
            bytes=self.bytes,
            deadline_s=self.deadline_s,
            reason=self.why or f"round {number} of probe {self.id}",
        )
        return self.order


def _choose_doubtful(finding: ProbeFinding, measured: Sequence[PairProbe]) -> tuple[Pair, ...]:
    """Return the pair behind a finding about the network, to be measured once more, alone."""
    if finding.link is not None:
        return (finding.link,)
    if finding.kind != "slow NIC":
        return ()
    mine = [p for p in measured if finding.node in (p.src, p.dst)]
    slowest = max(mine, key=lambda p: (p.seconds or float("inf"), p.round))
    return ((slowest.src, slowest.dst),)
