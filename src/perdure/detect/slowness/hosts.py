"""Others' work on a machine: no core is idle, or ranks are ready to run and have no CPU to run on.

On a busy machine everything is late: ranks, the threads that send for them, and what stands
between. It looks like a slow link, or a slow rank, and is neither. A machine that the job's own
ranks fill is another matter: that is theirs to mend. Of what ranks wait for a CPU the usual is left
out: also an idle machine makes threads wait for one another.
"""

from collections import deque
from dataclasses import dataclass, field

from perdure.detect.slowness.persistence import Baseline
from perdure.model.signals.progress import HostLoad, NodeBeat

FULL = 0.85
"""Share of the cores in use from which a process waits for one."""
OTHERS = 0.15
"""Share of the cores that others use from which it matters."""
WAITED = 0.1
"""Seconds a second that ranks wait for a CPU, in sum, from which they feel it."""
CONFIRM_S = 3.0
"""A machine is busy with others' work once it was for this long."""
BREAK_S = 1.5
"""Moments with an idle core end it after so long."""
THROTTLED = 0.1
"""Share of the scheduler's periods stopped by a CPU limit from which it is said."""
FRESH_S = 3.0
LOOKS_KEPT = 64
THROTTLES_KEPT = 10
WAITS_COST = 1.6
"""A second that ranks wait for a CPU costs the job so many at most: others wait for them."""
EXPLAINED = 0.3
"""Share of the looks in which a machine was busy that explains what was slow there meanwhile."""


@dataclass(slots=True)
class _Node:
    load: HostLoad
    taken_s: float
    since_s: float = 0.0
    busy_s: float = float("-inf")
    """When the machine was last seen busy with others' work."""
    seen: HostLoad | None = None
    """What was seen at that time."""
    others: float = 0.0
    """Cores in use by others, at that time."""
    throttled: deque[float] = field(default_factory=lambda: deque(maxlen=THROTTLES_KEPT))
    """What its newest looks say of its CPU limit."""
    looks: deque[tuple[float, bool, float]] = field(
        default_factory=lambda: deque(maxlen=LOOKS_KEPT)
    )
    """When it was looked at, whether it was busy with others' work then, and how long its ranks
    waited for a CPU, in sum."""


class HostWatch:
    """The machines of one generation's nodes."""

    def __init__(self) -> None:
        """Begin a generation."""
        self._nodes: dict[int, _Node] = {}
        self._mates: dict[str, set[int]] = {}
        """Machine -> its nodes; where it is unknown, each node has its own."""

    def take(self, now: float, beat: NodeBeat) -> None:
        """Take a look at a node's cores."""
        load = beat.host
        if load is None:
            return
        node = self._nodes.get(beat.node)
        if node is None:
            node = self._nodes[beat.node] = _Node(load, now)
            self._mates.setdefault(load.host or f"node {beat.node}", set()).add(beat.node)
        node.load, node.taken_s = load, now
        node.throttled.append(min(max(load.throttled, 0.0), 1.0))
        mates = [self._nodes[mate] for mate in self.list_nodes_beside(beat.node)]
        own = sum(mate.load.own for mate in mates if now - mate.taken_s <= FRESH_S)
        others = load.busy - own
        full = load.cores > 0 and load.busy >= FULL * load.cores
        busy = full and others >= OTHERS * load.cores and load.waited >= WAITED
        node.looks.append((now, busy, load.waited))
        if busy:
            if now - node.busy_s > BREAK_S:
                node.since_s = now
            node.busy_s, node.seen, node.others = now, load, others

    def explains(self, now: float, node: int, since_s: float, lost: float = 0.0) -> bool:
        """Return whether others' work explains what is slow on a node since `since_s`.

        A moment of it does not, nor does it where training has `lost` a share of its time that is
        far larger than what the node's ranks waited for a CPU.
        """
        known = self._nodes.get(node)
        if known is None:
            return False
        looks = [look for look in known.looks if look[0] > min(since_s, now - BREAK_S)]
        waited = max((waited for _, busy, waited in looks if busy), default=0.0)
        often = sum(busy for _, busy, _ in looks) >= EXPLAINED * len(looks)
        return bool(looks) and often and lost <= WAITS_COST * waited

    def list_busy_nodes(self, now: float) -> list[int]:
        """Return the nodes whose machines have been busy with others' work for a while."""
        return sorted(
            node
            for node, known in self._nodes.items()
            if now - known.busy_s <= BREAK_S and known.busy_s - known.since_s >= CONFIRM_S
        )

    def busy_since_s(self, node: int) -> float:
        """Return since when a node's machine is busy with others' work."""
        return self._nodes[node].since_s

    def list_nodes_beside(self, node: int) -> set[int]:
        """Return the nodes of a node's machine, itself included."""
        return self._mates.get(self._nodes[node].load.host or f"node {node}", {node})

    def describe_limit(self, node: int) -> tuple[str, dict[str, object]]:
        """Return, in words that end a sentence and as evidence, how a CPU limit stops a node."""
        known = self._nodes.get(node)
        shares = known.throttled if known is not None else ()
        share = sum(shares) / len(shares) if shares else 0.0
        if share < THROTTLED:
            return "", {}
        words = (
            f"; the CPU limit of its cgroup stopped it in {share:.0%} of the scheduler's periods"
        )
        return words, {"cpu_throttled": round(share, 3)}

    def describe(self, node: int) -> tuple[str, dict[str, object]]:
        """Return in words, and as evidence, what a node's machine is busy with."""
        known = self._nodes[node]
        load = known.seen or known.load
        limit, throttled = self.describe_limit(node)
        words = (
            f"{load.busy:.1f} of {load.cores} cores are in use, {known.others:.1f} of them by "
            f"processes that are not the job's, and its ranks wait for a CPU for {load.waited:.2f} "
            f"s of every second, in sum{limit}"
        )
        evidence: dict[str, object] = {
            "cores": load.cores,
            "busy_cores": load.busy,
            "others_cores": round(known.others, 3),
            "run_delay_share": load.waited,
            **throttled,
        }
        if load.pressure >= 0.0:
            evidence["cpu_pressure"] = load.pressure
        return words, evidence


