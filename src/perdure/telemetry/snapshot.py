"""The live picture: journal for what is certain, newest heartbeats for what moves.

A screen needs nothing else, and nothing here decides anything.
"""

from collections import deque
from dataclasses import dataclass, field

from perdure.model.events import (
    CheckpointSaved,
    CommandReceived,
    Decision,
    JournalEntry,
    MetricsLogged,
    NodeCordoned,
    NodeDraining,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    RanksStarted,
)
from perdure.model.job import JobSpec
from perdure.model.progress import CommProgress, NodeBeat, RankProgress
from perdure.model.report import RankRow, Snapshot
from perdure.telemetry.devices import DeviceFold, DeviceView, NodeStates
from perdure.telemetry.history import Generation, History
from perdure.telemetry.incidents import find_state
from perdure.telemetry.ledger import find_committed
from perdure.telemetry.recent import RecentFold
from perdure.telemetry.replicas import ReplicaFold
from perdure.telemetry.steering import SteeringFold
from perdure.telemetry.verdicts import VerdictFold, is_withdrawn

SPEED_WINDOW_S = 10.0
VERDICTS_SHOWN = 20
CHECKPOINTS_SHOWN = 20
CONDENSE_EVERY = 1000
"""Entries between two clearances, should no generation begin."""


@dataclass(slots=True)
class Certain:
    """What a picture needs of the journal; bounded, however long the job has run."""

    history: History = field(default_factory=History)
    verdicts: VerdictFold = field(default_factory=VerdictFold)
    generation: int = -1
    pids: dict[int, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    """Rank -> node, as last started."""
    devices: DeviceFold = field(default_factory=DeviceFold)
    cordoned: set[int] = field(default_factory=set)
    draining: set[int] = field(default_factory=set)
    """Nodes that their ranks are about to leave."""
    lost: set[int] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)
    stopping: bool = False
    replicas: ReplicaFold = field(default_factory=ReplicaFold)
    steering: SteeringFold = field(default_factory=SteeringFold)
    recent: RecentFold = field(default_factory=RecentFold)
    entries: int = 0


