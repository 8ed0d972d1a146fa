"""Which link or network card: from the kernel's counters of the sockets between ranks, or NCCL's.

Busy milliseconds per megabyte is the cell of the delay matrix. A link is compared with the other
links of its class (within a node, between nodes) and with itself before; both must agree, with an
absolute floor, because two links cannot outvote each other. Retransmissions tell loss; a backed
off timer with data to send tells that nobody answers at all. Unread bytes at the far end clear
the link: its host does not read. Several suspects that share one node are that node's card.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from perdure.detect.slowness.persistence import Baseline, Persistence
from perdure.model.signals.links import LinkSample, LinkSweep

FRESH_S = 2.5
"""A sample older than two quiet sweeps says nothing of now."""
SEGMENT = 1448
LOST_MIN = 20
"""Segments sent again in a window; fewer are everyday."""
UNREAD_MIN = 65_536
UNREAD_S = 1.2
MINOR = 0.3
"""A suspect this much less than the worst is slow because of it."""
LINKS_A_S, LINKS_COMPARED = 20_000, 4096
"""What is usual is found so often, from so many links, that many cost no more."""
OTHERS = 2
"""A link stands out from so many others and more."""
CALM = 1.3
"""Below this multiple of itself a link needs no closer look."""
ONE_WAY = 0.6
"""An end that was heard of so much more recently than it hears is heard, and deaf."""
ANSWER_S = 0.3
"""What was sent again is in vain without an answer for so long."""
SLOW_RATIO = 3.0
"""A link is suspected from this multiple of the other links' busy time per byte."""
FUSED_RATIO = 1.4
"""The same if collectives that use it are slow as well."""
SLOW_FLOOR = 1.0
"""Extra busy ms per 10^6 bytes below which no link is slow."""
LOSS_SHARE = 0.005
"""A link is suspected from this share of segments sent again."""
STUCK_S = 0.5
"""Seconds without an acknowledgement after which a link with data to send is stuck."""
NCCL_FLOOR = 0.05
"""Of the floor of sockets: what NCCL sends past the kernel is faster by as much."""
LOSS_EXCESS = 2.0
"""What loss counts for, as an excess, at the threshold."""


@dataclass(slots=True)
class Link:
    """One directed link between two ranks, all communicators together."""

    src: int
    dst: int
    near: bool
    """Within a node."""
    newest: LinkSample
    """All sockets between the two together, as its node has seen them last."""
    learned_s: float = 0.0
    seen_s: float = 0.0
    cell: float = 0.0
    """Busy ms per 10^6 bytes in the last sweep that moved enough; 0 before."""
    cost: float = 0.0
    """Share of the time for which it was busier than usual, over a step at the least."""
    extra_s: float = 0.0
    """For how long it was busier than usual, the past fading with the length of a step."""
    moved_s: float = 0.0
    base: Baseline = field(default_factory=Baseline)
    swept_s: float = 0.0
    """When its node looked last."""
    tried_s: float = 0.0
    """No later than this, the kernel last sent again what nobody had answered."""
    comms: tuple[str, ...] = ()
    slow: Persistence | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """Return from which rank to which it is."""
        return self.src, self.dst

    @property
    def kind(self) -> tuple[bool, str]:
        """Return with which others it may be compared."""
        return self.near, self.newest.source

    def show(self) -> dict[str, object]:
        """Return what is known, as evidence."""
        newest = self.newest
        return {
            "link": [self.src, self.dst],
            "busy_ms_per_mb": round(self.cell, 3),
            "usual_ms_per_mb": round(self.base.value, 3),
            "rtt_ms": round(newest.rtt_s * 1e3, 3),
            "retransmits": newest.retrans,
            "unsent_bytes": newest.unsent_bytes,
            "backoff": newest.backoff,
            "last_ack_s": round(newest.last_ack_s, 3),
            "unread_bytes": newest.unread_bytes,
            "source": newest.source,
        }


class Place(msgspec.Struct, frozen=True):
    """A place in the network where the trouble is."""

    link: tuple[int, int] | None
    node: int | None
    confidence: float
    reason: str
    evidence: dict[str, object]
    probe: tuple[int, ...] = ()
    """Nodes that an active probe should test, where this is not settled."""


