"""What a controller decides about the failures of a journal that a test has made up.

It finds what failed and who is to blame from the other entries. The real controller decides by its
own state (`control/failures.py`); recorded and simulated journals have its decisions.
"""

from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from perdure.model.events import (
    OF_EVERY_RANK,
    ActionWithheld,
    Decision,
    FailureDecided,
    JournalEntry,
    KeeperLost,
    NodeCordoned,
    NodeDraining,
    NodeLost,
    NodeRegistered,
    PreemptionNoticed,
    PreemptionWithdrawn,
    RankExited,
    VerdictReached,
    WorldBroken,
    WorldReformed,
)
from perdure.model.failures import (
    BROKEN,
    Cause,
    ExitRecord,
    Rung,
    explain_break,
    explain_exit,
    explain_node,
    explain_verdict,
    find_early,
    name_preemption,
)
from perdure.model.verdicts import Verdict
from perdure.telemetry.accounting.history import Generation, History
from perdure.telemetry.accounting.lives import Life, LifeFold
from perdure.telemetry.platforms import Notice, NoticeFold


class Fold(Protocol):
    """What takes a journal's entries."""

    def add(self, entry: JournalEntry) -> object:
        """Take one."""


_deciders: dict[int, tuple[Fold, "Decider"]] = {}
"""By the identity of a fold, which is kept."""


def feed(fold: Fold, entry: JournalEntry, *, groups: bool = False) -> None:
    """Give a fold an entry, and what a controller decides by it."""
    _, decider = _deciders.setdefault(id(fold), (fold, Decider(groups=groups)))
    fold.add(entry)
    for told in decider.take(entry):
        fold.add(told)


class Decider:
    """Decides by one entry after another."""

    def __init__(self, *, groups: bool = False) -> None:
        self.history, self.lives = History(), LifeFold()
        self.of_world, self.of_groups, self.groups = WorldDecider(), GroupDecider(), groups

    def take(self, entry: JournalEntry) -> list[JournalEntry]:
        """Return what is decided by `entry`: one entry, or none."""
        self.history.add(entry)
        self.lives.add(entry)
        if self.groups:
            fact = self.of_groups.decide(self.lives.lives, entry)
        else:
            fact = self.of_world.decide(self.history, entry)
        if fact is None:
            return []
        told = JournalEntry(seq=0, at_s=entry.at_s, body=fact)
        self.history.add(told)
        self.lives.add(told)
        return [told]


_WEIGHED = frozenset({"CommSlow", "Straggler", "UnhealthyDevice"})
"""Training goes on in spite of them, unless the policy decides otherwise."""


