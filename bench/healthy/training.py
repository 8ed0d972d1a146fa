"""A world of ranks that train in virtual time: when each of them did what.

Steps are made of work and of collectives that wait for one another as real ones do; what lies in a
step, and beside it, is the workload's (`workloads`). What agents see of it is made in `agents`.
It knows neither noise nor verdicts; `Fault` is what the benchmark of misses breaks in it.
"""

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NEVER = float("inf")
MOVED_KEPT = 8192
TURN_S = 0.02
"""How long one waits for a CPU that is twice as much in demand as there is of it."""
DATA, FORWARD, BACKWARD, OPTIMIZER = range(4)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a job is, and what its script and its machines are like."""

    ranks: int
    nproc: int
    """Ranks a node."""
    step_s: float
    """A usual step, communication included."""
    declared: bool = False
    """The script uses `run.steps()`."""
    links: bool = True
    """Ranks are connected by TCP, which agents can see."""
    cpu_share: float = 0.6
    """Of a core, by a rank at work."""
    cores: int = 16
    """Of each machine."""

    @property
    def nodes(self) -> int:
        """Nodes with ranks."""
        return self.ranks // self.nproc


@dataclass(slots=True)
class Traffic:
    """What was sent over a link."""

    _moved: list[tuple[float, int]] = field(default_factory=list)
    """When an operation ended, and what had been sent by then."""
    _total: int = 0

    def move(self, end_s: float, num_bytes: int) -> None:
        """Note that so much was sent in an operation."""
        if end_s < NEVER:
            self._total += num_bytes
            self._moved.append((end_s, self._total))
            if len(self._moved) > MOVED_KEPT:
                del self._moved[: MOVED_KEPT // 2]

    def sent_by(self, now: float) -> int:
        """Return how much had been sent by `now`."""
        at = bisect_right(self._moved, (now, self._total))
        return self._moved[at - 1][1] if at else 0


@dataclass(slots=True)
class Group:
    """One communicator; of point-to-point operations each rank counts its own."""

    name: str
    ranks: tuple[int, ...]
    size: int
    bytes: int
    """Of each of its operations."""
    seq: dict[int, int] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    """What each rank has sent to the next one in collectives, which go round in a ring."""
    pairs: dict[tuple[int, int], Traffic] = field(default_factory=dict)
    """What one rank has sent to another, of sends and receives."""

    def list_links(self) -> list[tuple[int, int, Traffic]]:
        """Return who sends to whom, and what was sent."""
        if self.size == 1:
            return [(src, dst, traffic) for (src, dst), traffic in self.pairs.items()]
        ranks = self.ranks
        nexts = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
        return [(src, dst, self.traffic) for src, dst in nexts]


@dataclass(frozen=True, slots=True)
class Silence:
    """What a rank does alone, for which the others wait."""

    rank: int
    begin_s: float
    end_s: float
    state: str
    """S and D: nothing of it moves; R: it computes."""
    declared: str = ""
    """The name by which the script has declared it (`run.busy`)."""
    pause: bool = False
    """An operator wants it so."""


@dataclass(frozen=True, slots=True)
class Load:
    """Others' work on a machine."""

    node: int
    begin_s: float
    end_s: float
    factor: float
    """How many times as long what its ranks do takes."""
    everywhere: bool = False
    """All machines have the same at the same time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks, where and when."""

    kind: str
    at_s: float
    rank: int = 0
    peer: int = -1
    """The other end of a link."""
    factor: float = 1.0


