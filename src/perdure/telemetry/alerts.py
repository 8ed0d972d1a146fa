"""Which entries of the journal somebody wants to be told of, once each, and in which words."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from perdure.model.events import (
    AnyEvent,
    CheckpointFailed,
    ControllerLost,
    Decision,
    DeviceReported,
    GenerationStepping,
    JobEnded,
    JournalEntry,
    KeeperLost,
    NodeCordoned,
    NodeLost,
    PreemptionNoticed,
    RankExited,
    ReplicaSeen,
    RoomNoted,
    VerdictReached,
)
from perdure.model.input.plain import show_controls
from perdure.model.job import AlertKind


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a command or webhook is given, as JSON."""

    job: str
    kind: AlertKind | Literal["more"]
    """`more`: so many others were not told of one by one."""
    summary: str
    """One sentence."""
    at_s: float
    """Seconds since 1970."""
    seq: int = 0
    """Number of the journal's entry."""
    count: int = 1


@dataclass(slots=True)
class AlertFold:
    """Finds alerts in entries, in order."""

    job: str
    wanted: frozenset[str]
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, entry: JournalEntry) -> Alert | None:
        """Return the alert of `entry`; None where it is none, not wanted, or the same once more."""
        found = None if isinstance(entry.body, Decision) else _describe(entry.body)
        if found is None:
            return None
        kind, summary, key = found
        if kind not in self.wanted or key in self._seen:
            return None
        if key:
            self._seen.add(key)
        summary = show_controls(summary)
        return Alert(job=self.job, kind=kind, summary=summary, at_s=entry.at_s, seq=entry.seq)


def _name_writer(event: CheckpointFailed) -> tuple[str, ...]:
    """Return what the failures that one hung disk brings about have in common."""
    if event.writing < 0:
        return ()
    return ("checkpoint-failed", str(event.generation), str(event.writing))


_Found = tuple[AlertKind, str, tuple[str, ...]]


def _describe(event: AnyEvent) -> _Found | None:
    """Return kind, sentence, and what makes another one the same; an empty key never does."""
    match event:
        case VerdictReached(verdict=v):
            text = f"{v.kind} of {v.culprit}: {v.reason}"
            return "verdict", text, ("verdict", v.kind, str(v.culprit), str(v.first_seen_s))
        case RankExited(record=r) if r.failed and not r.asked:
            # Of a world that dies, its first death is told of.
            return "failure", f"rank {r.rank} failed: {r.cause}", ("failure", str(r.generation))
        case ReplicaSeen(gone=True) if event.life >= 0:  # Of a group that others have started.
            text = f"group {event.group} ({event.replica}) has left the quorum: {event.reason}"
            return "failure", text, ("failure", event.replica)
        case NodeLost():
            return "failure", event.reason, ()
        case KeeperLost():
            text = f"the keeper of node {event.node} died, and its ranks with it"
            return "failure", text, ("failure", str(event.generation))
        case GenerationStepping() if event.generation > 0:
            text = f"every rank makes progress again, generation {event.generation}"
            return "recovered", text, ("recovered", str(event.generation))
        case NodeCordoned():
            return "cordon", f"node {event.node} runs nothing any more: {event.reason}", ()
        case DeviceReported():
            state = "is healthy" if event.healthy else "has failed"
            node = f"node {event.node}"
            what = node if event.device == node else f"{event.device} on {node}"
            return "device", f"{what} {state}: {event.reason}", ()
        case PreemptionNoticed():
            return (
                "preemption",
                f"node {event.node} goes away in {event.grace_s:g} s, says {event.source}",
                (),
            )
        case CheckpointFailed():
            return (
                "checkpoint-failed",
                f"the checkpoint of step {event.step} failed: {event.error}",
                _name_writer(event),
            )
        case RoomNoted() if event.node >= 0:
            return "storage", f"{event.reason}: {event.place}", ()
        case RoomNoted():
            return (
                "storage",
                f"room for checkpoints at {event.place} is {event.grade}: {event.reason}",
                (),
            )
        case ControllerLost():
            return "part", f"{event.part} died ({event.cause}) and was started again", ()
        case JobEnded():
            return "ended", f"{event.status}, exit code {event.exit_code}: {event.reason}", ()
        case _:
            return None
