"""The live picture: journal for what is certain, newest heartbeats for what moves.

A screen needs nothing else, and nothing here decides anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.model.events import (
    OF_EVERY_RANK,
    CommandReceived,
    Decision,
    JournalEntry,
    MetricsLogged,
    NodeAsked,
    RankExited,
    RanksStarted,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.model.report import FIXED_WORLD, RankRow, Snapshot
from perdure.model.signals.progress import NodeBeat
from perdure.model.steering import Pace
from perdure.model.verdicts import Verdict
from perdure.telemetry.accounting.history import Generation, History
from perdure.telemetry.accounting.incidents import RecentFold, name_state
from perdure.telemetry.accounting.ledger import count_committed_steps
from perdure.telemetry.accounting.reforms import ShapeFold
from perdure.telemetry.live.devices import DeviceFold, DeviceView, NodeStates
from perdure.telemetry.live.replicas import ReplicaFold
from perdure.telemetry.live.rows import RankRows
from perdure.telemetry.live.steering import SteeringFold
from perdure.telemetry.live.timeleft import SILENT_S, StepPace
from perdure.telemetry.series import SeriesFold
from perdure.telemetry.verdicts import VerdictFold, is_withdrawn

VERDICTS_SHOWN = 20
_WITHHELD_SHOWN = 20
CHECKPOINTS_SHOWN = 20
_OF_CHECKPOINT = ("step", "path", "bytes", "at_s", "stall_s", "save_s", "reason")
_STEPPING = ("running", "stopping")
_OVER = ("exited", "failed")
CONDENSE_EVERY = 1000
"""Entries between two clearances, should no generation begin."""


@dataclass(slots=True)
class Certain:
    """The part of a picture that the journal tells; bounded, however long the job has run."""

    history: History = field(default_factory=History)
    verdicts: VerdictFold = field(default_factory=VerdictFold)
    generation: int = -1
    pids: dict[int, int] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    """Rank -> node, as last started."""
    devices: DeviceFold = field(default_factory=DeviceFold)
    nodes: NodeStates = field(default_factory=NodeStates)
    stopping: bool = False
    replicas: ReplicaFold = field(default_factory=ReplicaFold)
    steering: SteeringFold = field(default_factory=SteeringFold)
    recent: RecentFold = field(default_factory=RecentFold)
    shapes: ShapeFold = field(default_factory=ShapeFold)
    entries: int = 0
    seq: int = 0
    """Number of the newest."""


def _list_saved(history: History) -> tuple[dict[str, Any], ...]:
    """Return the newest checkpoints, as a picture shows them."""
    return tuple(
        {name: getattr(saved, name) for name in _OF_CHECKPOINT}
        for saved in history.checkpoints[-CHECKPOINTS_SHOWN:]
    )


class SnapshotFold:
    """Folds journal and heartbeats into a `Snapshot`."""

    def __init__(
        self, spec: JobSpec, certain: Certain | None = None, *, beside: SeriesFold | None = None
    ) -> None:
        """Begin before the first entry, or after those that `certain` was made of.

        What a report's fold `beside` has taken of an entry already is not taken again, and nothing
        of it is forgotten, for a report tells all of it.
        """
        self._spec, self._own = spec, beside is None
        self.certain = certain or Certain()
        if beside is not None:
            self.certain.history, self.certain.verdicts = beside.ledger.history, beside.verdicts
        """What follows from the journal alone; the rest came with heartbeats."""
        self._beats = 0
        self._devices = DeviceView(spec)
        self._rows = RankRows(spec)
        self._metrics: dict[str, float] = {}
        self._pace = StepPace()
        self._beat_generation, self._epoch = self.certain.generation, -1
        """The generation that beats are of, and the epoch of it that was formed last."""

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        certain = self.certain
        certain.entries += 1
        certain.seq = entry.seq
        if self._own:
            certain.history.add(entry)
        if isinstance(entry.body, OF_EVERY_RANK) and certain.entries % CONDENSE_EVERY:
            return
        self._rows.add(entry)
        if self._own:
            certain.verdicts.add(entry)
        if not isinstance(entry.body, Decision):
            if self._spec.groups:
                certain.replicas.add(entry.body)
            certain.shapes.add(entry.body)
            certain.steering.add(entry.body)
            certain.devices.add(entry.body)
            certain.nodes.add(entry.body)
            certain.recent.add(entry, certain.history)
        match entry.body:
            case RanksStarted() as event:
                certain.pids |= event.pids
                certain.homes |= dict.fromkeys(event.pids, event.node)
                if event.generation > certain.generation:
                    self._condense(event.generation)
                self._begin(event.generation)
            case RankExited() as event if event.record.generation == self._beat_generation:
                self._rows.leave(event.record.rank)
            case WorldReformed() as event if event.epoch > self._epoch and not event.finished:
                self._epoch = event.epoch
                self._pace.begin()
            case CommandReceived() | NodeAsked() as event if event.kind in ("stop", "kill"):
                certain.stopping = True
        if self._own:
            certain.history.step_times_s.clear()  # A ledger's: there would be no end of them.
        if certain.entries % CONDENSE_EVERY == 0:
            self._condense(certain.generation)

    def _condense(self, generation: int) -> None:
        """Forget what no picture shows; the last generation's late news are still awaited."""
        self.certain.generation = generation
        if not self._own:
            return
        self.certain.history.condense(generation - 1, CHECKPOINTS_SHOWN)
        self.certain.verdicts.condense(generation - 1, VERDICTS_SHOWN)

    def take_metrics(self, event: MetricsLogged) -> None:
        """Take what was logged."""
        for _, values in sorted(event.rows, key=lambda row: row[0]):
            self._metrics |= values

    def know_metrics(self, newest: Mapping[str, float]) -> None:
        """Take the newest values that an earlier controller has kept."""
        self._metrics = {**newest, **self._metrics}

    def take_beat(self, now: float, beat: NodeBeat) -> None:
        """Take a heartbeat."""
        self._devices.take_beat(beat)
        if not beat.ranks or (beat.generation < self._beat_generation and not self._spec.groups):
            return
        self._beats += 1
        self._begin(beat.generation)
        self._rows.take_beat(beat)
        if any(rank.phase == "paused" for rank in beat.ranks):
            self._pace.begin()
        elif self._pace.is_due(now):
            # Who resumes leaps to its step; that is no pace.
            step = self._rows.find_slowest(SILENT_S)
            if step is not None:
                self._pace.take(now, step)

    def _begin(self, generation: int) -> None:
        if generation > self._beat_generation and not self._spec.groups:  # Each has its own.
            self._beat_generation, self._epoch = generation, -1
            self._rows.begin()
            self._pace.begin()

    def estimate_pace(self) -> Pace | None:
        """Return how far and fast the newest generation's ranks are; None where none moves."""
        return self._rows.estimate_pace(-1 if self._spec.groups else self._beat_generation)

    def list_busy_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose declared busy phase is in force."""
        return self._rows.list_busy_ranks()

    def snapshot(self, now: float) -> Snapshot:
        """Return the picture at `now`."""
        history, nodes = self.certain.history, self.certain.nodes
        newest = history.newest
        number = newest.number if newest else -1
        verdicts = self.certain.verdicts.verdicts()
        suspected = self._list_suspected(verdicts, number)
        stopping = self.certain.stopping and history.ended is None
        state = "stopping" if stopping else name_state(history)
        known = self.certain.homes, self.certain.pids, self._find_lives()
        rows = self._rows.make(newest, suspected, *known)
        unseen = self._rows.unseen
        present = [row for row in _list_present(rows, newest) if row.rank not in unseen]
        steps = [row.step for row in present if row.step >= 0]
        step = min(steps) if steps and len(steps) == len(present) else -1
        if step < 0:
            committed = count_committed_steps(history)
            step = -1 if committed is None else committed
        if self._spec.groups:
            step = max([self.certain.replicas.step, *steps])
        settings, epoch = (steering := self.certain.steering).settings_at(step)
        if state == "running" and steering.paused:
            state = "paused"
        living = [row.steps_per_s for row in rows if row.state not in _OVER]
        depth, fixed = self._describe_world(state)
        num_steps = self._agree_on_num_steps(step)
        picture = Snapshot(
            version=self.certain.entries + self._beats,
            seq=self.certain.seq,
            mended=tuple(history.mended),
            skipped=tuple(history.skipped),
            exact=history.exact.judge(),
            hung_saves=tuple(history.hung_saves),
            empty_slots=tuple(history.empty_slots),
            waits=tuple(why for _, why in sorted(history.waits.items())),
            job=self._spec.name,
            state=state,
            at_s=now,
            started_s=history.start_s,
            generation=number,
            restarts=max(0, history.num_generations - 1),
            step=step,
            steps_per_s=min(living, default=0.0) if state in _STEPPING else 0.0,
            world_size=self._spec.world_size,
            depth=depth,
            reason=history.reason,
            ranks=rows,
            devices=self._devices.make_rows(now, self.certain.devices, rows, nodes),
            verdicts=verdicts[-VERDICTS_SHOWN:],
            checkpoints=_list_saved(history),
            metrics=dict(sorted((self._metrics).items())),
            incidents=history.num_parts_lost if self._spec.groups else history.num_incidents,
            settings=settings,
            keys=steering.keys,
            epoch=epoch,
            coming=steering.list_coming(step),
            paused=bool(steering.paused),
            recent=self.certain.recent.list_incident_rows(history, now),
            cordoned=tuple(sorted(nodes.cordoned)),
            world=self.certain.shapes.find_shape_of(number),
            observed=self._spec.observe,
            withheld=tuple(history.withheld[-_WITHHELD_SHOWN:]),
            fixed=fixed,
            num_steps=num_steps,
            step_open_s=self._rows.measure_open_step() if state in _STEPPING else 0.0,
            left_s=self._pace.estimate(now, num_steps) if state == "running" else None,
        )
        return self.certain.replicas.complete(self._spec, picture)

    def _agree_on_num_steps(self, step: int) -> int:
        """Return how many steps the job is to make; 0 where that is not known.

        Which is so where ranks say different numbers, and where more of them are made already.
        """
        num_steps = self.certain.steering.num_steps
        if self._rows.list_num_steps(SILENT_S) - {num_steps} or num_steps < step:
            return 0
        return num_steps

    def _list_suspected(self, verdicts: Sequence[Verdict], generation: int) -> set[int]:
        """Return the ranks that a verdict of this generation names, or whose node is lost."""
        named = (
            v.culprit.rank for v in verdicts if v.generation == generation and not is_withdrawn(v)
        )
        homes, lost = self.certain.homes, self.certain.nodes.lost
        found = {rank for rank in named if rank is not None}
        return found | {rank for rank, node in homes.items() if node in lost}

    def _find_lives(self) -> dict[int, Generation]:
        """Return the generation of each replica group that perdure has started."""
        generations = self.certain.history.generations
        groups = self.certain.replicas.groups if self._spec.groups else {}
        return {
            number: generations[view.generation]
            for number, view in groups.items()
            if view.generation in generations
        }

    def _describe_world(self, state: str) -> tuple[str, str | None]:
        """Return the depth, and what keeps the world at its ranks; see `Snapshot.fixed`."""
        generations = self.certain.history.generations.values()
        if self.certain.history.meets or any(g.formed for g in generations):
            return "elastic", ""
        if self._rows.joined or any(g.resumable for g in generations):
            return "resumable", f"resumable: {FIXED_WORLD}"
        return "supervised", f"supervised: {FIXED_WORLD}" if state == "running" else None


def _list_present(rows: Sequence[RankRow], newest: Generation | None) -> list[RankRow]:
    """Return those whose steps are the job's: not who is lost, not in yet, or was let go.

    Once all members of an elastic world have ended, whoever came furthest.
    """
    if newest is None:
        return list(rows)
    away = newest.left | newest.joined.keys() - newest.formed
    there = [row for row in rows if row.rank not in away]
    if newest.members:
        there = [row for row in there if row.rank in newest.members]
    if not newest.formed:
        return there
    living = [row for row in there if row.state not in _OVER]
    return living or sorted(there, key=lambda row: row.step)[-1:]
