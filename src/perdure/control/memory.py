"""All that a controller knows from its journal, in a form that can be written down.

A controller's knowledge is a fold over the journal: the machine's state, the picture for the
screens, which of each sender's messages were taken, and the events that a new detector has to hear
of. What followed from an event whose decisions were never written follows in the replay again; what
is to be sent of it `ControllerStarted` makes the machine issue (`machine`), and the shell writes
the facts that are missing (`failures`). `encode_memory` writes it down at one entry; what
`decode_memory` makes of that, fed with the entries since, equals the fold over all of them.

The detector's own knowledge is not written down. Most of it comes from heartbeats, which no
journal has, and is learned again within seconds; of the journal it needs the newest two
generations, and of a torchft job, whose groups have generations of their own, the newest one of
each group. `prune_entries` keeps those, and a detector hears exactly them after a replay, however
long that was: from a snapshot or from the first entry on.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.control.job import JobState
from perdure.control.machine import Controller
from perdure.control.membership import choose_membership, membership_of
from perdure.model.codec import decode, encode
from perdure.model.events import (
    AnyEvent,
    ControllerStarted,
    Decision,
    DeviceReported,
    FailureDecided,
    JobSubmitted,
    JournalEntry,
    JournalMended,
    LinksNoted,
    MetricsLogged,
    NodeCordoned,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    OperatorNoted,
    ProgressNoted,
    RankExited,
    RanksAgreed,
    RanksStarted,
    ReplicaLate,
    ReplicaSeen,
    StacksTaken,
    TimerFired,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.job import JobSpec
from perdure.model.orders import AnyAction
from perdure.telemetry.live.snapshot import Certain, SnapshotFold

_GENERATIONS = 2
_UNHEARD = Decision | FailureDecided | JournalMended | MetricsLogged | OperatorNoted | TimerFired
_OF_A_KIND = 16
"""Events kept of one kind, of those that may come without end."""
_KEPT: dict[type[AnyEvent], int] = {LinksNoted: 1, ProgressNoted: 2, StacksTaken: 4}
"""How many are kept of a kind that carries something of every rank, or of all nodes."""
_NEWEST_OF: dict[type[AnyEvent], str] = {
    NodeRegistered: "node",
    NodeLost: "node",
    NodeCordoned: "node",
    NodeRestored: "node",
    DeviceReported: "device",
    ReplicaSeen: "group",
    ReplicaLate: "group",
}
"""Events of which the newest of each is kept."""
_PRUNE_EVERY = 1000
SOURCES_MAX = 4096
"""Sources of events whose numbers are remembered, or 8 for each rank where those are more: who was
heard longest ago is forgotten. Should it speak again, it says which numbers were taken."""


@dataclass(slots=True)
class Written:
    """What a controller writes down of its memory."""

    seq: int = 0
    """The newest entry that it knows of."""
    state: JobState = field(default_factory=JobState)
    certain: Certain | None = None
    taken: dict[str, int] = field(default_factory=dict)
    """Source -> number of its newest event in the journal; who was heard last comes last."""
    recent: list[JournalEntry] = field(default_factory=list)
    term: int = 0
    """The term of the newest controller that has written."""


class Memory:
    """One controller's knowledge."""

    def __init__(self, spec: JobSpec, written: Written | None = None) -> None:
        """Begin before the first entry, or after those that `written` knows of."""
        known = written or Written()
        self.machine = Controller(known.state)
        self.taken = known.taken
        self._sources_max = max(SOURCES_MAX, 8 * spec.world_size)
        self.seq, self.term = known.seq, known.term
        self.started: dict[int, dict[int, int]] = {}
        """Generation -> rank -> the node that has started it, of the newest generations."""
        self._recent = known.recent
        self._generation = _newest_started(known.recent)
        for entry in known.recent:
            self._note_start(entry.body)
        self.fold = SnapshotFold(spec, known.certain)
        self._prune_at = _PRUNE_EVERY

    def note(self, entry: JournalEntry) -> None:
        """Take the next entry; an event is then handed to the machine."""
        self.fold.add(entry)
        self.seq = entry.seq
        event = entry.body
        if isinstance(event, Decision):
            return
        if isinstance(event, ControllerStarted):
            self.term = max(self.term, event.term)
        if isinstance(event, RanksAgreed):
            for source, number in zip(event.sources, event.numbers, strict=True):
                self.take_number(source, number)
            return
        if entry.source:
            self.take_number(entry.source, entry.source_seq)
        self._recent.append(entry)
        begun = isinstance(event, RanksStarted) and event.generation > self._generation
        if isinstance(event, RanksStarted):
            self._generation = max(self._generation, event.generation)
            self._note_start(event)
        if begun or len(self._recent) >= self._prune_at:
            self._recent = prune_entries(self._recent)
            self._prune_at = 2 * len(self._recent) + _PRUNE_EVERY

    def take_number(self, source: str, number: int) -> None:
        """Remember that `source` need not say again what it has said up to `number`.

        Where no entry has the number, the next controller does not know it, and the source passes
        over it (`service/agent/outbox.py`).
        """
        self.taken[source] = max(number, self.taken.pop(source, 0))
        if len(self.taken) > self._sources_max:
            del self.taken[next(iter(self.taken))]

    def _note_start(self, event: AnyEvent | Decision) -> None:
        """Remember who has started which ranks, for as long as they may have something to tell."""
        if isinstance(event, RanksStarted):
            self.started.setdefault(event.generation, {}).update(
                dict.fromkeys(event.pids, event.node)
            )
            oldest = self._generation - _GENERATIONS + 1
            for generation in [g for g in self.started if g < oldest]:
                del self.started[generation]

    def replay(self, entry: JournalEntry) -> list[AnyAction]:
        """Take an entry of the past; return what followed from it at the time."""
        self.note(entry)
        match entry.body:
            case Decision():
                return []
            case RanksAgreed() as agreed:
                handle = self.machine.handle
                return [action for *_, e in agreed.split() for action in handle(entry.at_s, e)]
            case event:
                return self.machine.handle(entry.at_s, event)

    def make_timer(self, now: float) -> TimerFired:
        """Return what a passed deadline is to the machine."""
        state, fold = self.machine.state, self.fold
        saves = [world.checkpoint_due_s for world in state.worlds.values()]
        awaited_s = membership_of(state).deadline(state)
        return TimerFired(
            pace=fold.estimate_pace() if _has_passed(now, *saves) else None,
            busy=fold.list_busy_ranks() if _has_passed(now, awaited_s) else (),
        )

    def recent(self) -> list[tuple[float, AnyEvent]]:
        """Return what a new detector has to hear of, each event with its time."""
        entries = prune_entries(self._recent)
        return [(e.at_s, e.body) for e in entries if not isinstance(e.body, Decision)]

    def write(self) -> Written:
        """Return what has to be written down; it shares everything with this memory."""
        return Written(
            seq=self.seq,
            state=self.machine.state,
            certain=self.fold.certain,
            taken=self.taken,
            recent=prune_entries(self._recent),
            term=self.term,
        )