@dataclass(slots=True)
class WorldDecider:
    """Decides by the entries of a job with one world."""

    count: int = 0
    draining: dict[int, str] = field(default_factory=dict)
    """Nodes that their ranks were to leave -> why."""
    notices: NoticeFold = field(default_factory=NoticeFold)
    weighed: tuple[float, Verdict] | None = None
    """A verdict that ends nothing by itself, and when: it is an incident if the policy acts."""
    broken: dict[str, float] = field(default_factory=dict)
    """Generation and epoch -> when a member first said that it broke."""

    def decide(self, history: History, entry: JournalEntry) -> FailureDecided | None:
        """Return what `entry`, which `history` knows already, says of a failure."""
        if isinstance(entry.body, OF_EVERY_RANK):
            return None
        match entry.body:
            case NodeCordoned() as event if event.node in self.draining:
                return self._leave(history, entry.at_s, event.node, self.draining.pop(event.node))
            case Decision() as decision:
                return self._note_decision(history, entry.at_s, decision)
            case WorldReformed() | WorldBroken() as event:
                return self._note_world(history, event)
            case ActionWithheld() as event:
                return _withdraw(history, event)
            case PreemptionNoticed() | PreemptionWithdrawn() as event:
                self.notices.take(event)
                return None
            case NodeDraining() as event:
                self.draining.pop(event.node, None)
                if not event.over:
                    self.draining[event.node] = event.reason
                return None
            case VerdictReached(verdict=verdict) if verdict.kind in _WEIGHED:
                self.weighed = (entry.at_s, verdict)
                return None
            case KeeperLost() as event if event.generation in history.generations and (
                _formed_without(history, history.generations[event.generation], event.node)
            ):
                return self._explain_reform(history, event)
            case _:
                found = self._find_cause(history, entry)
                return self._blame(history, *found) if found is not None else None

    def _find_cause(self, history: History, entry: JournalEntry) -> tuple[int, Cause] | None:
        """Return the generation that has failed by `entry`, and of what."""
        newest = history.newest
        match entry.body:
            case RankExited(record=record) as event if record.failed and not record.asked:
                generation = history.generations[record.generation]
                rank = generation.ranks[record.rank]
                outside = record.rank in generation.joined.keys() - generation.formed.keys()
                if outside or rank.exit is not record:
                    return None
                ends = (h.exit for h in generation.ranks.values() if h.exit is not None)
                early = find_early(ends, record)
                cause = explain_exit(record, event.detected_s, rank.account.step, early)
                return record.generation, _announce(cause, self.notices.explain(event.node, record))
            case VerdictReached(verdict=verdict) if verdict.actionable:
                return verdict.generation, explain_verdict(verdict)
            case NodeLost() as event if newest is not None and _is_missed(newest, event.node):
                lost_s = event.last_seen_s or event.at_s
                return newest.number, self._lose(
                    event.node, "NodeLost", lost_s, entry.at_s, event.reason
                )
            case KeeperLost() as event if event.generation in history.generations:
                reason = "its keeper died, and its ranks with it"
                reason += f": it {event.cause}" if event.cause else ""
                return event.generation, self._lose(
                    event.node, "keeper lost", event.at_s, entry.at_s, reason
                )
            case NodeRegistered() as event if newest is not None and _has_lost_all(newest, event):
                reason = "its ranks are gone, keeper and all"
                return newest.number, self._lose(
                    event.node, "keeper lost", entry.at_s, entry.at_s, reason
                )
            case _:
                return None

    def _lose(self, node: int, what: str, lost_s: float, at_s: float, why: str) -> Cause:
        cause = explain_node(node, what, -1, lost_s, at_s, why)
        return _announce(cause, self.notices.find_notice_of(node, lost_s))

    def _blame(self, history: History, number: int, cause: Cause) -> FailureDecided | None:
        """The earliest failure is the cause; those that come after it are consequences."""
        generation = history.generations.get(number)
        old = generation.incident if generation is not None else None
        if old is not None and old.failure_s <= cause.failure_s:
            return None
        if old is None:
            later = history.newest_number > number
            return None if later else self._write(number, cause, epoch=_next_epoch(history, number))
        detected_s = min(cause.detected_s, old.detected_s)
        return structs.replace(old, **structs.asdict(cause) | {"detected_s": detected_s})

    def _write(
        self, world: int, cause: Cause, rung: Rung = "restart", *, at_s: float = 0.0,
        epoch: int = -1, saved: bool = False,
    ) -> FailureDecided:  # fmt: skip
        self.count += 1
        return FailureDecided(
            id=f"failure-{self.count}", world=world, rung=rung, at_s=at_s, epoch=epoch, saved=saved,
            **structs.asdict(cause),
        )  # fmt: skip

    def _note_decision(
        self, history: History, at_s: float, decision: Decision
    ) -> FailureDecided | None:
        """Something was done at that time: about the failure that is open, or what was weighed."""
        if not decision.action.startswith(("AssignNode", "ReformWorld")):
            return None
        weighed, newest = self.weighed, history.newest
        if weighed is not None and weighed[0] == at_s:
            verdict = weighed[1]
            fact = self._blame(history, verdict.generation, explain_verdict(verdict))
            if fact is not None:
                return structs.replace(fact, at_s=fact.at_s or at_s)
        incident = newest.incident if newest is not None else None
        if incident is None or incident.at_s:
            return None
        return structs.replace(incident, at_s=at_s)

    def _note_world(
        self, history: History, event: WorldReformed | WorldBroken
    ) -> FailureDecided | None:
        """A world was formed again in place: for the failure that was open, or as it had broken."""
        if isinstance(event, WorldBroken):
            self.broken.setdefault(f"{event.generation} {event.epoch}", event.at_s)
            return None
        at_s = self.broken.get(f"{event.generation} {event.epoch - 1}")
        newest = history.reforms[-1] if history.reforms else None
        mine = newest is not None and (newest.generation, newest.epoch) == (
            event.generation, event.epoch
        )  # fmt: skip
        if event.finished or at_s is None or not mine or newest is None or newest.failure:
            return None
        cause = structs.replace(explain_break(at_s), at_step=event.step)
        return self._write(event.generation, cause, "retry", at_s=at_s, epoch=event.epoch)

    def _explain_reform(self, history: History, event: KeeperLost) -> FailureDecided | None:
        """If the others had to go on without what the node ran, its loss is why.

        A spare's, or a drained node's, is not.
        """
        generation, newest = history.generations[event.generation], history.reforms[-1:]
        mine = [r for r, home in generation.homes.items() if home == event.node]
        ends = [generation.rank(rank).exit for rank in mine if rank in generation.formed]
        if not newest or newest[0].generation != event.generation:
            return None
        known, reform = newest[0].failure, newest[0]
        if (known is not None and known.cause != BROKEN) or not any(
            end is None or end.failed for end in ends
        ):
            return None
        culprit = f"node {event.node}"
        if known is not None:
            return structs.replace(known, cause="keeper lost", culprit=culprit)
        cause = explain_node(
            event.node, "keeper lost", reform.step, reform.began_s, reform.began_s, ""
        )
        return self._write(
            event.generation, cause, "reform", at_s=reform.began_s, epoch=reform.epoch
        )

    def _leave(
        self, history: History, at_s: float, node: int, reason: str
    ) -> FailureDecided | None:
        """A world was ended so that its ranks leave a node, and for no failure."""
        newest = history.newest
        if newest is None or newest.incident is not None:
            return None
        saved = bool(history.checkpoints) and history.checkpoints[-1].step >= newest.step >= 0
        notice = self.notices.find_notice_of(node, at_s)
        cause = Cause(
            cause=f"moved, before a preemption ({notice.words})" if notice is not None else "moved",
            culprit=f"node {node}",
            at_step=history.checkpoints[-1].step if saved else -1,
            failure_s=at_s,
            detected_s=at_s,
            reason=reason,
        )
        epoch = _next_epoch(history, newest.number)
        return self._write(newest.number, cause, "move", at_s=at_s, epoch=epoch, saved=saved)


