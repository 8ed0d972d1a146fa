"""Lives of a torchft job's replica groups: what the journal says of each generation of each.

Who trains with whom, who is held and who is left out the lighthouse tells; how far a rank came it
stamps itself, into its ring, so that its account is known once it has ended. What failed is what
its controller has decided.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from operator import attrgetter

from perdure.model.events import (
    FailureDecided,
    GenerationStopped,
    JobEnded,
    JobResumed,
    JournalEntry,
    KeeperLost,
    KeysDeclared,
    NodeCordoned,
    NodeRestored,
    QuorumFormed,
    RankAttached,
    RankExited,
    RankLeft,
    RanksStarted,
    ReplicaSeen,
)

_AGE = attrgetter("generation")


@dataclass(slots=True)
class Eviction:
    """A time for which a group was left out while it lived."""

    at_s: float
    told_s: float
    """When the lighthouse left it out: of a silent one some time after it was heard last."""
    why: str
    step: int
    """The others' last committed step then."""
    back_s: float | None = None
    """When it trained with them again."""
    back_step: int = -1


@dataclass(slots=True)
class Life:
    """One generation of one group."""

    generation: int
    group: int
    started_s: float
    replica: str = ""
    held_s: float | None = None
    """It was held there before its first quorum: a spare."""
    joined_s: float | None = None
    """Its first quorum."""
    joined_step: int | None = None
    """The step of that quorum."""
    undone_from: int | None = None
    """The lowest step at which later lives of the group began: below its own, all had died."""
    evictions: list[Eviction] = field(default_factory=list)
    lost_s: float | None = None
    """Its keeper died."""
    stopped_s: float | None = None
    restored_s: float | None = None
    """When it was to be started again, after an operator had it left."""
    stands_s: float | None = None
    stood_s: float = 0.0
    """Held though it had trained: in pauses, or because another had taken its place."""
    ends: dict[int, RankExited] = field(default_factory=dict)
    """By rank."""
    failure: FailureDecided | None = None
    """Why it ended, as its controller has decided."""
    elsewhere: bool = False
    """Others have started it: of its processes only the lighthouse's word is known."""
    attached: set[int] = field(default_factory=set)
    """Of its ranks, then: those that have a line."""
    left: dict[int, float] = field(default_factory=dict)
    """Those of them whose scripts have ended well, and when."""

    @property
    def name(self) -> str:
        """Return its replica id without what is its life's own; empty where it has no name."""
        return self.replica.rpartition(":")[0]

    @property
    def finished_s(self) -> float | None:
        """Return when the scripts of all its ranks had ended well; None where they have not."""
        done = self.elsewhere and self.attached and self.left.keys() >= self.attached
        return max(self.left.values()) if done else None

    @property
    def over_s(self) -> float | None:
        """Return when the first of its ranks ended, or its keeper died."""
        return min((e.record.at_s for e in self.ends.values()), default=self.lost_s)

    @property
    def away(self) -> Eviction | None:
        """Return how it was left out while it lived; None where it was not, or has come back."""
        over_s = self.over_s if self.ends else None
        for newest in self.evictions[-1:]:
            if newest.back_s is None and (over_s is None or over_s > newest.at_s):
                return newest
        return None

    @property
    def away_s(self) -> float | None:
        """Return since when it was left out while it lived; None where it was not."""
        return self.away.at_s if self.away is not None else None

    @property
    def left_out(self) -> FailureDecided | None:
        """Return as a failure that it was left out by the lighthouse, and then ended."""
        if self.away is None or self.over_s is None or not self.ends or self.lost_s is not None:
            return None
        return FailureDecided(
            id="", world=self.generation, group=self.group, cause=self.away.why,
            culprit=f"group {self.group}", at_step=-1, failure_s=self.away.at_s,
            detected_s=self.away.at_s, at_s=self.over_s, rung="give up", reason=self.away.why,
        )  # fmt: skip

    @property
    def alive_evictions(self) -> list[Eviction]:
        """Return those that no end of the group accounts for: not its death, nor its restart."""
        alive = [e for e in self.evictions if self.over_s is None or e.at_s < self.over_s]
        over = self.over_s is not None or self.failure is not None
        return [e for e in alive if e.back_s is not None or not over]


