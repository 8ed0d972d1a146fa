"""A world of ranks in virtual time: steps, collectives, faults, heartbeats."""

from dataclasses import dataclass, field

import msgspec
import pytest
from tests.unit.detect.drive import ACTED_S

from perdure.detect.detector import Detector
from perdure.model.events import AnyEvent, RanksStarted, VerdictReached
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.signals.progress import (
    BusyPhase,
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)
from perdure.model.verdicts import Verdict


@dataclass
class Rank:
    rank: int
    step: int = 0
    started: int = 0
    ended: int = 0
    since_s: float = 0.0
    last_step_s: float = 0.0
    step_s: float = 0.0
    heartbeat_s: float = 0.0
    compute_until_s: float = 0.0
    state: str = "S"
    cpu_s: float = 0.0
    io_bytes: int = 0
    busy: bool = True
    busy_phase: BusyPhase | None = None


@dataclass
class World:
    """Ranks that each compute for a while, then all-reduce; a step is one such pair."""

    size: int = 2
    resumable: bool = True
    ends_known: bool = True
    nodes: int = 1
    beat_every_s: float = 0.2
    config: DetectConfig = field(default_factory=lambda: DetectConfig(slow_action_s=ACTED_S))
    now: float = 1000.0
    network: bool = True
    remote: int = 0
    timeout_s: float = 0.0
    """Of the process group, as the rank tells it."""
    finished: set[int] = field(default_factory=set)
    """Ranks whose interpreters end."""
    mute: set[int] = field(default_factory=set)
    """Nodes whose heartbeats do not come through."""

    def __post_init__(self) -> None:
        self.spec = JobSpec(
            script="x.py",
            nproc=self.size // self.nodes,
            nodes=self.nodes,
            remote=self.remote,
            detect=self.config,
        )
        self.detector = Detector(self.spec)
        self.ranks = [Rank(r) for r in range(self.size)]
        self.start_s = self.now
        self.first_step_s = 0.0
        self.events: list[tuple[float, AnyEvent]] = []
        self.seq = 0
        self.generation = 0
        for node in range(self.nodes):
            pids = {r: 100 + r for r in self.spec.ranks_of(node)}
            self.take(RanksStarted(node=node, generation=0, pids=pids, at_s=self.now, warm=True))

    def run(self, seconds: float, duration=lambda rank, step: 0.3, hold=None) -> None:
        """Advance; `duration(rank, step)` computes, `hold(rank)` freezes a rank."""
        end = self.now + seconds
        tick = 0.02
        next_beat = self.now + self.beat_every_s
        while self.now < end:
            self.now = round(self.now + tick, 6)
            for r in self.ranks:
                self._advance(r, tick, duration, hold)
            if self.network:
                self._complete()
            if self.now >= next_beat - 1e-9:
                next_beat += self.beat_every_s
                self.beat()

    def _advance(self, r: Rank, tick: float, duration, hold) -> None:
        if r.state == "T" or (hold and hold(r.rank)):
            if r.busy and r.state != "T":
                r.cpu_s += tick
            return
        if r.started > r.ended:
            return
        if r.compute_until_s == 0.0:
            r.compute_until_s = self.now + duration(r.rank, r.step)
        if r.busy:
            r.cpu_s += tick
        if self.now >= r.compute_until_s:
            r.started += 1
            r.since_s = r.heartbeat_s = self.now

    def _complete(self) -> None:
        top = min(r.started for r in self.ranks)
        for r in self.ranks:
            if r.started > r.ended and top >= r.started and r.state != "T":
                r.ended = r.started
                r.step += 1
                if self.first_step_s == 0:
                    self.first_step_s = self.start_s + 0.001
                since = r.last_step_s or self.first_step_s
                r.step_s += self.now - since
                r.last_step_s = r.heartbeat_s = self.now
                r.compute_until_s = 0.0

    def progress(self, r: Rank) -> RankProgress:
        account = RankAccount()
        if self.resumable and self.first_step_s:
            account = RankAccount(
                step=r.step,
                step_s=r.step_s,
                spawned_s=self.start_s,
                init_s=self.start_s,
                first_step_s=self.first_step_s,
                last_step_s=r.last_step_s,
            )
        comms = ()
        if r.started:
            ended = r.ended if self.ends_known else -1
            comms = (CommProgress("pg", self.size, r.started, ended, "allreduce", r.since_s),)
            comms = tuple(msgspec.structs.replace(c, timeout_s=self.timeout_s) for c in comms)
        return RankProgress(
            rank=r.rank,
            pid=100 + r.rank,
            phase="finished" if r.rank in self.finished else "step" if self.resumable else "group",
            phase_since_s=self.start_s,
            heartbeat_s=r.heartbeat_s,
            account=account,
            comms=comms,
            proc=ProcSample(state=r.state, cpu_s=r.cpu_s, io_bytes=r.io_bytes),
            busy_phase=r.busy_phase,
        )

    def restart(self, step: int) -> None:
        """Begin the next generation from a checkpoint of `step`, all ranks in health."""
        self.generation += 1
        self.ranks = [Rank(r, step=step) for r in range(self.size)]
        self.start_s, self.first_step_s, self.network = self.now, 0.0, True
        for node in range(self.nodes):
            started = RanksStarted(
                node=node, generation=self.generation, pids={}, at_s=self.now, warm=True
            )
            self.take(started)

    def beat(self) -> None:
        self.seq += 1
        for node in range(self.nodes):
            if node in self.mute:
                continue
            ranks = tuple(self.progress(self.ranks[r]) for r in self.spec.ranks_of(node))
            beat = NodeBeat(node, "a", self.seq, self.now, self.generation, ranks)
            for event in self.detector.take_beat(self.now, beat):
                self.take(event)
        for event in self.detector.tick(self.now):
            self.take(event)

    def take(self, event: AnyEvent) -> None:
        self.events.append((self.now, event))
        for more in self.detector.note(self.now, event):
            self.take(more)

    def of(self, kind: type) -> list:
        return [e for _, e in self.events if isinstance(e, kind)]

    @property
    def verdicts(self) -> list[Verdict]:
        return [e.verdict for e in self.of(VerdictReached)]

    @property
    def actionable(self) -> list[Verdict]:
        return [v for v in self.verdicts if v.actionable]


@pytest.fixture
def make_world() -> type[World]:
    return World