@dataclass(slots=True)
class GroupDecider:
    """The same for replica groups, each of which fails by itself."""

    def decide(self, lives: dict[int, Life], entry: JournalEntry) -> FailureDecided | None:
        """Return what `entry`, which the lives know already, says of the failure of one."""
        match entry.body:
            case RankExited(record=record) as event:
                life = lives.get(record.generation)
                return _end_life(life, event, entry.at_s) if life is not None else None
            case KeeperLost(at_s=lost_s) as event:
                life = lives.get(event.generation)
                if life is None or any(_has_failed(e.record) for e in life.ends.values()):
                    return None
                culprit, cause = f"group {life.group}", "its keeper died"
                return _write_life(life, cause, culprit, -1, (lost_s, lost_s, lost_s))
            case _:
                return None


def _end_life(life: Life, event: RankExited, at_s: float) -> FailureDecided | None:
    record, step = event.record, event.account.step
    failed = [e.record for e in life.ends.values() if _has_failed(e.record)]
    if not failed or min(failed, key=lambda e: e.at_s) is not record:
        return None
    culprit = f"group {life.group}, rank {record.rank}"
    return _write_life(life, record.cause, culprit, step, (record.at_s, event.detected_s, at_s))


def _write_life(
    life: Life, cause: str, culprit: str, step: int, moments: tuple[float, float, float]
) -> FailureDecided:
    return FailureDecided(
        id=f"failure-{life.generation}", world=life.generation, group=life.group, cause=cause,
        culprit=culprit, at_step=step, failure_s=moments[0], detected_s=moments[1],
        at_s=moments[2], rung="restart", reason=cause,
    )  # fmt: skip


def _has_failed(record: ExitRecord) -> bool:
    return record.failed and not record.asked


def _next_epoch(history: History, number: int) -> int:
    """Return the epoch that ends a failure, should its generation go on in place."""
    return max((r.epoch for r in history.reforms if r.generation == number), default=0) + 1


def _withdraw(history: History, event: ActionWithheld) -> FailureDecided | None:
    """Nothing is done: what was an incident by its verdict is none, for training was left."""
    generation = history.generations.get(event.generation)
    incident = generation.incident if generation is not None else None
    if incident is None or incident.culprit != event.culprit:
        return None
    same = incident.cause.partition(" (")[0] == event.cause
    return structs.replace(incident, rung="none") if same else None


def _announce(cause: Cause, notice: Notice | None) -> Cause:
    return cause if notice is None else name_preemption(cause, notice.node, notice.words)


def _is_missed(newest: Generation, node: int) -> bool:
    """Return whether a rank of the newest world on `node` has not ended."""
    mine = {rank for rank, home in newest.homes.items() if home == node}
    mine -= newest.joined.keys() - newest.formed.keys()  # They had not come in yet.
    return not newest.homes or any(newest.rank(rank).exit is None for rank in mine)


def _has_lost_all(newest: Generation, event: NodeRegistered) -> bool:
    """Return whether agent and keeper died together: the next agent knows of no generation.

    Worlds that re-form in place tell of it otherwise.
    """
    if newest.formed or event.generation >= newest.number:
        return False
    return event.node in newest.homes.values() and _is_missed(newest, event.node)


def _formed_without(history: History, generation: Generation, node: int) -> bool:
    """Return whether the others train without the ranks of a node that counts as here."""
    mine = {rank for rank, home in generation.homes.items() if home == node}
    was_in = mine & generation.formed.keys()
    newest = history.reforms[-1] if history.reforms else None
    if not was_in or newest is None or newest.generation != generation.number:
        return bool(generation.formed) and not was_in
    return not mine & newest.members
