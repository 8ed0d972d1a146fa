"""All that was found wrong, from the journal: the detector's verdicts, and crashes.

A crash needs no detector, so nobody journals a verdict about it; it is made here, from the
exits. The first exit by the clock of its node is the culprit's; what its peers died of
afterwards is a consequence, and is listed as evidence instead of as further verdicts, unless the
others had formed their world again in between: who dies after that dies of something else.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perdure.model.events import (
    OF_EVERY_RANK,
    ActionWithheld,
    JournalEntry,
    KeeperLost,
    MachineReported,
    NodeLost,
    PreemptionNoticed,
    PreemptionWithdrawn,
    RankExited,
    StacksTaken,
    VerdictReached,
    VerdictWithdrawn,
    WorldReformed,
)
from perdure.model.failures import ExitRecord, explain_exit
from perdure.model.input.plain import name_step
from perdure.model.verdicts import Culprit, Verdict, VerdictKind
from perdure.telemetry.platforms import MachineFold, Notice, NoticeFold

_SLOW = ("CommSlow", "Straggler", "HostBusy")


def _blame_early(early: RankExited, failed: list[RankExited]) -> Verdict:
    """Return the verdict on a rank that left with exit code 0 while others needed it."""
    rank, victim = early.record.rank, failed[0].record
    return Verdict(
        kind="EarlyExit",
        culprit=Culprit(rank=rank),
        generation=early.record.generation,
        first_seen_s=early.record.at_s,
        confirmed_s=failed[0].detected_s,
        confidence=0.9,
        reason=f"rank {rank} ended with exit code 0 while rank {victim.rank} still needed it: "
        f"{victim.cause}",
        actionable=True,
        certain=True,
        step=early.account.step,
        evidence=_make_evidence(victim, failed[1:]),
    )


def list_verdicts(entries: Iterable[JournalEntry]) -> tuple[Verdict, ...]:
    """Return every verdict of a journal by time; withdrawn ones say so in their evidence."""
    fold = VerdictFold()
    for entry in entries:
        fold.add(entry)
    return fold.verdicts()


@dataclass(slots=True)
class VerdictFold:
    """The same, one entry at a time."""

    reached: dict[str, Verdict] = field(default_factory=dict)
    exits: dict[int, list[list[RankExited]]] = field(default_factory=dict)
    """Failures of a generation, those of one world together: see `worlds`."""
    worlds: dict[int, list[float]] = field(default_factory=dict)
    """When each world of a generation began that was formed after such a failure."""
    early: dict[int, list[RankExited]] = field(default_factory=dict)
    """Exits with code 0: harmless unless others were still waiting for that rank."""
    stacks: dict[int, StacksTaken] = field(default_factory=dict)
    withheld: dict[str, list[str]] = field(default_factory=dict)
    """Verdict -> why nothing was done about it, or what would have been."""
    notices: NoticeFold = field(default_factory=NoticeFold)
    machines: MachineFold = field(default_factory=MachineFold)

    def add(self, entry: JournalEntry) -> None:
        """Take the next entry."""
        if isinstance(entry.body, OF_EVERY_RANK) or self._is_taken(entry):
            return
        match entry.body:
            case VerdictReached() as event:
                self.reached[_key(event.verdict)] = event.verdict
            case VerdictWithdrawn() as event:
                verdict = event.verdict
                evidence = {**verdict.evidence, "withdrawn": event.reason}
                evidence["withdrawn_s"] = event.at_s
                verdict = msgspec.structs.replace(verdict, evidence=evidence)
                self.reached[_key(verdict)] = verdict
            case ActionWithheld() as event:
                key = f"{event.generation} {event.cause} {event.culprit} {event.first_seen_s!r}"
                self.withheld.setdefault(key, []).append(describe_withheld(event))
            case RankExited() as event if event.record.failed and not event.record.asked:
                exits = self.exits.setdefault(event.record.generation, [[]])
                if all(e.record.rank != event.record.rank for world in exits for e in world):
                    exits[-1].append(event)
            case WorldReformed() as event if not event.finished:
                exits = self.exits.get(event.generation, [[]])
                if exits[-1]:
                    exits.append([])
                    self.worlds.setdefault(event.generation, []).append(event.formed_s)
            case RankExited() as event if not event.record.failed and not event.record.asked:
                self.early.setdefault(event.record.generation, []).append(event)
            case StacksTaken() as event:
                self.stacks[event.generation] = event
            case NodeLost() as event:
                first_s = event.last_seen_s or event.at_s
                self._put("NodeLost", event.node, -1, first_s, entry.at_s, event.reason)
            case KeeperLost() as event:
                cause = f": it {event.cause}" if event.cause else ""
                reason = f"the keeper of node {event.node} died, and its ranks with it{cause}"
                self._put("Crash", event.node, event.generation, event.at_s, entry.at_s, reason)
            case MachineReported() as event:
                self.machines.take(event)
            case PreemptionNoticed() | PreemptionWithdrawn() as event:
                self._note_preemption(entry.at_s, event)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return what was found so far, by time."""
        found = [self.machines.complete(self._complete(v)) for v in self.reached.values()]
        found += self.machines.list_unseen_ends(found)
        deadly = self._list_deadly()
        for generation, worlds in sorted(self.exits.items()):
            begins = [0.0, *self.worlds.get(generation, ())]
            for since_s, exits in zip(begins, worlds, strict=True):
                if not exits:
                    continue
                died_of = deadly.get(generation, ())
                crash = self._find_crash(generation, since_s, exits, died_of)
                if crash is not None:
                    found.append(self._complete(crash))
        return tuple(sorted(found, key=lambda v: (v.first_seen_s, v.confirmed_s, str(v.culprit))))

    def condense(self, before: int, verdicts: int) -> None:
        """Finish with generations older than `before`; keep the newest `verdicts` on those.

        For a picture of the present, which must not grow with the length of the past.
        """
        self._finish_worlds(verdicts)
        old = [v for v in self.verdicts() if v.generation < before]
        young = [v for v in self.reached.values() if v.generation >= before]
        over = [v for v in young if is_withdrawn(v) or v.kind == "Crash"][:-verdicts]
        young = [v for v in young if v not in over]
        self.reached = {_key(v): v for v in (*old[-verdicts:], *young)}
        kept = set(self.reached)
        self.withheld = {key: why for key, why in self.withheld.items() if key in kept}
        for table in (self.exits, self.worlds, self.early, self.stacks):
            for generation in [g for g in table if g < before]:
                del table[generation]

    def _finish_worlds(self, kept: int) -> None:
        """Finish with all but the newest worlds of each generation: an elastic one has thousands.

        Of each what was found stays as a verdict, and of those the newest.
        """
        for generation, worlds in self.exits.items():
            begins = self.worlds.get(generation, [])
            if len(begins) <= kept:
                continue
            count = len(begins) - kept
            for since_s, exits in zip([0.0, *begins], worlds[:count], strict=False):
                died_of = self._list_deadly().get(generation, ())
                crash = self._find_crash(generation, since_s, exits, died_of) if exits else None
                if crash is not None:
                    self.reached[_key(crash)] = self._complete(crash)
            self.exits[generation] = [[], *worlds[count:]]
            self.worlds[generation] = begins[count - 1 :]

    def _note_preemption(self, at_s: float, event: PreemptionNoticed | PreemptionWithdrawn) -> None:
        notice = self.notices.take(event)
        if notice is None:
            return
        grace_s = notice.gone_s - notice.at_s
        reason = f"{notice.words}: node {notice.node} goes away in {grace_s:.0f} s"
        evidence: dict[str, Any] = {"source": notice.source, "grace_s": round(grace_s, 3)}
        evidence |= {"announced": notice.reason} if notice.reason else {}
        if isinstance(event, PreemptionWithdrawn):
            evidence |= {"withdrawn": event.reason, "withdrawn_s": event.at_s}
        self._put("Preemption", notice.node, -1, notice.at_s, at_s, reason, evidence)

    def _is_taken(self, entry: JournalEntry) -> bool:
        """Return whether `entry` is a death that was announced: evidence, and no new verdict."""
        match entry.body:
            case RankExited() as event if event.record.failed and not event.record.asked:
                notice = self.notices.explain(event.node, event.record)
                at_s, what = event.record.at_s, f"rank {event.record.rank}: {event.record.cause}"
            case NodeLost() as event:
                notice = self.notices.find_notice_of(event.node, event.last_seen_s or event.at_s)
                at_s, what = event.last_seen_s or event.at_s, event.reason
            case KeeperLost() as event:
                notice = self.notices.find_notice_of(event.node, event.at_s)
                at_s, what = event.at_s, f"the keeper of node {event.node} died"
            case _:
                return False
        if notice is not None:
            self._add_death(notice, at_s, what)
        return notice is not None

    def _add_death(self, notice: Notice, at_s: float, what: str) -> None:
        for key, verdict in self.reached.items():
            mine = verdict.kind == "Preemption" and verdict.culprit.node == notice.node
            if mine and verdict.first_seen_s == notice.at_s:
                died = {"after_s": round(at_s - notice.at_s, 3), "what": what}
                deaths = [*verdict.evidence.get("deaths", ()), died]
                evidence = {**verdict.evidence, "deaths": deaths}
                self.reached[key] = msgspec.structs.replace(verdict, evidence=evidence)

    def _put(
        self,
        kind: VerdictKind,
        node: int,
        generation: int,
        first_s: float,
        at_s: float,
        reason: str,
        evidence: dict[str, Any] | None = None,
    ) -> None:
        verdict = Verdict(
            kind=kind,
            culprit=Culprit(node=node),
            generation=generation,
            first_seen_s=first_s,
            confirmed_s=at_s,
            confidence=1.0,
            reason=reason,
            actionable=True,
            certain=True,
            evidence=evidence or {},
        )
        self.reached[_key(verdict)] = verdict

    def _list_deadly(self) -> dict[int, list[Verdict]]:
        """Return, by generation, the verdicts that ranks may have died of."""
        deadly: dict[int, list[Verdict]] = {}
        for verdict in self.reached.values():
            # Nobody dies of slowness, nor of what was over.
            if verdict.actionable and verdict.kind not in _SLOW and not is_withdrawn(verdict):
                deadly.setdefault(verdict.generation, []).append(verdict)
        return deadly

    def _find_crash(
        self, generation: int, since_s: float, exits: list[RankExited], deadly: Iterable[Verdict]
    ) -> Verdict | None:
        ordered = sorted(exits, key=lambda e: (e.record.at_s, e.record.rank))
        first, record = ordered[0], ordered[0].record
        for verdict in deadly:
            if (
                verdict.first_seen_s <= record.at_s
                and since_s <= verdict.confirmed_s <= record.at_s
            ):
                return None  # They died of the hang that is already explained.
        if record.lost_peer:
            for early in self.early.get(generation, ()):
                if early.record.at_s <= record.at_s:
                    return _blame_early(early, ordered)
        cause = explain_exit(record, first.detected_s, first.account.step, None)
        blamed = f"rank {record.rank}"
        return Verdict(
            kind="Crash",
            culprit=Culprit(rank=record.rank) if cause.culprit == blamed else Culprit(),
            generation=generation,
            first_seen_s=record.at_s,
            confirmed_s=first.detected_s,
            confidence=1.0,
            reason=cause.reason,
            actionable=True,
            certain=True,
            step=cause.at_step,
            evidence=_make_evidence(record, ordered[1:]),
        )

    def _complete(self, verdict: Verdict) -> Verdict:
        """Return `verdict` with its stacks, and with why nothing was done about it."""
        more: dict[str, Any] = {}
        taken = self.stacks.get(verdict.generation)
        if taken is not None and taken.at_s >= verdict.first_seen_s:
            more["stacks"] = {str(rank): text for rank, text in sorted(taken.stacks.items())}
            more |= {"flight_recorder": taken.traces} if taken.traces else {}
        if why := self.withheld.get(_key(verdict)):
            more["nothing_done"] = why
        return msgspec.structs.replace(verdict, evidence={**verdict.evidence, **more})


def is_withdrawn(verdict: Verdict) -> bool:
    """Return whether the suspect made progress again."""
    return "withdrawn" in verdict.evidence


def _key(verdict: Verdict) -> str:
    return f"{verdict.generation} {verdict.kind} {verdict.culprit} {verdict.first_seen_s!r}"


def describe_withheld(event: ActionWithheld) -> str:
    """Return in words why nothing was done, or what would have been."""
    if not event.would:
        return event.reason
    return f"would have {event.would}{name_step(event.step)}: {event.reason}"


def _make_evidence(record: ExitRecord, others: list[RankExited]) -> dict[str, object]:
    evidence: dict[str, object] = {"pid": record.pid}
    facts: dict[str, object] = {
        "exit_code": record.code,
        "signal": record.signal,
        "oom": record.oom,
        "error": record.error,
        "traceback": record.traceback,
        "last_output": list(record.last_output),
        "max_rss_bytes": record.max_rss_bytes,
    }
    evidence |= {name: fact for name, fact in facts.items() if fact}
    if others:
        evidence["consequences"] = [
            {
                "rank": e.record.rank,
                "cause": e.record.cause,
                "after_s": round(e.record.at_s - record.at_s, 3),
            }
            for e in others
        ]
    return evidence
