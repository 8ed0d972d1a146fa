"""Which replica groups stand still, where the lighthouse is not perdure's own: from heartbeats.

perdure's lighthouse sees who asks for a quorum and who does not (`quorum`). Of torchft's own nobody
hears, so that here the same is found from what agents and ranks tell, by the same patience, and
told in the same events:

- a group is *stopped* whose process is in state T for `silent_s`;
- it is *late* while others wait in a collective or for their quorum, and it neither waits nor
  moves; that is told of at once, and proves nothing;
- it is *left behind* once it was waited for as long as torchft would, or the others have gone on.

Both `gone` events carry no replica id: nobody here knows it. Pure: time is an argument.
"""

from dataclasses import dataclass, field

from perdure.control.lighthouse.patience import QuorumConfig, Silences
from perdure.detect.detector import Unwatched
from perdure.model.events import (
    AnyEvent,
    JobEnded,
    KeeperLost,
    RankExited,
    RanksStarted,
    ReplicaLate,
    ReplicaSeen,
    ReplicaWaiting,
)
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import NodeBeat

_TRUSTED_AFTER = 3
"""Attempts after which a group's steps are no longer its first, which take longer."""
_AHEAD_STEPS = 2
"""Others that have come so much further train without it."""


@dataclass(slots=True)
class _Group:
    """One life of a group."""

    step: int = -1
    attempts: int = 0
    """At a step, that were seen to end."""
    counts_seen: tuple[float, ...] = ()
    """Of its ranks' accounts: changes with every attempt at a step; empty before a heartbeat."""
    waits: dict[int, ReplicaWaiting] = field(default_factory=dict)
    """Rank -> what it has told of its wait."""
    stopped_s: float | None = None
    """Since when one of its processes is in state T."""
    busy_s: float = 0.0
    """When it was last known to be in a declared phase."""
    moved_s: float = 0.0
    """When its last attempt at a step was seen to have ended, or it was seen first."""

    @property
    def known(self) -> bool:
        """Whether its first steps are over."""
        return self.attempts > _TRUSTED_AFTER


