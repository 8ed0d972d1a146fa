"""Ranks, communicators and links in virtual time: what recorders and sweeps would report.

A world of any layout (tensor, pipeline, data parallel) runs steps whose collectives wait for one
another as real ones do, so that one fault spreads as it would, and folds them into heartbeats
with spans, stages, link sweeps and process states. A `Layout` says how the training is cut, a
`Fault` what goes wrong in it, `Noise` what is beside it in health. Everything comes from the seed.
It knows nothing of the detector; the caller passes beats on, and the nodes to be swept more often.
"""

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from perdure.model.signals.links import LinkSample, LinkSweep
from perdure.model.signals.progress import (
    CollectiveSpan,
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
    StepStages,
)

RETRY_S = 0.2
"""When the kernel first sends again what nobody has answered; it doubles each time."""
PENDING_S = 0.25
"""A send or receive under way is told of after so long, as by an agent."""
NEVER = float("inf")
FaultKind = Literal[
    "stop", "spin", "sleep", "drop-link", "drop-nic", "slow-link", "slow-nic", "loss",
    "slow-data", "slow-forward", "slow-backward", "slow-optimizer", "slow-host",
    "other-bytes", "other-op", "node",
]  # fmt: skip
HANGS = ("stop", "spin", "sleep")
Silence = Literal["evaluate", "save", "storage", "disk", "download", "preprocess"]
"""What a rank does alone, without a sign: rank 0 evaluates on its device, or saves, and moves
neither CPU nor I/O; a rank waits for storage in state S, or in state D; it downloads (I/O moves);
it preprocesses (CPU moves)."""
STAGES = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the world is cut: ranks are numbered tensor, context, data, pipeline."""

    data: int = 2
    tensor: int = 1
    pipeline: int = 1
    nproc: int = 1
    """Ranks a node."""
    context: int = 1

    @property
    def size(self) -> int:
        """Ranks of the world."""
        return self.width * self.pipeline

    @property
    def width(self) -> int:
        """Ranks of one stage of the pipeline."""
        return self.data * self.context * self.tensor

    @property
    def nodes(self) -> int:
        """Nodes."""
        return self.size // self.nproc

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.nproc


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault."""

    kind: FaultKind
    at_s: float
    rank: int = 0
    peer: int = 0
    """The other end of a link."""
    factor: float = 1.0
    """Of the stage's or the link's time."""
    until_s: float = NEVER


@dataclass(slots=True)
class Noise:
    """The noise that healthy training has beside it."""

    jitter: float = 0.03
    hog_every_s: float = 0.0
    """A neighbour's burst on one node, so often; up to 1.3 s, up to 1.6 times."""
    gc_every_s: float = 0.0
    checkpoint_every_s: float = 0.0
    evaluate_steps: int = 0
    """Rank 0 evaluates alone every so many steps."""
    resize_every_s: float = 0.0
    """The batch of all ranks changes."""
    rebuild_step: int = -1
    """The data-parallel buckets are cut otherwise from this step on."""
    silences: tuple[Silence, ...] = ()
    """What a rank does alone now and then, each equally often..."""
    silent_every_s: float = 0.0
    """... so often..."""
    silent_s: tuple[float, float] = (2.0, 400.0)
    """... for so long: shortest and longest."""
    compile_s: float = 0.0
    """The first step takes each rank up to so much longer, with its CPU at work."""


@dataclass(slots=True)
class Group:
    """One communicator."""

    name: str
    ranks: tuple[int, ...]
    base_s: float
    bytes: int
    links: tuple[tuple[int, int], ...]
    seq: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Op:
    """One rank's part in one collective."""

    group: Group
    seq: int
    op: str
    bytes: int
    start_s: float
    end_s: float
    peer: int = -1


@dataclass(slots=True)
class _Rank:
    rank: int
    t: float = 0.0
    ops: deque[_Op] = field(default_factory=deque)
    """Not yet ended at the last beat."""
    stages: deque[StepStages] = field(default_factory=deque)
    last: dict[str, CommProgress] = field(default_factory=dict)
    index: dict[str, int] = field(default_factory=dict)
    step: int = 0
    last_step_s: float = 0.0
    moved_s: float = 0.0
    evaluations: deque[tuple[float, float]] = field(default_factory=deque)
    silences: deque[tuple[float, float, Silence]] = field(default_factory=deque)
    """Begin, end and kind of what it does alone."""
    idle_s: float = 0.0
    """Spent in silences without CPU that are over."""
    read_bytes: int = 0
    own: list[float] = field(default_factory=lambda: [0.0] * 4)
    wait_s: float = 0.0