class SnapshotFold:
    """Folds journal and heartbeats into a `Snapshot`."""

    def __init__(self, spec: JobSpec, certain: Certain | None = None) -> None:
        """Begin before the first entry, or after those that `certain` was made of."""
        self._spec = spec
        self.certain = certain or Certain()
        """What follows from the journal alone; the rest came with heartbeats."""
        self._beats = 0
        self._devices = DeviceView(spec)
        self._ranks: dict[int, tuple[float, RankProgress]] = {}
        self._beat_generation = self.certain.generation
        self._points: dict[int, deque[tuple[float, int]]] = {}

    @property
    def _history(self) -> History:
        return self.certain.history

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        certain = self.certain
        certain.entries += 1
        certain.history.add(entry)
        certain.verdicts.add(entry)
        if not isinstance(entry.body, Decision):
            certain.replicas.add(entry.body)
        if not isinstance(entry.body, Decision):
            certain.steering.add(entry.body)
            certain.devices.add(entry.body)
            certain.recent.add(entry, certain.history)
        match entry.body:
            case RanksStarted() as event:
                certain.pids |= event.pids
                certain.homes |= dict.fromkeys(event.pids, event.node)
                if event.generation > certain.generation:
                    self._condense(event.generation)
                self._begin(event.generation)
            case NodeRegistered() as event:
                certain.lost.discard(event.node)
            case NodeLost() as event:
                certain.lost.add(event.node)
            case NodeCordoned() as event:
                certain.cordoned.add(event.node)
                certain.draining.discard(event.node)
            case NodeRestored() as event:
                certain.cordoned.discard(event.node)
                certain.draining.discard(event.node)
            case NodeDraining() as event if event.over:
                certain.draining.discard(event.node)
            case NodeDraining() as event:
                certain.draining.add(event.node)
            case MetricsLogged() as event:
                for _, values in sorted(event.rows, key=lambda row: row[0]):
                    certain.metrics |= values
            case CommandReceived() as event if event.kind in ("stop", "kill"):
                certain.stopping = True
            case _:
                pass
        certain.history.step_times_s.clear()  # A ledger's, and there would be no end of them.
        if certain.entries % CONDENSE_EVERY == 0:
            self._condense(certain.generation)

    def _condense(self, generation: int) -> None:
        """Forget what no picture shows; the last generation's late news are still awaited."""
        self.certain.generation = generation
        self.certain.history.condense(generation - 1, CHECKPOINTS_SHOWN)
        self.certain.verdicts.condense(generation - 1, VERDICTS_SHOWN)

    def observe(self, now: float, beat: NodeBeat) -> None:
        """Take a heartbeat."""
        self._devices.observe(beat)
        apart = self._spec.torchft.replicas > 0  # Each group has a generation of its own.
        if not beat.ranks or (beat.generation < self._beat_generation and not apart):
            return
        self._beats += 1
        self._begin(beat.generation)
        for progress in beat.ranks:
            self._ranks[progress.rank] = (beat.sent_s, progress)
            if not progress.account.first_step_s or progress.account.step < 0:
                continue  # A rank that resumes leaps to its step; that is no speed.
            points = self._points.setdefault(progress.rank, deque())
            points.append((progress.account.last_step_s or beat.sent_s, progress.account.step))
            while len(points) > 2 and points[-1][0] - points[0][0] > SPEED_WINDOW_S:
                points.popleft()

    def _begin(self, generation: int) -> None:
        if generation > self._beat_generation and not self._spec.torchft.replicas:
            self._beat_generation = generation
            self._ranks, self._points = {}, {}

    def snapshot(self, now: float) -> Snapshot:
        """Return the picture at `now`."""
        history = self._history
        newest = history.newest
        number = newest.number if newest else -1
        verdicts = self.certain.verdicts.verdicts()
        open_ranks = {
            v.culprit.rank for v in verdicts if v.generation == number and not is_withdrawn(v)
        }
        state = find_state(history)
        if self.certain.stopping and history.ended is None:
            state = "stopping"
        rows = tuple(self._make_row(r, newest, open_ranks) for r in range(self._num_ranks))
        steps = [row.step for row in rows if row.step >= 0]
        step = min(steps) if steps and len(steps) == len(rows) else -1
        committed = find_committed(history)
        if step < 0 and committed is not None:
            step = committed
        steering = self.certain.steering
        settings, epoch = steering.find_settings(step)
        if state == "running" and steering.paused:
            state = "paused"
        resumable = any(g.resumable for g in history.generations.values())
        joined = any(p.account.init_s > 0 for _, p in self._ranks.values())
        running = state in ("running", "stopping")
        nodes = NodeStates(self.certain.lost, self.certain.cordoned, self.certain.draining)
        picture = Snapshot(
            version=self.certain.entries + self._beats,
            job=self._spec.name,
            state=state,
            at_s=now,
            started_s=history.start_s,
            generation=number,
            restarts=max(0, len(history.generations) - 1),
            step=step,
            steps_per_s=min((r.steps_per_s for r in rows), default=0.0) if running else 0.0,
            world_size=self._spec.world_size,
            depth="resumable" if resumable or joined else "supervised",
            reason=history.reason,
            ranks=rows,
            devices=self._devices.make_rows(now, self.certain.devices, rows, nodes),
            verdicts=verdicts[-VERDICTS_SHOWN:],
            checkpoints=tuple(_describe_checkpoint(c) for c in self._find_checkpoints()),
            metrics=dict(sorted(self.certain.metrics.items())),
            incidents=sum(g.incident is not None for g in history.generations.values())
            + len(history.lost_parts),
            settings=settings,
            keys=steering.keys,
            epoch=epoch,
            paused=bool(steering.paused),
            recent=self.certain.recent.find_rows(history, now),
            cordoned=tuple(sorted(self.certain.cordoned)),
        )
        return self.certain.replicas.complete(self._spec, picture)

    @property
    def _num_ranks(self) -> int:
        """Ranks shown: with replica groups, those of spare ones as well."""
        return self._spec.groups * self._spec.nproc or self._spec.world_size

    def _find_checkpoints(self) -> list[CheckpointSaved]:
        return self._history.checkpoints[-CHECKPOINTS_SHOWN:]

    def _make_row(
        self, rank: int, newest: Generation | None, suspected: set[int | None]
    ) -> RankRow:
        history = newest.ranks.get(rank) if newest else None
        record = history.exit if history else None
        sent_s, progress = self._ranks.get(rank, (0.0, None))
        account = progress.account if progress else (history.account if history else None)
        collective, waiting = _describe_collective(progress, sent_s)
        if record is not None:
            state = "failed" if record.failed else "exited"
        elif rank in suspected:
            state = "suspected"
        elif progress is None or progress.phase not in ("step", "checkpoint", "boundary"):
            stepping = newest is not None and newest.stepping is not None
            state = "running" if progress and stepping else "starting"
        else:
            state = "waiting" if waiting else "running"
        return RankRow(
            rank=rank,
            node=self.certain.homes.get(rank, self._spec.node_of(rank)),
            pid=progress.pid if progress else self.certain.pids.get(rank, 0),
            state=state,
            phase=progress.phase if progress else "",
            step=account.step if account else -1,
            steps_per_s=self._find_speed(rank),
            collective=collective,
            cpu_s=progress.proc.cpu_s if progress else 0.0,
            rss_bytes=progress.proc.rss_bytes if progress else 0,
        )

    def _find_speed(self, rank: int) -> float:
        points = self._points.get(rank)
        if not points or len(points) < 2:
            return 0.0
        (first_s, first), (last_s, last) = points[0], points[-1]
        return max(0, last - first) / (last_s - first_s) if last_s > first_s else 0.0


def _describe_checkpoint(saved: CheckpointSaved) -> dict[str, object]:
    return {
        "step": saved.step,
        "path": saved.path,
        "bytes": saved.bytes,
        "at_s": saved.at_s,
        "stall_s": saved.stall_s,
        "save_s": saved.save_s,
        "reason": saved.reason,
    }


def _describe_collective(progress: RankProgress | None, sent_s: float) -> tuple[str, bool]:
    """Return the newest collective in words, and whether the rank has long waited in it."""
    if progress is None or not progress.comms:
        return "", False
    comm: CommProgress = max(progress.comms, key=lambda c: (c.since_s, c.name))
    text = f"{comm.op or 'collective'} #{comm.started_seq}"
    waited_s = sent_s - comm.since_s
    inside = 0 <= comm.ended_seq < comm.started_seq
    if inside and comm.since_s > 0 and waited_s > 0.1:
        return f"{text} (waiting {waited_s:.1f} s)", waited_s > 1.0
    return text, False