@dataclass(slots=True)
class Operation:
    """One rank's part in one collective, send or receive."""

    start_s: float
    end_s: float
    group: Group
    seq: int
    op: str
    bytes: int
    wait_s: float
    peer: int


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one rank."""

    step: int
    begin_s: float
    end_s: float
    own: tuple[float, float, float, float]
    wait_s: float
    other_s: float
    work: float
    """What the script has declared; 0 where it declares nothing."""


class World:
    """The ranks of one generation."""

    def __init__(
        self, shape: Shape, chance: random.Random, begin_s: float, fault: Fault | None = None
    ) -> None:
        """Begin at job time `begin_s`, before the first step."""
        n = shape.ranks
        self.shape, self.chance, self.fault = shape, chance, fault
        self.t = [begin_s] * n
        self.begin_s = begin_s
        self.step = 0
        self.operations: list[deque[Operation]] = [deque() for _ in range(n)]
        self.rows: list[deque[Row]] = [deque() for _ in range(n)]
        self.groups: list[Group] = []
        self.silences: list[deque[Silence]] = [deque() for _ in range(n)]
        self.history: list[Silence] = []
        """All silences ever: what a verdict is judged by."""
        self.loads: list[Load] = []
        self.staged = True
        """Whether agents see what its steps are made of."""
        self.on_devices = False
        """Whether its collectives run on devices that its hosts run ahead of."""
        self.declares = False
        """Whether its script declares work (`run.work`)."""
        self.work_done = [1.0] * n
        """What each rank does in the step under way, as its script may count it."""
        self._own = [[0.0] * 4 for _ in range(n)]
        self._wait = [0.0] * n
        self._other = [0.0] * n
        self._begun = [begin_s] * n
        self.behind_s = begin_s
        """Up to when all ranks have been moved."""
        self._active: list[Load] = []

    def add_group(
        self, name: str, ranks: Sequence[int], num_bytes: int, *, p2p: bool = False
    ) -> Group:
        """Make a communicator; `p2p` is for sends and receives among `ranks`."""
        name, size = (f"{name} p2p", 1) if p2p else (name, len(ranks))
        group = Group(name, tuple(ranks), size, num_bytes)
        self.groups.append(group)
        return group

    @property
    def top_s(self) -> float:
        """Return how far the first of them is."""
        return max(self.t)

    def advance(self, now: float, do_step: Callable[["World"], None]) -> None:
        """Let ranks train until all are beyond `now`, or hang."""
        while self.behind_s <= now:
            self._active = [load for load in self.loads if load.end_s > self.behind_s]
            do_step(self)
            self._end_step()
            self.behind_s = min(self.t)

    def _end_step(self) -> None:
        self.step += 1
        step, begun = self.step, self._begun
        for r, end_s in enumerate(self.t):
            if end_s < NEVER:
                own = self._own[r]
                row = Row(
                    step, begun[r], end_s, (own[0], own[1], own[2], own[3]), self._wait[r],
                    self._other[r], self.work_done[r] if self.declares else 0.0,
                )  # fmt: skip
                self.rows[r].append(row)
                own[0] = own[1] = own[2] = own[3] = 0.0
                self._wait[r] = self._other[r] = 0.0
                begun[r] = end_s

    # --- work ---------------------------------------------------------------------------------

    def stretch(self, r: int, stage: int, seconds: float) -> float:
        """Return how long work takes rank `r` now: longer under load, and where it is broken."""
        t, node = self.t[r], r // self.shape.nproc
        for load in self._active:
            if load.begin_s <= t < load.end_s and (load.node == node or load.everywhere):
                seconds *= load.factor
        fault = self.fault
        if fault is None or t < fault.at_s:
            return seconds
        if fault.kind == "slow host":
            return seconds * fault.factor if fault.rank // self.shape.nproc == node else seconds
        if fault.rank != r:
            return seconds
        if fault.kind in ("sleep", "spin", "stop"):
            return NEVER
        stages = {"slow data": DATA, "slow forward": FORWARD, "slow backward": BACKWARD}
        if stages.get(fault.kind) == stage or fault.kind == "slow rank":
            return seconds * fault.factor
        return seconds

    def do(self, r: int, stage: int, seconds: float) -> None:
        """Let one rank work."""
        if self.t[r] < NEVER:
            seconds = self.stretch(r, stage, seconds)
            self.t[r] += seconds
            self._own[r][stage] += seconds

    def do_all(self, stage: int, seconds: float, factors: Sequence[float]) -> None:
        """Let every rank work, each its own multiple of `seconds`."""
        for r, factor in enumerate(factors):
            self.do(r, stage, seconds * factor)

    def be_alone(
        self, silence_s: float, r: int, state: str, *, stage: int = -1, declared: str = ""
    ) -> None:
        """Let one rank do something alone; `stage` is what its stamps take it for."""
        if self.t[r] == NEVER:
            return
        silence = Silence(r, self.t[r], self.t[r] + silence_s, state, declared)
        self.silences[r].append(silence)
        self.history.append(silence)
        self.t[r] += silence_s
        if declared:
            self._begun[r] += silence_s  # Stamps are suspended meanwhile.
        elif stage >= 0:
            self._own[r][stage] += silence_s
        else:
            self._other[r] += silence_s

    def pause_all(self, seconds: float, *, steered: bool) -> None:
        """Let all ranks stand still, because the script or an operator wants it so."""
        for r in range(self.shape.ranks):
            if self.t[r] < NEVER:
                silence = Silence(r, self.t[r], self.t[r] + seconds, "S", pause=steered)
                self.silences[r].append(silence)
                self.history.append(silence)
                self.t[r] += seconds
                self._other[r] += seconds

    # --- communication ------------------------------------------------------------------------

    def time_of(self, ranks: Sequence[int], seconds: float, at_s: float) -> float:
        """Return how long an operation takes once all are there, with the fault and some noise."""
        seconds *= self.chance.lognormvariate(0.0, 0.1)
        nproc = self.shape.nproc
        for load in self._active:
            mine = load.everywhere or any(r // nproc == load.node for r in ranks)
            if mine and load.begin_s <= at_s < load.end_s:
                # Who sends waits for a CPU as well, whatever there is to send.
                late_s = TURN_S * (load.factor - 1.0)
                seconds = seconds * load.factor + self.chance.expovariate(1.0 / late_s)
        fault = self.fault
        if fault is not None and at_s >= fault.at_s:
            if fault.kind == "slow link" and fault.rank in ranks and fault.peer in ranks:
                seconds *= fault.factor
            elif fault.kind == "slow host" and fault.rank in ranks:
                seconds *= 1.0 + 0.2 * (fault.factor - 1.0)  # Its CPU sends as well.
        return seconds

    def reduce(self, group: Group, op: str, num_bytes: int, seconds: float) -> None:
        """Let the ranks of a group meet in a collective that blocks them."""
        t, ranks = self.t, group.ranks
        arrived = max([t[r] for r in ranks])
        end_s = arrived + self.time_of(ranks, seconds, arrived) if arrived < NEVER else NEVER
        for r in ranks:
            if t[r] < NEVER:
                seq = group.seq[r] = group.seq.get(r, 0) + 1
                wait_s = end_s - t[r]
                self.operations[r].append(
                    Operation(t[r], end_s, group, seq, op, num_bytes, wait_s, -1)
                )
                self._wait[r] += wait_s if end_s < NEVER else 0.0
                t[r] = end_s
        group.traffic.move(end_s, 2 * num_bytes)

    def run_backward(
        self, group: Group, works: Sequence[float], num_buckets: int, seconds: float
    ) -> None:
        """Let ranks do their backward pass, in which buckets are reduced as they are ready.

        `works` is each rank's seconds. Only the end of the last bucket is waited for, so that it
        has all of the blocked time, as DDP's has.
        """
        t, ranks = self.t, group.ranks
        took = {r: self.stretch(r, BACKWARD, works[r]) for r in ranks if t[r] < NEVER}
        begins, last_s = {r: t[r] for r in took}, 0.0
        hangs = len(took) < len(ranks) or NEVER in took.values()
        spans: list[tuple[int, float]] = []
        for bucket in range(1, num_buckets + 1):
            ready = [begins[r] + took[r] * bucket / num_buckets for r in took]
            begun_s = NEVER if hangs else max(max(ready), last_s)
            last_s = begun_s + self.time_of(ranks, seconds / num_buckets, begun_s)
            spans.append((bucket, last_s))
            group.traffic.move(last_s, 2 * group.bytes // num_buckets)
        for r, work_s in took.items():
            if work_s == NEVER:
                t[r] = NEVER
                continue
            done_s = begins[r] + work_s
            wait_s = max(0.0, last_s - done_s)
            for bucket, end_s in spans:
                start_s = begins[r] + work_s * bucket / num_buckets
                seq = group.seq[r] = group.seq.get(r, 0) + 1
                waited_s = wait_s if bucket == num_buckets else 0.0
                num_bytes = group.bytes // num_buckets
                operation = Operation(
                    start_s, end_s, group, seq, "allreduce", num_bytes, waited_s, -1
                )
                self.operations[r].append(operation)
            self._own[r][BACKWARD] += work_s
            self._wait[r] += wait_s if last_s < NEVER else 0.0
            t[r] = max(done_s, last_s)

    def pass_on(self, group: Group, src: int, dst: int, seconds: float) -> None:
        """Let one rank send to another: the receiver waits, the sender once both are there."""
        t = self.t
        arrived = max(t[src], t[dst])
        end_s = arrived + self.time_of((src, dst), seconds, arrived) if arrived < NEVER else NEVER
        for r, op, peer in ((src, "send", dst), (dst, "recv", src)):
            if t[r] < NEVER:
                seq = group.seq[r] = group.seq.get(r, 0) + 1
                wait_s = end_s - t[r]
                self.operations[r].append(
                    Operation(t[r], end_s, group, seq, op, group.bytes, wait_s, peer)
                )
                self._wait[r] += wait_s if end_s < NEVER else 0.0
                t[r] = end_s
        group.pairs.setdefault((src, dst), Traffic()).move(end_s, group.bytes)