@dataclass(slots=True)
class LifeFold:
    """Folds a journal into the lives of replica groups."""

    lives: dict[int, Life] = field(default_factory=dict)
    """By generation."""
    groups: dict[int, list[Life]] = field(default_factory=dict)
    """Of each group, the oldest first."""
    replicas: dict[str, list[Life]] = field(default_factory=dict)
    """By replica id."""
    step: int = -1
    cordoned: set[int] = field(default_factory=set)
    """Groups that an operator has cordoned, or had left."""

    def add(self, entry: JournalEntry) -> None:
        """Take an entry."""
        match entry.body:
            case FailureDecided() as event if event.world in self.lives:
                self.lives[event.world].failure = event
            case RanksStarted() as event:
                if event.generation not in self.lives:
                    life = Life(event.generation, event.node, event.at_s)
                    self.lives[event.generation] = life
                    insort(self.groups.setdefault(event.node, []), life, key=_AGE)
            case ReplicaSeen() as event:
                self._see(event)
            case RankAttached() as event if event.generation in self.lives:
                self.lives[event.generation].attached.add(event.rank)
            case RankLeft() as event if event.generation in self.lives:
                self.lives[event.generation].left[event.rank] = event.at_s
            case QuorumFormed() as event:
                members = [e for name in event.members for e in self.replicas.get(name, ())]
                self._form(event, sorted(members, key=_AGE))
                self._end_standing(members, event.at_s)
            case KeysDeclared() as event if event.generation in self.lives:
                life = self.lives[event.generation]
                # Its first commit. Of quorums only perdure's own lighthouse tells.
                life.joined_s = life.joined_s or entry.at_s
            case RankExited(record=record) as event:
                self.step = max(self.step, event.account.step)
                known = self.lives.get(record.generation)
                if known is not None:
                    known.ends.setdefault(record.rank, event)
            case KeeperLost() as event if event.generation in self.lives:
                self.lives[event.generation].lost_s = event.at_s
            case GenerationStopped() as event:
                self._stop(event)
            case NodeCordoned() as event:
                self.cordoned.add(event.node)
            case NodeRestored() as event:
                self.cordoned.discard(event.node)
                newest = self._newest(event.node)
                if newest is not None and newest.restored_s is None:
                    newest.restored_s = event.at_s
            case JobResumed() as event:
                self._end_standing(list(self.lives.values()), event.at_s)
            case JobEnded() as event:
                self._end_standing(list(self.lives.values()), event.at_s)

    def of_group(self, group: int) -> list[Life]:
        """Return the lives of a group, the oldest first."""
        return self.groups.get(group, [])

    def list_next(self, life: Life) -> list[Life]:
        """Return the life of its group that followed `life`, if there was one."""
        known = self.of_group(life.group)
        at = bisect_right(known, life.generation, key=_AGE)
        # The number of one that others had started may be another group's by now.
        return [new for new in known[at : at + 1] if not life.elsewhere or new.name == life.name]

    def _newest(self, group: int) -> Life | None:
        known = self.of_group(group)
        return known[-1] if known else None

    def _see(self, event: ReplicaSeen) -> None:
        life = self._newest(event.group)
        comes = event.life >= 0 and not event.gone
        if comes and event.life not in self.lives:  # Others have started it.
            new = Life(event.life, event.group, event.at_s, elsewhere=True)
            self.lives[event.life] = new
            insort(self.groups.setdefault(event.group, []), new, key=_AGE)
            life = new
        if life is None or event.at_s < life.started_s:
            return
        if event.gone:
            open_ = life.elsewhere and life.evictions and life.evictions[-1].back_s is None
            if life.elsewhere:
                self.step = max(self.step, event.step)
            held = life.stands_s is not None and event.group in self.cordoned
            if life.finished_s is not None or (life.elsewhere and held):
                return  # It was not in the quorum, at an operator's word.
            if event.replica == life.replica and open_:
                life.evictions[-1].why = event.reason  # It has come to light.
            elif event.replica == life.replica and life.joined_s is not None:
                step = max(event.step, self.step)
                at_s = (
                    min(event.at_s, max(event.heard_s, life.joined_s))
                    if event.heard_s
                    else event.at_s
                )
                life.evictions.append(Eviction(at_s, event.at_s, event.reason, step))
            return
        if not event.replica:  # It moves again; of quorums nobody has told.
            del life.evictions[-1:]
            return
        if event.replica != life.replica:
            if life.replica:
                self.replicas[life.replica].remove(life)
            life.replica = event.replica
            self.replicas.setdefault(event.replica, []).append(life)
        if event.held and life.joined_s is None:
            life.held_s = life.held_s or event.at_s
        elif event.held:
            life.stands_s = life.stands_s or event.at_s

    def _form(self, event: QuorumFormed, members: list[Life]) -> None:
        self.step = max(self.step, event.step)
        for life in members:
            if life.joined_step is None:
                life.joined_step = event.step
                for one in reversed(self.of_group(life.group)):
                    if one.generation < life.generation:
                        if one.undone_from is not None and one.undone_from <= event.step:
                            break  # So it is with all before it.
                        one.undone_from = event.step
            life.joined_s = life.joined_s or event.at_s
            if life.evictions and life.evictions[-1].back_s is None:
                life.evictions[-1].back_s = event.at_s
                life.evictions[-1].back_step = event.step

    def _stop(self, event: GenerationStopped) -> None:
        life = self.lives.get(event.generation)
        if life is None or life.group != event.node:
            mine = [e for e in self.of_group(event.node) if e.generation <= event.generation]
            life = mine[-1] if mine else None
        if life is not None and life.stopped_s is None:
            life.stopped_s = event.at_s

    def _end_standing(self, lives: list[Life], at_s: float) -> None:
        for life in lives:
            if life.stands_s is not None:
                over_s = min((e.record.at_s for e in life.ends.values()), default=at_s)
                life.stood_s += max(0.0, min(over_s, at_s) - life.stands_s)
                life.stands_s = None

    def step_times_s(self) -> list[float]:
        """Return the time of a committed step of each rank that has ended."""
        accounts = [end.account for life in self.lives.values() for end in life.ends.values()]
        made = [(a.step_s, a.step - a.start_step) for a in accounts]
        return [step_s / steps for step_s, steps in made if steps > 0 and step_s > 0]