class ReplicaWatch(Unwatched):
    """The detector of such a job."""

    def __init__(self, nproc: int, config: QuorumConfig) -> None:
        """Watch groups of `nproc` ranks each."""
        self._nproc, self._config = nproc, config
        self._groups: dict[int, _Group] = {}
        # Known from the journal alone, so that the next controller knows it before any heartbeat:
        # each group's newest generation, and what was told of it.
        self._generations: dict[int, int] = {}
        self._late: set[int] = set()
        self._gone: set[int] = set()
        self._silences = Silences()

    def reconfigure(self, config: DetectConfig) -> None:
        """Judge by `config` from now on."""
        self._config = self._config.follow(config)

    def note(self, now: float, event: AnyEvent) -> list[AnyEvent]:
        """Take an event of the journal, its own among them."""
        match event:
            case RankExited(node=node) | KeeperLost(node=node):
                self._forget(node)
            case RanksStarted(node=node, generation=generation):
                if generation > self._generations.get(node, -1):  # Told again by a new agent.
                    self._forget(node)
                    self._generations[node] = generation
            case ReplicaWaiting():
                self._note_wait(now, event)
            case ReplicaSeen(group=number, gone=gone):
                (self._gone.add if gone else self._gone.discard)(number)
            case ReplicaLate(group=number, over=over):
                (self._late.discard if over else self._late.add)(number)
            case JobEnded():
                self._groups.clear()
            case _:
                pass
        return []

    def _forget(self, number: int) -> None:
        """A life of a group is over."""
        self._groups.pop(number, None)
        self._late.discard(number)
        self._gone.discard(number)

    def _note_wait(self, now: float, event: ReplicaWaiting) -> None:
        number = event.rank // self._nproc
        known = self._generations.setdefault(number, event.generation)
        if event.generation != known:
            return
        group = self._groups.setdefault(number, _Group())
        if not event.over:
            group.waits[event.rank] = event
            return
        self._silences.add(now - event.since_s)
        group.waits.pop(event.rank, None)

    def take_beat(self, now: float, beat: NodeBeat) -> list[AnyEvent]:
        """Take a heartbeat; return what it, and the time that has passed, tell of the groups."""
        number = beat.node
        if not beat.ranks or beat.generation < self._generations.get(number, -1):
            return []
        if beat.generation > self._generations.setdefault(number, beat.generation):
            self._forget(number)
            self._generations[number] = beat.generation
        group = self._groups.setdefault(number, _Group())
        moved = _follow(now, group, beat)
        events: list[AnyEvent] = []
        if moved:
            if number in self._late:
                events.append(_tell_late(number, now, 0.0, "has come", over=True))
            if number in self._gone and group.stopped_s is None:
                step = self._newest_step()
                events.append(ReplicaSeen(replica="", group=number, at_s=now, step=step))
        behind: list[AnyEvent] = []
        if group.stopped_s is not None and beat.sent_s - group.stopped_s >= self._config.silent_s:
            behind = self._leave_behind(now, number, "its process is stopped (state T)", True)
        elif number in self._late and not moved and not group.waits:
            others = (g.step for n, g in self._groups.items() if n != number)
            if max(others, default=-1) >= group.step + _AHEAD_STEPS:
                behind = self._leave_behind(now, number, "the others train without it")
        return events + (behind or self._report_late(now))

    def _report_late(self, now: float) -> list[AnyEvent]:
        waits = [wait for group in self._groups.values() for wait in group.waits.values()]
        if not waits:
            return []
        told = [wait.timeout_s for wait in waits if wait.timeout_s]
        since_s = min(wait.since_s for wait in waits)
        expected_s = self._silences.expected_s
        events: list[AnyEvent] = []
        for number, group in sorted(self._groups.items()):
            if (
                group.waits
                or not group.counts_seen
                or number in self._gone
                or group.stopped_s is not None
            ):
                continue
            waited_s = now - max(since_s, group.busy_s, group.moved_s)
            long = waited_s >= self._config.late_s + expected_s
            if long and group.known and number not in self._late:
                why = f"the others have waited for it for {waited_s:.2f} s"
                events.append(_tell_late(number, now, waited_s, why))
            patience_s = self._config.compute_patience_s(expected_s, told, known=group.known)
            if waited_s >= patience_s:
                events += self._leave_behind(now, number, "the others have waited in vain for it")
        return events

    def _leave_behind(
        self, now: float, number: int, reason: str, stopped: bool = False
    ) -> list[AnyEvent]:
        if number in self._gone:
            return []
        step = self._newest_step()
        return [
            ReplicaSeen(
                replica="", group=number, at_s=now, gone=True, reason=reason, stopped=stopped,
                step=step,
            )
        ]  # fmt: skip

    def _newest_step(self) -> int:
        return max((group.step for group in self._groups.values()), default=-1)


def _follow(now: float, group: _Group, beat: NodeBeat) -> bool:
    """Take what a heartbeat tells of its group; return whether an attempt at a step has ended."""
    accounts = [rank.account for rank in beat.ranks]
    first = not group.counts_seen
    if first:  # Of the waits that an earlier controller was told of, those of older steps are over.
        steps = {rank.rank: rank.account.step for rank in beat.ranks}
        group.waits = {r: w for r, w in group.waits.items() if steps.get(r, -1) <= w.step}
        group.moved_s = now
    group.step = max(group.step, *(account.step for account in accounts))
    if any(rank.busy_phase is not None for rank in beat.ranks):
        group.busy_s = now
    # A debugger's `t` ends by itself.
    stopped = any(rank.proc.state == "T" for rank in beat.ranks)
    group.stopped_s = (group.stopped_s or beat.sent_s) if stopped else None
    counts_seen = tuple(n for a in accounts for n in (a.step, a.lost_s, a.reform_s, a.heal_s))
    moved, group.counts_seen = not first and counts_seen != group.counts_seen, counts_seen
    if moved:
        group.moved_s, group.attempts = now, group.attempts + 1
        group.waits.clear()  # One that ended in an error is not told to be over.
    return moved


def _tell_late(
    number: int, now: float, waited_s: float, reason: str, *, over: bool = False
) -> ReplicaLate:
    return ReplicaLate(
        replica="", group=number, at_s=now, waited_s=waited_s, reason=reason, over=over
    )