class Training:
    """One generation of a simulated training."""

    def __init__(
        self,
        layout: Layout,
        seed: int,
        *,
        step_s: float = 0.3,
        comm_share: float = 0.2,
        fault: Fault | None = None,
        noise: Noise | None = None,
        begin_s: float = 1000.0,
        links: bool = True,
        stages: bool = True,
        spans: bool = True,
        recorder: str = "compiled",
        beat_every_s: float = 0.2,
        stride: int = 1,
        generation: int = 0,
    ) -> None:
        """Make the world; nothing has happened yet."""
        self.layout, self.fault, self.noise = layout, fault, noise or Noise()
        self.now = self.begin_s = begin_s
        self._rng = random.Random(seed)
        self._step_s, self._comm_share = step_s, comm_share
        self._links, self._stages, self._spans = links, stages, spans
        self._recorder, self._every_s, self._stride = recorder, beat_every_s, stride
        self._generation = generation
        self._ranks = [_Rank(r, begin_s) for r in range(layout.size)]
        self._step = 0
        self._hog: tuple[int, float, float] = (-1, 0.0, 1.0)
        self._next = {
            what: begin_s + (every_s or NEVER) * (0.5 + self._rng.random())
            for what, every_s in (
                ("hog", self.noise.hog_every_s),
                ("gc", self.noise.gc_every_s),
                ("save", self.noise.checkpoint_every_s),
                ("resize", self.noise.resize_every_s),
                ("silent", self.noise.silent_every_s),
            )
        }
        self._batch = 1.0
        self._seq = 0
        self._swept: dict[int, float] = {}
        self._moved: dict[int, deque[tuple[float, float, int, int, str, int]]] = {}
        self.close: frozenset[int] = frozenset()
        """Nodes that are swept at the suspicious rate."""
        self._build()

    def _build(self) -> None:
        lay = self.layout
        t, c, d, p = lay.tensor, lay.context, lay.data, lay.pipeline
        comm_s = self._step_s * self._comm_share
        self._tp: list[list[Group]] = []
        self._dp: list[Group] = []
        for stage in range(p):
            first = stage * lay.width
            rank = [
                [[first + (i * c + j) * t + k for k in range(t)] for j in range(c)]
                for i in range(d)
            ]
            tp = [tuple(rank[i][j]) for i in range(d) for j in range(c)]
            cp = [tuple(rank[i][j][k] for j in range(c)) for i in range(d) for k in range(t)]
            dp = [tuple(rank[i][j][k] for i in range(d)) for j in range(c) for k in range(t)]
            inner = [self._group(f"tp{r[0]}", r, comm_s / 8, 400_000) for r in tp if t > 1]
            inner += [self._group(f"cp{r[0]}", r, comm_s / 8, 600_000) for r in cp if c > 1]
            self._tp.append(inner)
            self._dp += [self._group(f"dp{r[0]}", r, comm_s / 4, 4_000_000) for r in dp if d > 1]
        self._pp = [
            self._group(f"pp{i}", tuple(range(i, lay.size, lay.width)), comm_s / 8, 1_000_000)
            for i in range(lay.width if p > 1 else 0)
        ]

    def _group(self, name: str, ranks: tuple[int, ...], base_s: float, size: int) -> Group:
        near = len({self.layout.node_of(r) for r in ranks}) == 1
        ring = tuple((a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True))
        return Group(name, ranks, base_s * (0.3 if near else 1.0), size, ring)

    # --- training -----------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Let every rank do one more step (or as much of it as the fault allows)."""
        lay, step = self.layout, self._step
        begins = [r.t for r in self._ranks]
        for r in self._ranks:
            r.own, r.wait_s = [0.0] * 4, 0.0
        others = self._pause(step)
        own_s = self._step_s * (1.0 - self._comm_share) / lay.pipeline * self._batch
        parts = (0.05 * own_s, 0.3 * own_s, 0.55 * own_s, 0.1 * own_s)
        for r in self._ranks:
            self._work(r, 0, parts[0])
        for stage in range(lay.pipeline):
            self._pass_through(stage, stage - 1, 1, parts[1])
        for stage in reversed(range(lay.pipeline)):
            self._pass_through(stage, stage + 1, 2, parts[2])
        rebuilt = 0 <= self.noise.rebuild_step <= step
        for bucket in range(2):
            self._reduce_all(self._dp, bucket, scale=(1.5, 0.5)[bucket] if rebuilt else 1.0)
        for r in self._ranks:
            self._work(r, 3, parts[3])
        self._end_step(begins, others)

    def _pass_through(self, stage: int, source: int, part: int, seconds: float) -> None:
        """Let a stage of the pipeline do its forward or backward, once it has the `source`'s."""
        lay = self.layout
        if 0 <= source < lay.pipeline:
            self._pass_on(source, stage)
        for half in range(2):
            for r in self._ranks[stage * lay.width : (stage + 1) * lay.width]:
                self._work(r, part, seconds / 2)
            self._reduce_all(self._tp[stage], half)

    def _end_step(self, begins: list[float], others: list[float]) -> None:
        self._step += 1
        for r, began_s, other_s in zip(self._ranks, begins, others, strict=True):
            if r.t < NEVER:
                data_s, forward_s, backward_s, optimizer_s = r.own
                row = StepStages(
                    self._step, began_s, r.t, data_s, forward_s, backward_s, optimizer_s,
                    r.wait_s, other_s,
                )  # fmt: skip
                r.stages.append(row)

    def _pause(self, step: int) -> list[float]:
        """What lies between steps: checkpoints, a garbage collection, an evaluation."""
        others = [0.0] * len(self._ranks)
        n, rng, top = self.noise, self._rng, max(r.t for r in self._ranks)
        if top == NEVER:
            return others
        if top >= self._next["save"]:
            self._next["save"] = top + n.checkpoint_every_s
            for i, r in enumerate(self._ranks):
                others[i] = 0.2 + 0.3 * rng.random()
                r.t += others[i]
        if top >= self._next["resize"]:
            self._next["resize"] = top + n.resize_every_s
            self._batch = rng.choice((0.5, 0.75, 1.0, 1.5, 2.0))
        if top >= self._next["gc"]:
            self._next["gc"] = top + n.gc_every_s * (0.5 + rng.random())
            r = self._ranks[rng.randrange(len(self._ranks))]
            if r.t < NEVER:
                self._add(r, 1, 0.05 + 0.3 * rng.random())
        if top >= self._next["hog"]:
            self._next["hog"] = top + n.hog_every_s * (0.5 + rng.random())
            until_s = top + 1.3 * rng.random()
            self._hog = (rng.randrange(self.layout.nodes), until_s, 1.1 + 0.5 * rng.random())
        if n.evaluate_steps and step and step % n.evaluate_steps == 0:
            r = self._ranks[0]
            seconds = 3.0 + 3.0 * rng.random()
            r.evaluations.append((r.t, r.t + seconds))
            self._add(r, 1, seconds)
        if n.compile_s and not step:
            for r in self._ranks:
                self._add(r, 1, n.compile_s * (0.5 + 0.5 * rng.random()))
        if top >= self._next["silent"]:
            self._fall_silent(top)
        return others

    def _fall_silent(self, top: float) -> None:
        """Let one rank do something alone, without a sign, for which the others wait."""
        n, rng = self.noise, self._rng
        kind = rng.choice(n.silences)
        least_s, most_s = n.silent_s
        seconds = least_s * (most_s / least_s) ** rng.random()
        first = kind in ("evaluate", "save")
        r = self._ranks[0 if first else rng.randrange(len(self._ranks))]
        if r.t < NEVER:
            r.silences.append((r.t, r.t + seconds, kind))
            self._add(r, 0, seconds)
        self._next["silent"] = top + seconds + n.silent_every_s * (0.5 + rng.random())

    def _work(self, r: _Rank, stage: int, seconds: float) -> None:
        if r.t == NEVER:
            return
        seconds *= max(0.5, self._rng.gauss(1.0, self.noise.jitter))
        node, until_s, factor = self._hog
        if node == self.layout.node_of(r.rank) and r.t < until_s:
            seconds *= factor
        fault = self.fault
        lost = self.layout.node_of(fault.rank) if fault is not None else -1
        if fault is None or not fault.at_s <= r.t < fault.until_s:
            pass
        elif fault.kind == "node" and self.layout.node_of(r.rank) == lost:
            r.t = NEVER  # Its ranks die with it.
            return
        elif fault.rank == r.rank:
            if fault.kind in HANGS:
                r.t = NEVER
                return
            if fault.kind == f"slow-{STAGES[stage]}":
                # The factor is of the whole of the rank's work, spent in this stage.
                whole = self._step_s * (1.0 - self._comm_share) / self.layout.pipeline
                share = 1.0 if stage in (0, 3) else 0.5
                seconds += (fault.factor - 1.0) * whole * share
            elif fault.kind == "slow-host":
                seconds *= fault.factor
        self._add(r, stage, seconds)

    @staticmethod
    def _add(r: _Rank, stage: int, seconds: float) -> None:
        r.t += seconds
        r.own[stage] += seconds

    def _reduce_all(self, groups: Iterable[Group], which: int, scale: float = 1.0) -> None:
        for group in groups:
            self._collective(group, int(group.bytes * scale) + 1024 * which)

    def _collective(self, group: Group, size: int) -> None:
        ranks, fault = [self._ranks[r] for r in group.ranks], self.fault
        arrived = max(rank.t for rank in ranks)
        seconds, end_s = self._time(group, size, arrived, group.links)
        wrong = self._is_wrong(group, arrived)
        end_s = NEVER if wrong else end_s
        for rank in ranks:
            op, n = "allreduce", size
            if wrong and fault is not None and rank.rank == fault.rank:
                op = "broadcast" if fault.kind == "other-op" else op
                n = size * 2 if fault.kind == "other-bytes" else n
            self._take_part(rank, group, op, n, end_s)
        if end_s < NEVER and self._links:
            self._move(group.links, group.name, arrived, seconds, size)

    def _time(
        self, group: Group, size: int, arrived: float, links: Iterable[tuple[int, int]]
    ) -> tuple[float, float]:
        """Return how long a collective takes once all have arrived, and when it ends."""
        fault, stuck = self.fault, False
        seconds = group.base_s * size / group.bytes * max(0.5, self._rng.gauss(1.0, 0.05))
        struck = fault is not None and fault.at_s <= arrived < fault.until_s
        if fault is not None and struck and any(self._is_hit(link) for link in links):
            stuck = fault.kind in ("drop-link", "drop-nic")
            seconds *= fault.factor
        return seconds, NEVER if arrived == NEVER or stuck else arrived + seconds

    @staticmethod
    def _take_part(
        rank: _Rank, group: Group, op: str, size: int, end_s: float, peer: int = -1
    ) -> None:
        """Let a rank that gets so far wait for the end of a collective."""
        if rank.t == NEVER:
            return
        seq = group.seq[rank.rank] = group.seq.get(rank.rank, 0) + 1
        rank.ops.append(_Op(group, seq, op, size, rank.t, end_s, peer))
        if end_s < NEVER:
            rank.wait_s += end_s - rank.t
        rank.t = end_s

    def _is_wrong(self, group: Group, arrived: float) -> bool:
        fault = self.fault
        return (
            fault is not None
            and fault.kind in ("other-op", "other-bytes")
            and fault.rank in group.ranks
            and fault.at_s <= arrived < NEVER
        )

    def _is_hit(self, link: tuple[int, int]) -> bool:
        fault = self.fault
        if fault is None:
            return False
        if fault.kind in ("drop-nic", "slow-nic"):
            ends = {self.layout.node_of(rank) for rank in link}
            return len(ends) > 1 and self.layout.node_of(fault.rank) in ends
        at_link = fault.kind in ("drop-link", "slow-link", "loss")
        return at_link and link == (fault.rank, fault.peer)

    def _pass_on(self, src_stage: int, dst_stage: int) -> None:
        """Send and receive between two stages of the pipeline."""
        per = self.layout.width
        for i, group in enumerate(self._pp):
            src, dst = self._ranks[src_stage * per + i], self._ranks[dst_stage * per + i]
            link = (src.rank, dst.rank)
            arrived = max(src.t, dst.t)
            seconds, end_s = self._time(group, group.bytes, arrived, (link,))
            self._take_part(src, group, "send", group.bytes, end_s, dst.rank)
            self._take_part(dst, group, "recv", group.bytes, end_s, src.rank)
            if end_s < NEVER and self._links:
                self._move((link,), group.name, arrived, seconds, group.bytes)

    def _move(
        self,
        links: Iterable[tuple[int, int]],
        name: str,
        at_s: float,
        seconds: float,
        size: int,
    ) -> None:
        node_of, fault = self.layout.node_of, self.fault
        for src, dst in links:
            busy_s = size * (0.5e-9 if node_of(src) == node_of(dst) else 4e-9)
            lost = 0
            if (
                fault is not None
                and fault.at_s <= at_s < fault.until_s
                and self._is_hit((src, dst))
            ):
                busy_s = busy_s * fault.factor * (3.0 if fault.kind == "loss" else 1.0)
                lost = int(size / 1448 * 0.03) if fault.kind == "loss" else 0
            busy_s *= max(0.5, self._rng.gauss(1.0, 0.1))
            moved = self._moved.setdefault(src, deque())
            moved.append((at_s, busy_s, size, dst, name, lost))

    # --- heartbeats ---------------------------------------------------------------------------

    def run(self, seconds: float) -> Iterator[tuple[float, NodeBeat]]:
        """Advance, and yield each heartbeat with the time of its arrival."""
        end_s = self.now + seconds
        lay = self.layout
        while self.now < end_s - 1e-9:
            self.now = round(self.now + self._every_s, 6)
            while True:
                behind = min((r.t for r in self._ranks), default=NEVER)
                if behind > self.now or all(r.t == NEVER for r in self._ranks):
                    break
                self._run_step()
            self._seq += 1
            for node in range(lay.nodes):
                fault = self.fault
                gone = fault is not None and fault.kind == "node" and self.now >= fault.at_s
                if gone and fault is not None and node == lay.node_of(fault.rank):
                    continue
                yield self.now, self.make_beat(node)

    def make_beat(self, node: int) -> NodeBeat:
        """Return what the node's agent would send now."""
        nproc = self.layout.nproc
        ranks = tuple(self._show(self._ranks[r]) for r in range(node * nproc, (node + 1) * nproc))
        sweep = self._sweep(node) if self._links else None
        return NodeBeat(node, f"a{node}", self._seq, self.now, self._generation, ranks, sweep)

    def _show(self, r: _Rank) -> RankProgress:
        now, spans = self.now, []
        ops, keep = r.ops, deque[_Op]()
        while ops and ops[0].start_s <= now:
            op = ops.popleft()
            name = op.group.name
            index = r.index.setdefault(name, len(r.index))
            ended = op.end_s <= now
            size = len(op.group.ranks) if op.peer < 0 else 1
            r.last[name] = CommProgress(
                name, size, op.seq, op.seq if ended else op.seq - 1, op.op, op.start_s,
                op.group.ranks, op.bytes, "float32", op.peer,
            )  # fmt: skip
            r.moved_s = max(r.moved_s, op.end_s if ended else op.start_s)
            if not ended:
                keep.append(op)
                if op.peer >= 0 and now - op.start_s > PENDING_S:
                    spans.append(
                        CollectiveSpan(
                            index, op.seq, op.op, op.bytes, op.start_s, peer=op.peer, awaited=True
                        )
                    )
            elif self._spans and op.seq % self._stride == 0:
                span = CollectiveSpan(
                    index, op.seq, op.op, op.bytes, op.start_s, op.end_s, 0.0, op.peer
                )
                spans.append(span)
        ops.extendleft(reversed(keep))
        stages = []
        while r.stages and r.stages[0].end_s <= now:
            row = r.stages.popleft()
            r.step, r.last_step_s = row.step, row.end_s
            r.moved_s = max(r.moved_s, row.end_s)
            stages.append(row)
        while r.evaluations and r.evaluations[0][0] <= now:
            r.moved_s = max(r.moved_s, min(now, r.evaluations[0][1]))
            if r.evaluations[0][1] > now:
                break
            r.evaluations.popleft()
        return self._fold(r, tuple(spans), tuple(stages))

    def _fold(
        self, r: _Rank, spans: tuple[CollectiveSpan, ...], stages: tuple[StepStages, ...]
    ) -> RankProgress:
        fault, begin_s = self.fault, self.begin_s
        state, cpu_s = "S", self.now - begin_s
        while r.silences and r.silences[0][1] <= self.now:
            since_s, until_s, kind = r.silences.popleft()
            r.idle_s += until_s - since_s if kind != "preprocess" else 0.0
        cpu_s -= r.idle_s
        if r.silences and r.silences[0][0] <= self.now:
            since_s, _, kind = r.silences[0]
            state = {"disk": "D", "preprocess": "R"}.get(kind, "S")
            cpu_s -= self.now - since_s if kind != "preprocess" else 0.0
            r.read_bytes += 1_000_000 if kind == "download" else 0
        if fault is not None and fault.rank == r.rank and self.now >= fault.at_s:
            state = {"stop": "T", "spin": "R"}.get(fault.kind, "S")
            if fault.kind in ("stop", "sleep"):
                cpu_s = fault.at_s - begin_s
        account = RankAccount(
            step=r.step, spawned_s=begin_s, init_s=begin_s, first_step_s=begin_s + 0.01,
            last_step_s=r.last_step_s, step_s=max(0.0, r.last_step_s - begin_s),
        )  # fmt: skip
        return RankProgress(
            r.rank, 1000 + r.rank, "step", begin_s, r.moved_s or begin_s, account,
            tuple(r.last.values()), ProcSample(state, cpu_s, r.read_bytes),
            spans, stages if self._stages else (), self._recorder,
        )  # fmt: skip

    def _sweep(self, node: int) -> LinkSweep | None:
        now, every_s = self.now, 0.2 if node in self.close else 1.0
        last_s = self._swept.get(node, self.begin_s - (node % 5) * 0.2)
        if now - last_s < every_s - 1e-9:
            return None
        self._swept[node] = now
        sums: dict[tuple[int, int, str], list[float]] = {}
        nproc, fault = self.layout.nproc, self.fault
        for r in range(node * nproc, (node + 1) * nproc):
            moved = self._moved.get(r)
            while moved and moved[0][0] <= now:
                _, busy_s, size, dst, name, lost = moved.popleft()
                cell = sums.setdefault((r, dst, name), [0.0, 0.0, 0.0])
                cell[0] += size
                cell[1] += busy_s
                cell[2] += lost
        samples = [
            LinkSample(
                src, dst, name, int(size), busy_s, 2e-4, int(lost), 0, 0, self._heard_s(dst, src)
            )
            for (src, dst, name), (size, busy_s, lost) in sums.items()
        ]
        if fault is not None and fault.kind in ("drop-link", "drop-nic"):
            samples += self._list_stuck_links(node)
        return LinkSweep(now, now - last_s, tuple(samples))

    def _heard_s(self, src: int, dst: int) -> float:
        """Return how long ago `dst` heard of `src`: not since the link between them was cut."""
        fault = self.fault
        if fault is None or fault.kind not in ("drop-link", "drop-nic"):
            return 0.01
        cut = self.now > fault.at_s and self._is_hit((src, dst))
        return max(0.01, self.now - fault.at_s) if cut else 0.01

    def _list_stuck_links(self, node: int) -> list[LinkSample]:
        """Links with something to send that nobody answers."""
        fault, now = self.fault, self.now
        assert fault is not None
        stuck = []
        for group in (*(g for inner in self._tp for g in inner), *self._dp, *self._pp):
            waits = [r for r in group.ranks if self._ranks[r].ops]
            for link in group.links:
                age_s = now - fault.at_s
                mine = self.layout.node_of(link[0]) == node
                if mine and waits and age_s > 0.3 and self._is_hit(link):
                    tries = int(math.log2(age_s / RETRY_S + 1.0) + 1e-6)
                    stuck.append(
                        LinkSample(*link, group.name, 0, age_s, 0.0, tries, 65536, tries, age_s)
                    )
        return stuck