class LinkWatch:
    """Judges all links of one generation by the kernel's counters of them."""

    def __init__(self, node_of: Callable[[int], int]) -> None:
        """Begin a generation."""
        self._node_of = node_of
        self.links: dict[tuple[int, int], Link] = {}
        self.step_s = 0.0
        """Learned step time of the job; 0 where it is not known."""
        self.swept_s = -1e9
        """When a sweep came last; long ago where there are none."""
        self._usual: dict[tuple[bool, str], list[float]] = {}
        """Class of links (within a node or not, who counts) -> their cells, sorted."""
        self._usual_s = -1e9
        self._window_s = 0.0
        self._deaf: set[tuple[int, int]] = set()
        """Links whose way back is the one that loses."""

    def take(self, now: float, sweep: LinkSweep) -> None:
        """Take a sweep of one node."""
        self.swept_s = now
        self._window_s = sweep.window_s
        by_ends: dict[tuple[int, int], list[LinkSample]] = {}
        for sample in sweep.links:
            by_ends.setdefault((sample.src, sample.dst), []).append(sample)
        if now - self._usual_s > max(0.5, len(self.links) / LINKS_A_S):
            self._usual_s = now
            self._sort_cells(now)
        for key, samples in by_ends.items():
            sample = samples[0] if len(samples) == 1 else _merge(samples)
            link = self.links.get(key)
            if link is None or link.newest.source != sample.source:  # Another network, perhaps.
                near = self._node_of(key[0]) == self._node_of(key[1])
                link = self.links[key] = Link(*key, near, sample)
            if sample.backoff > link.newest.backoff:
                link.tried_s = min(link.swept_s, link.seen_s)
            link.newest, link.seen_s, link.swept_s = sample, now, sweep.at_s
            link.comms = tuple(sorted({each.comm for each in samples}))
            if sample.bytes_acked >= 100_000:
                self._update(now, link, sample.bytes_acked, sample.busy_s)

    def _update(self, now: float, link: Link, acked: int, busy_s: float) -> None:
        cell = link.cell = busy_s * 1e9 / acked
        gap_s = now - link.moved_s
        link.moved_s = now
        calm = cell <= self._floor_of(link) or cell <= CALM * link.base.value
        excess = 0.0 if calm and link.newest.retrans < LOST_MIN else self._compute_excess(link)
        if link.slow is None and excess > 0.0:
            link.slow = Persistence(now, 0.1)
        if link.slow is not None:
            link.slow.add(now, excess)
            self._follow_cost(link, busy_s - link.base.value * acked / 1e9, gap_s)
            if link.slow.is_over(now, 30.0):
                link.slow = None
        if now - link.learned_s >= 0.9 or not link.base.known:
            link.learned_s = now
            link.base.add(now, max(cell, 1e-3), SLOW_RATIO / 2)

    @property
    def kept_s(self) -> float:
        """Return over how long what links cost is summed up: a step, or a sweep if longer."""
        return max(self._window_s, self.step_s)

    def _follow_cost(self, link: Link, extra_s: float, gap_s: float) -> None:
        """Follow which share of the time a link costs: what training loses is counted in steps.

        In a step of 10 s a sweep of one second is no measure of it: twice as busy in that second
        is a tenth of the step, and no reason for a step that takes twice as long.
        """
        window_s = self._window_s
        if window_s <= 0.0:
            return
        length_s = self.kept_s
        link.extra_s = link.extra_s * math.exp(-gap_s / length_s) + max(extra_s, 0.0)
        cost = link.extra_s * (1.0 - math.exp(-window_s / length_s)) / window_s
        link.cost = max(cost, 0.5 * link.cost)

    def _sort_cells(self, now: float) -> None:
        """Keep the cells of each class sorted: what the others are like (of many, some)."""
        self._usual = {}
        every = max(1, len(self.links) // LINKS_COMPARED)
        for link in islice(self.links.values(), 0, None, every):
            if link.cell > 0.0 and now - link.moved_s <= FRESH_S:
                self._usual.setdefault(link.kind, []).append(link.cell)
        for cells in self._usual.values():
            cells.sort()

    def _floor_of(self, link: Link) -> float:
        by_nccl = link.newest.source == "nccl"
        return SLOW_FLOOR * (NCCL_FLOOR if by_nccl else 1.0)

    def _compute_excess(self, link: Link) -> float:
        """Return the excess of a link's busy time or loss over what is usual; 0 within it."""
        cells = self._usual.get(link.kind, [])
        others = cells[(len(cells) - 1) // 2] if len(cells) > 1 else 0.0
        usual = max(others, link.base.value)
        if usual > 0.0:
            ratio = link.cell / usual
            extra = link.cell - usual
            if ratio >= FUSED_RATIO and extra >= self._floor_of(link):
                return ratio - 1.0
        lost = link.newest.retrans * SEGMENT / link.newest.bytes_acked
        if lost >= LOSS_SHARE and link.newest.retrans >= LOST_MIN:
            return LOSS_EXCESS * lost / LOSS_SHARE
        return 0.0

    def is_unread(self, link: Link) -> bool:
        """Return whether the far end has received more than it has read: its host is behind."""
        back = self.links.get((link.dst, link.src))
        if back is None or link.seen_s - back.seen_s > UNREAD_S:
            return False  # A look long ago: what is still unread is told of in every sweep.
        return back.newest.unread_bytes >= UNREAD_MIN

    def list_slow_links(self, now: float, *, fused: bool) -> list[Link]:
        """Return links under suspicion now, the worst first.

        `fused`: there is other evidence that communication is slow, so that less is enough.
        """
        least = FUSED_RATIO if fused else SLOW_RATIO
        slow = [
            link
            for link in self.links.values()
            if link.slow is not None
            and now - link.slow.seen_s <= FRESH_S
            and link.slow.lasting(now, FRESH_S) >= 0.9 * (least - 1.0)
            and not self.is_unread(link)
        ]
        excess = {x.ends: x.slow.recent(now, FRESH_S) for x in slow if x.slow is not None}
        worst = max(excess.values(), default=0.0)
        clear = [x for x in slow if excess[x.ends] >= MINOR * worst]
        return sorted(clear, key=lambda x: (-excess[x.ends], x.ends))

    def stands_out(self, now: float, ends: tuple[int, int], nodes: set[int]) -> bool:
        """Return whether a link is slow alone, of all that begin or end on `nodes`.

        What their machines do to one of them, they do to all. Two others must have moved enough.
        """
        link = self.links.get(ends)
        if link is None or link.slow is None or not link.base.known:
            return False
        if link.slow.lasting(now, FRESH_S) < SLOW_RATIO - 1.0:
            return False
        extra = MINOR * (link.cell - link.base.value)
        others = [
            other.base.known and other.cell - other.base.value <= extra
            for other in self.links.values()
            if other is not link
            and now - other.moved_s <= FRESH_S
            and not nodes.isdisjoint(self._nodes_of(other))
        ]
        return len(others) >= OTHERS and all(others)

    def _list_unanswered(self, now: float) -> list[Link]:
        return [
            link
            for link in self.links.values()
            if now - link.seen_s <= FRESH_S
            and link.newest.backoff > 0
            and link.newest.last_ack_s >= STUCK_S
            and not self.is_unread(link)
        ]

    def is_in_vain(self, now: float, since_s: float) -> bool:
        """Return whether what the kernel has sent since then had no answer either.

        It waits twice as long each time before it sends again, and a link that has come back
        meanwhile looks as dead as before. Where no link is stuck, there is nothing to wait for.
        """
        stuck = self._list_unanswered(now)
        return not stuck or any(
            x.tried_s >= since_s and x.swept_s - x.tried_s >= ANSWER_S for x in stuck
        )

    def list_stuck_links(self, now: float) -> list[Link]:
        """Return links that have something to send and get no answer, the worst first."""
        stuck = self._list_unanswered(now)
        self._deaf = {x.ends for x in stuck if self._is_deaf(now, x)}
        turned = [self.links[x.dst, x.src] if x.ends in self._deaf else x for x in stuck]
        return sorted({x.ends: x for x in turned}.values(), key=_rate_stuck)

    def _is_deaf(self, now: float, link: Link) -> bool:
        """Return whether `src` hears nothing from a `dst` that does hear `src`.

        Then the way back is what loses, acknowledgements with the rest. A sample grows old with
        the time since its sweep, so that one from before the trouble proves nothing.
        """
        back = self.links.get((link.dst, link.src))
        if back is None:
            return False
        heard_s = back.newest.last_ack_s + now - back.seen_s
        return heard_s < ONE_WAY * (link.newest.last_ack_s + now - link.seen_s)

    def _nodes_of(self, link: Link) -> tuple[int, int]:
        return self._node_of(link.src), self._node_of(link.dst)

    def place(self, now: float, guilty: list[Link], word: str) -> Place | None:
        """Return the link, or the node, that explains the `guilty` (the worst first)."""
        if not guilty:
            return None
        evidence: dict[str, object] = {"links": [link.show() for link in guilty[:8]]}
        far = [x for x in guilty if self._node_of(x.src) != self._node_of(x.dst)]
        if not far:
            several = len({x.ends for x in guilty}) > 1
            probe = (self._node_of(guilty[0].src),) if several else ()
            return self._pin(guilty[0], word, 0.8 if several else 0.9, evidence, probe)
        pairs = sorted({self._nodes_of(x) for x in far})
        if len(pairs) == 1:
            return self._single(now, far[0], pairs[0], word, evidence)
        nodes = sorted({n for pair in pairs for n in pair})
        shared = min(set.intersection(*map(set, pairs)), default=None)
        if shared is None:
            return self._pin(far[0], word, 0.5, evidence, tuple(nodes[:8]))
        if len(nodes) == 2:
            return self._both_ways(far, word, evidence)
        reason = (
            f"{len(pairs)} {word} links between nodes, all from or to node {shared}: its network"
        )
        confidence = 0.9 if self._is_most(now, shared, pairs) or len(nodes) > 2 else 0.7
        return Place(None, shared, confidence, reason, evidence)

    def _single(
        self,
        now: float,
        worst: Link,
        pair: tuple[int, int],
        word: str,
        evidence: dict[str, object],
    ) -> Place:
        """One pair of nodes, one direction: its link, unless it is all that either card does."""
        active = self._active_pairs(now)
        others = [p for p in active if p != pair and (p[0] == pair[0] or p[1] == pair[1])]
        settled = bool(others) or (worst.dst, worst.src) in self._deaf
        return self._pin(worst, word, 0.9 if settled else 0.8, evidence, () if settled else pair)

    def _both_ways(self, far: list[Link], word: str, evidence: dict[str, object]) -> Place:
        """Both directions of one pair of nodes: the worse one, or either card."""
        worst = far[0]
        back = [x for x in far if self._node_of(x.src) == self._node_of(worst.dst)]
        nodes = tuple(sorted(set(self._nodes_of(worst))))
        clear = not back or worst.cell > 3 * back[0].cell > 0
        return self._pin(worst, word, 0.8 if clear else 0.6, evidence, nodes)

    def _pin(
        self,
        link: Link,
        word: str,
        confidence: float,
        evidence: dict[str, object],
        probe: tuple[int, ...],
    ) -> Place:
        facts = []
        if link.newest.backoff:
            facts.append(f"no answer for {link.newest.last_ack_s:.1f} s")
        elif link.cell and link.base.known:
            usual = _show_ms(link.base.value)
            facts.append(f"{_show_ms(link.cell)} ms busy per MB, usually {usual}")
        elif link.cell:
            facts.append(f"{_show_ms(link.cell)} ms busy per MB")
        if link.newest.retrans >= LOST_MIN:
            facts.append(f"{link.newest.retrans} segments sent again")
        reason = f"link {link.src}->{link.dst} is {word}: {', '.join(facts) or 'see the links'}"
        return Place(link.ends, None, confidence, reason, evidence, probe)

    def _active_pairs(self, now: float) -> set[tuple[int, int]]:
        """Return the pairs of nodes between which a link was seen lately."""
        seen = (self._nodes_of(x) for x in self.links.values() if now - x.seen_s <= FRESH_S)
        return {(src, dst) for src, dst in seen if src != dst}

    def have_choice(self, now: float) -> bool:
        """Return whether a link between nodes has others to be compared with."""
        return len(self._active_pairs(now)) > 2

    def _is_most(self, now: float, node: int, pairs: list[tuple[int, int]]) -> bool:
        active = {p for p in self._active_pairs(now) if node in p}
        return 2 * len(active & set(pairs)) >= len(active)


def _show_ms(ms: float) -> str:
    """Return a cell in words; InfiniBand's are hundredths.

    >>> _show_ms(0.0402), _show_ms(140.41)
    ('0.04', '140.4')
    """
    return f"{ms:.1f}" if ms >= 1.0 else f"{ms:.2g}"


def _rate_stuck(link: Link) -> tuple[float, ...]:
    """Return what comes first of the links that nobody answers on: what waits, and how long."""
    newest = link.newest
    return -(newest.unsent_bytes > 0), -newest.backoff, -newest.unsent_bytes, *link.ends


def _merge(samples: list[LinkSample]) -> LinkSample:
    """Return the sockets of several communicators between the same two ranks as one."""
    worst = max(samples, key=lambda s: (s.backoff, s.unsent_bytes, s.last_ack_s))
    return msgspec.structs.replace(
        worst,
        rtt_s=max(s.rtt_s for s in samples),
        retrans=sum(s.retrans for s in samples),
        unread_bytes=sum(s.unread_bytes for s in samples),
        bytes_acked=sum(s.bytes_acked for s in samples),
        busy_s=sum(s.busy_s for s in samples),
    )