STARVED = 0.05
"""Share of the time without a CPU from which it may be felt elsewhere."""
CHAIN = 4
"""Ranks whose waits add up: in a ring the next one waits for each of them."""
SAMPLE_S = 1.0
FADE = 0.7
"""Neighbours come and go: what they took is forgotten slowly."""


@dataclass(slots=True)
class _Cpu:
    at_s: float
    run_delay_s: float
    usual: Baseline = field(default_factory=Baseline)
    share: float = 0.0
    waited: float = 0.0
    """Without a CPU altogether, what is usual included."""


class Neighbours:
    """Shares of the time beyond what is usual, by rank; all threads of it together."""

    def __init__(self) -> None:
        """Begin a generation."""
        self._cpu: dict[int, _Cpu] = {}

    def take(self, rank: int, sent_s: float, run_delay_s: float) -> None:
        """Take what a heartbeat says."""
        cpu = self._cpu.get(rank)
        if cpu is None:
            self._cpu[rank] = _Cpu(sent_s, run_delay_s)
        elif sent_s - cpu.at_s >= SAMPLE_S:
            share = (run_delay_s - cpu.run_delay_s) / (sent_s - cpu.at_s)
            cpu.waited = max(share, FADE * cpu.waited)
            cpu.usual.add(sent_s, max(share, STARVED), 1.5)
            share = max(share - cpu.usual.value, 0.0) if cpu.usual.known else 0.0
            cpu.at_s, cpu.run_delay_s = sent_s, run_delay_s
            cpu.share = max(share, FADE * cpu.share)

    def forget(self, rank: int) -> None:
        """Forget a rank that has left."""
        self._cpu.pop(rank, None)

    def taken_from(self, rank: int) -> float | None:
        """Return the share taken from a rank; None where unknown."""
        cpu = self._cpu.get(rank)
        return None if cpu is None else cpu.share

    def is_starved(self, rank: int) -> bool:
        """Return whether a rank had to wait for a CPU for long enough to be felt, by whomever."""
        cpu = self._cpu.get(rank)
        return cpu is not None and cpu.waited >= STARVED

    def take_more_from(self, rank: int) -> float:
        """Return how much more is taken from a rank than from the others."""
        cpu = self._cpu.get(rank)
        if cpu is None:
            return 0.0
        others = sorted(c.share for r, c in self._cpu.items() if r != rank)
        return cpu.share - (others[len(others) // 2] if others else 0.0)

    def sum_up(self, ranks: set[int]) -> tuple[float, float]:
        """Return the shares taken from a few ranks in a row, and from one; no ranks mean all."""
        shares = [c.share for r, c in self._cpu.items() if not ranks or r in ranks]
        shares.sort(reverse=True)
        return sum(shares[:CHAIN]), max(shares, default=0.0)
