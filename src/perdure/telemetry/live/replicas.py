"""Replica groups of a torchft job in the live picture: who trains, heals, stands by, is away.

The journal tells of quorums, of replicas that come and go, and of ranks that start and end; the
steps between come with heartbeats, from each rank's ring.
"""

from dataclasses import dataclass, field

import msgspec

from perdure.model.bus.lighthouse import ENDED_KEPT
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    JobEnded,
    JobSubmitted,
    KeeperLost,
    NodeAsked,
    NodeCordoned,
    NodeRestored,
    QuorumFormed,
    RankAttached,
    RankExited,
    RankLeft,
    RanksStarted,
    ReplicaLate,
    ReplicaSeen,
)
from perdure.model.job import JobSpec
from perdure.model.report import FIXED_WORLD, DeviceRow, RankRow, ReplicaRow, Snapshot

_RANK_STATES = {
    "training": "running",
    "healing": "running",
    "spare": "waiting",
    "evicted": "suspected",
    "silent": "suspected",
    "failed": "failed",
    "finished": "exited",
    "left": "exited",
    "gone": "exited",
    "drained": "waiting",
}
_COUNTED = ("training", "finished", "left")
"""States of groups whose steps are the job's: they train, or did until they ended in order."""
_OVER = ("done", "failed", "stopped", "stopping")


@dataclass(slots=True)
class GroupView:
    """One group, as far as the journal tells."""

    generation: int
    replica: str = ""
    away: str = ""
    """Why it is not waited for: `evicted`, `failed`, `finished`, `left`, `gone`."""
    why: str = ""
    """The same in the lighthouse's words."""
    away_s: float = 0.0
    """Since when, of a group that others have started."""
    exits: int = 0
    late: str = ""
    """In what way the others wait for it now, where that was told."""
    seen: ReplicaSeen | None = None
    """How this life of a group came that others have started."""
    step: int = -1
    """Of the newest quorum that had it, and in which it had not to heal."""
    ranks: dict[int, RankAttached] = field(default_factory=dict)
    """Those of its ranks, where others have started it, that have a line."""
    left: set[int] = field(default_factory=set)
    """Those of them whose scripts have ended well."""