def _has_passed(now: float, *due_s: float | None) -> bool:
    return any(time_s is not None and time_s <= now for time_s in due_s)


def encode_memory(memory: Memory) -> bytes:
    """Return the same bytes for the same journal, in every process."""
    written = memory.write()
    sure = {"state": _sort_sets(written.state), "certain": _sort_sets(written.certain)}
    return encode(dataclasses.replace(written, **sure))


def decode_memory(data: bytes, spec: JobSpec) -> Memory:
    """Return the memory in `data`.

    Raises:
        ProtocolError: it is none, or one of other code.
    """
    return Memory(spec, decode(data, Written))


def prune_entries(entries: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Return the entries that a new detector has to hear of, oldest first.

    Pruning twice is pruning once: what is left of a part of the journal and the entries after it
    gives the same as all of them.
    """
    oldest, beside = _newest_started(entries) - _GENERATIONS + 1, _list_beside(entries)
    kept: list[JournalEntry] = []
    counts: dict[tuple[type, int | str], int] = {}
    for entry in reversed(entries):
        event = entry.body
        if isinstance(event, _UNHEARD):
            continue
        generation = _read_generation(event)
        if generation is not None and generation < oldest and generation not in beside:
            continue
        if isinstance(event, RanksStarted | RankExited):
            kept.append(entry)
            continue
        name = _NEWEST_OF.get(type(event))
        whole = isinstance(event, ProgressNoted) and event.whole
        key = (type(event), getattr(event, name) if name else int(whole))
        limit = 1 if name else _KEPT.get(type(event), _OF_A_KIND)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= limit:
            kept.append(entry)
    return kept[::-1]


def _newest_started(entries: Sequence[JournalEntry]) -> int:
    started = (e.body.generation for e in entries if isinstance(e.body, RanksStarted))
    return max(started, default=-1)


def _list_beside(entries: Sequence[JournalEntry]) -> set[int]:
    """Return the older generations that live beside the newest one."""
    events = [entry.body for entry in entries]
    specs = (e.spec for e in events if isinstance(e, JobSubmitted))
    started = [e for e in events if isinstance(e, RanksStarted)]
    return {g for spec in specs for g in choose_membership(spec).list_beside(started)}


def _read_generation(event: AnyEvent) -> int | None:
    """Return the generation that `event` is about; None where it is about none."""
    match event:
        case RankExited():
            return event.record.generation
        case VerdictReached() | VerdictWithdrawn():
            return event.verdict.generation if event.verdict.generation >= 0 else None
        case NodeRegistered():
            return None  # Its `generation` says what the keeper held.
        case _:
            generation: int | None = getattr(event, "generation", None)
            return generation


def _sort_sets(value: Any) -> Any:
    """Return `value` with every set as a sorted list: a set's own order is not reproducible."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _sort_sets(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _sort_sets(each) for key, each in value.items()}
    return value