@dataclass(slots=True)
class ReplicaFold:
    """What the journal says of all groups."""

    groups: dict[int, GroupView] = field(default_factory=dict)
    quorum_id: int = -1
    members: tuple[str, ...] = ()
    recovering: tuple[str, ...] = ()
    step: int = -1
    starts: int = 0
    """Lives of groups begun after their first: what is a restart here."""
    losses: int = 0
    """Groups lost so far, or left out while they lived; each time one counts."""
    cordoned: set[int] = field(default_factory=set)
    """Groups that an operator has cordoned, or had left."""
    ended: int = 0
    """Groups that others had started, and that are forgotten: they have ended long ago."""
    over: bool = False
    stopping: bool = False
    """An operator ends the job."""

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        match event:
            case RanksStarted(node=node, generation=generation):
                known = self.groups.get(node)
                if known is None or generation > known.generation:
                    self.starts += known is not None
                    self.groups[node] = GroupView(generation)
            case JobSubmitted():
                self._know_held(event)
            case ReplicaSeen():
                self._see(event)
            case RankAttached():
                life = next(
                    (v for v in self.groups.values() if v.generation == event.generation), None
                )
                if life is not None and life.seen is not None:
                    life.ranks[event.rank] = event
            case RankLeft():
                self._note_left(event)
            case ReplicaLate():
                view = self.groups.get(event.group)
                if view is not None and view.replica == event.replica:
                    view.late = "" if event.over else event.reason
            case QuorumFormed():
                elsewhere = any(view.seen is not None for view in self.groups.values())
                if elsewhere and not set(event.members) & set(self.members):
                    self.step = -1  # Nobody is there who was: they have begun anew.
                self.quorum_id, self.members = event.quorum_id, event.members
                self.recovering, self.step = event.recovering, max(self.step, event.step)
                for view in self.groups.values():
                    if view.replica in event.members:
                        view.away = view.why = ""
                        if view.replica not in event.recovering:
                            view.step = event.step
            case RankExited(node=node, record=record):
                view = self.groups.get(node)
                if view is not None and record.generation == view.generation and not self.over:
                    view.exits += 1
                    if record.asked and (node in self.cordoned or self.stopping):
                        view.away = "left"
                    elif record.failed:
                        self._lose(view, "failed")
                    else:
                        self.losses -= view.away == "evicted"  # It was not lost, but leaving.
                        view.away = "finished"
            case KeeperLost(node=node, generation=generation):
                view = self.groups.get(node)
                if view is not None and generation == view.generation:
                    self._lose(view, "failed")
            case CommandReceived() | NodeAsked() if event.kind in ("stop", "kill"):
                self.stopping = True
            case NodeCordoned(node=node):
                self.cordoned.add(node)
            case NodeRestored(node=node):
                self.cordoned.discard(node)
                view = self.groups.get(node)
                if view is not None and view.generation < 0:
                    view.away = "gone"  # It may train, should it ever come.
            case JobEnded():
                self.over = True

    def _know_held(self, event: JobSubmitted) -> None:
        """Show the groups that the job begins with held, though none of them has come."""
        for held in event.spec.torchft.held:
            seen = ReplicaSeen(replica=f"{held.name}:", group=held.number, at_s=event.at_s)
            view = GroupView(-1, seen.replica, "drained", "it has not come yet", seen=seen)
            self.groups[held.number] = view

    def _note_left(self, event: RankLeft) -> None:
        """A group is finished once all of its ranks are."""
        for view in self.groups.values():
            if view.generation == event.generation and event.rank in view.ranks:
                view.left.add(event.rank)
                if view.left >= view.ranks.keys():
                    view.away, view.late, view.away_s = "finished", "", event.at_s

    def _see(self, event: ReplicaSeen) -> None:
        known = self.groups.get(event.group)
        new = event.life >= 0 and not event.gone
        if new and (known is None or event.life > known.generation):
            self.starts += known is not None and known.generation >= 0  # Others have started it.
            self._forget_ended()
            known = self.groups[event.group] = GroupView(event.life, seen=event)
        if known is None:
            return
        if known.seen is not None and event.gone:
            self.step = max(self.step, event.step)
        if known.seen is not None and event.manager:
            known.seen = msgspec.structs.replace(event, at_s=known.seen.at_s)
        if not event.gone:
            known.replica, known.away, known.why = event.replica, "", ""
        elif event.replica == known.replica and not known.exits and known.away != "finished":
            self._lose(known, "gone" if event.silent and known.seen is not None else "evicted")
            known.why = event.reason
            known.away_s = (event.heard_s or event.at_s) if known.seen is not None else 0.0

    def _lose(self, view: GroupView, away: str) -> None:
        trained = view.seen is None or view.replica in self.members
        self.losses += not view.away and trained
        view.away, view.late = away, ""

    def _forget_ended(self) -> None:
        """Keep the last few of those that have gone, and those that an operator holds."""
        gone = [n for n, view in self.groups.items() if view.away and n not in self.cordoned]
        gone.sort(key=lambda number: (self.groups[number].away_s, number))
        for number in gone[: max(0, len(gone) - ENDED_KEPT)]:
            del self.groups[number]
            self.ended += 1

    def complete(self, spec: JobSpec, picture: Snapshot) -> Snapshot:
        """Return `picture` with the replica groups in it; unchanged where there are none."""
        if not spec.groups:
            return picture
        steps = {row.rank // spec.nproc: row.step for row in picture.ranks}
        told = spec.lighthouse is not None and spec.lighthouse.own
        if spec.served:  # Nothing is known of ranks but what they tell themselves.
            picture = msgspec.structs.replace(picture, ranks=(), devices=())
        numbers = sorted(self.groups) if spec.served else range(spec.groups)
        rows = tuple(self._make_row(n, steps.get(n, -1), told=told) for n in numbers)
        states = {row.group: row.state for row in rows}
        if spec.served:
            picture = self._show_ranks(spec, picture, rows)
        training = sum(row.state in ("training", "healing") for row in rows)
        state = picture.state
        if state not in _OVER:
            left = sum(row.state == "left" for row in rows)
            full = training >= (1 if spec.served else min(spec.nodes, spec.groups - left))
            began = bool(self.members) or self.losses > 0
            if spec.served:
                began = any(row.state in ("gone", "evicted") for row in rows)
            trains = "paused" if picture.paused else "running"
            state = trains if full else "recovering" if began else "forming"
        step = max([self.step, *(row.step for row in rows if row.state in _COUNTED)])
        speeds = [
            r.steps_per_s for r in picture.ranks if states[r.rank // spec.nproc] == "training"
        ]
        return msgspec.structs.replace(
            picture,
            state=state,
            step=step,
            steps_per_s=max(speeds, default=0.0) if state in ("running", "recovering") else 0.0,
            restarts=self.starts,
            incidents=picture.incidents + self.losses,
            depth="torchft",
            fixed=f"torchft: {FIXED_WORLD}",
            world_size=sum(r.ranks for r in rows) if spec.served else picture.world_size,
            generation=max(
                [picture.generation, *(v.generation for v in self.groups.values() if spec.served)]
            ),
            ranks=tuple(
                msgspec.structs.replace(
                    row, state=_RANK_STATES.get(states[row.rank // spec.nproc], "starting")
                )
                for row in picture.ranks
            ),
            replicas=rows,
            replicas_ended=self.ended,
        )

    def _show_ranks(
        self, spec: JobSpec, picture: Snapshot, rows: tuple[ReplicaRow, ...]
    ) -> Snapshot:
        """Return `picture` with what ranks that others have started have said of themselves."""
        ranks, devices = [], []
        for row in rows:
            over = row.state in ("gone", "finished")
            for rank, told in sorted(self.groups[row.group].ranks.items()):
                ranks.append(
                    RankRow(rank, row.group, told.pid, "starting", "", row.step, 0.0, "", 0.0, 0)
                )
                slot = f"node{row.group}/slot{rank % spec.nproc}"
                devices += [
                    DeviceRow(
                        device=device,
                        node=row.group,
                        ranks=(rank,),
                        replicas=(row.group,),
                        state="idle" if over else "in use",
                        slots=(slot,),
                        kind="cpu" if device.startswith("cpu-") else "gpu",
                        host=told.host,
                    )
                    for device in told.devices
                ]
        return msgspec.structs.replace(picture, ranks=tuple(ranks), devices=tuple(devices))

    def _make_row(self, group: int, step: int, *, told: bool) -> ReplicaRow:
        """Return one group; of quorums nothing is `told` by a lighthouse that is not perdure's."""
        known = self.groups.get(group)
        view = known or GroupView(-1)
        if known is not None and not told and not view.away:
            state = "training" if step > 0 else "starting"
        elif not told and view.away == "evicted":
            state = "silent"  # Whom such a lighthouse leaves out, it tells nobody.
        elif view.away or not view.replica:
            state = view.away or "starting"
        elif view.replica not in self.members:
            state = "spare"
        else:
            behind = view.replica in self.recovering and step < self.step
            state = "healing" if behind else "training"
        if known is not None and known.seen is not None:
            if state == "spare":
                state = "drained" if group in self.cordoned else "starting"
            step = max(step, view.step)
        inside = state in ("training", "healing")
        seen = view.seen
        return ReplicaRow(
            group=group,
            replica=view.replica,
            node=group,
            state=state,
            generation=view.generation,
            step=step,
            quorum_id=self.quorum_id if inside else -1,
            late=view.late,
            why=view.why,
            manager=seen.manager if seen is not None else "",
            since_s=seen.at_s if seen is not None else 0.0,
            away_s=view.away_s if view.away else 0.0,
            ranks=seen.ranks if seen is not None else 0,
        )
