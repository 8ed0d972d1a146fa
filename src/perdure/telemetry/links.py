"""The delay matrix: sweeps of all nodes joined, folded, and kept in the journal now and then.

An agent sees one end of a connection. Where the other end is on another node, both agents tell
the addresses of theirs, and the two ends that mirror each other are one directed link each way.
A communicator that neither end could name is filled in where only one contains both ranks. What
NCCL's plugin tells of two ranks counts where the kernel tells nothing of them: over InfiniBand.

A cell is the median of busy milliseconds per megabyte over the last sweeps that told of the link
(a minute's at the most), so that one late sweep or one burst moves nothing; bytes and segments
sent again are their sums, the rest is the newest. What is kept (`LinksNoted`) is this picture once
a minute, and with each verdict about communication: `busy_s` there is the median cell times the
bytes.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import msgspec

from perdure.model.events import AnyEvent, JournalEntry, LinksNoted, VerdictReached
from perdure.model.signals.links import LinkSample, LinkSweep
from perdure.model.signals.progress import NodeBeat

FIRST_NOTE_S = 10.0
NOTE_S = 60.0
"""How long a look at a link counts, and between two notes at the least."""
NOTE_BYTES_A_S = 20.0
"""That notes may cost the journal, but for those with a verdict."""
_SAMPLE_BYTES = 110
"""About, of one link as JSON."""
VERDICT_NOTE_S = 2.0
"""At the least between two notes that verdicts ask for."""
VERDICT_WINDOW_S = 3.0
"""What such a note looks back on: how it was before would hide what has just changed."""
LINKS_MAX = 2000
"""In one note; the unusual and the slowest first."""
LOOKS_KEPT = 16
CELL_BYTES = 1_000_000
"""Acknowledged in a second, for a cell; or the link was busy for half the time."""
COMM_VERDICTS = ("CommSlow", "CommHang")

_Key = tuple[int, int, str]


class LinkJoin:
    """Gives every sample of a sweep its other end and its communicator."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._generation = -1
        self._ends: dict[tuple[str, str], tuple[int, str]] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._only: dict[tuple[int, int], str] = {}

    def resolve(self, beat: NodeBeat) -> NodeBeat:
        """Return `beat` with its sweep's links joined; what is no link between ranks is dropped."""
        if beat.generation > self._generation:
            self._generation = beat.generation
            self._ends, self._members, self._only = {}, {}, {}
        sweep = beat.sweep
        if sweep is None or beat.generation < self._generation:
            return beat
        for end in sweep.endpoints:
            known = self._ends.get((end.local, end.remote))
            self._ends[end.local, end.remote] = (end.rank, end.comm or (known or ("", ""))[1])
        if not sweep.by_nccl and all(s.dst >= 0 and s.comm for s in sweep.links):
            return beat
        self._learn(beat)
        found: dict[_Key, LinkSample] = {}
        for sample in sweep.links:
            joined = self._join(sample)
            if joined is not None:
                key = (joined.src, joined.dst, joined.comm)
                found[key] = add_samples(found[key], joined) if key in found else joined
        by_kernel = {key[:2] for key in found}
        others = (s for s in sweep.by_nccl if (s.src, s.dst) not in by_kernel)  # The same bytes.
        links = (*found.values(), *others)
        sweep = msgspec.structs.replace(sweep, links=links, by_nccl=())
        return msgspec.structs.replace(beat, sweep=sweep)

    def _join(self, sample: LinkSample) -> LinkSample | None:
        dst, comm = sample.dst, sample.comm
        if dst < 0:
            other = self._ends.get((sample.remote, sample.local))
            if other is None or other[0] == sample.src:
                return None
            dst, comm = other[0], comm or other[1]
        comm = comm or self._find_only(sample.src, dst)
        return msgspec.structs.replace(sample, dst=dst, comm=comm, local="", remote="")

    def _learn(self, beat: NodeBeat) -> None:
        for progress in beat.ranks:
            for comm in progress.comms:
                if comm.ranks and self._members.get(comm.name) != comm.ranks:
                    self._members[comm.name] = comm.ranks
                    self._only = {}

    def _find_only(self, src: int, dst: int) -> str:
        """Return the one communicator that contains both; empty where there are several."""
        known = self._only.get((src, dst))
        if known is None:
            both = [n for n, ranks in self._members.items() if src in ranks and dst in ranks]
            known = self._only[src, dst] = both[0] if len(both) == 1 else ""
        return known


SMALL_SHARE = 0.05
"""A link that moved less than this of what its communicator's busiest did has no cell: what it
carries is small messages, whose cost is latency."""


class _Look(NamedTuple):
    """One link in one sweep."""

    at_s: float
    bytes: int
    retrans: int
    cell: float
    """0 where too little moved to tell."""
    rtt_s: float


@dataclass(slots=True)
class _Cell:
    """One link."""

    newest: LinkSample
    looks: deque[_Look] = field(default_factory=lambda: deque(maxlen=LOOKS_KEPT))


class LinkFold:
    """Folds heartbeats into the delay matrix, and says when to keep it."""

    def __init__(self) -> None:
        """Begin before the first heartbeat."""
        self._join = LinkJoin()
        self._generation = -1
        self._cells: dict[_Key, _Cell] = {}
        self._noted_s = 0.0
        self._due_s: float | None = None
        self._notes: dict[int, str] = {}
        """Node -> what its agent cannot see."""
        self._sockets: dict[int, int] = {}
        self._said = ""

    def take_beat(self, now: float, beat: NodeBeat) -> NodeBeat:
        """Take a heartbeat; return it with its links joined."""
        beat = self._join.resolve(beat)
        sweep = beat.sweep
        if beat.generation > self._generation:
            self._generation = beat.generation
            self._cells, self._notes, self._sockets, self._said = {}, {}, {}, ""
            self._noted_s, self._due_s = 0.0, None
        if sweep is None or beat.generation < self._generation:
            return beat
        if self._due_s is None:
            self._due_s = now + FIRST_NOTE_S
        self._notes[beat.node], self._sockets[beat.node] = sweep.note, sweep.sockets
        self._fold(now, sweep)
        return beat

    def next_deadline(self) -> float | None:
        """Return when to call `tick`."""
        return self._due_s

    def tick(self, now: float) -> list[AnyEvent]:
        """Return what is to be kept, if it is time."""
        if self._due_s is None or now < self._due_s:
            return []
        self._forget(now)
        self._due_s = now + NOTE_S
        cost_s = min(len(self._cells), LINKS_MAX) * _SAMPLE_BYTES / NOTE_BYTES_A_S
        if self._noted_s and now - self._noted_s < cost_s:
            return []
        return self._note(now)

    def sum_up(self, now: float) -> LinksNoted | None:
        """Return the matrix as it is now; None where there is nothing to say of it."""
        return self._make_note(now, NOTE_S) if self._cells or self._notes else None

    def note(self, now: float, event: AnyEvent) -> list[AnyEvent]:
        """Take a journaled event; return what is to be kept beside it."""
        if not isinstance(event, VerdictReached) or not self._cells:
            return []
        verdict = event.verdict
        about = verdict.culprit.link is not None or verdict.kind in COMM_VERDICTS
        if not about or now - self._noted_s < VERDICT_NOTE_S:
            return []
        return self._note(now, VERDICT_WINDOW_S)

    def samples(self, since_s: float = 0.0) -> tuple[LinkSample, ...]:
        """Return the matrix as it is now: one sample a link, the unusual and the slowest first.

        Looks before job time `since_s` are left out where there are newer ones.
        """
        made = _quieten([_make_sample(cell, since_s) for cell in self._cells.values()])
        return tuple(sorted(made, key=_rank_sample)[:LINKS_MAX])

    def _fold(self, now: float, sweep: LinkSweep) -> None:
        for sample in sweep.links:
            key = (sample.src, sample.dst, sample.comm)
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = _Cell(sample)
            cell.newest = sample
            look = _Look(
                now,
                sample.bytes_acked,
                sample.retrans,
                _compute_cell(sample, sweep.window_s),
                sample.rtt_s,
            )
            cell.looks.append(look)

    def _forget(self, now: float) -> None:
        """Drop looks that are older than a minute, and links without any."""
        for key, cell in list(self._cells.items()):
            while cell.looks and now - cell.looks[0].at_s > NOTE_S:
                cell.looks.popleft()
            if not cell.looks:
                del self._cells[key]

    def _note(self, now: float, within_s: float = NOTE_S) -> list[AnyEvent]:
        note = self._make_note(now, within_s)
        self._noted_s, self._due_s = now, now + NOTE_S
        if not note.links and note.note == self._said:
            return []
        self._said = note.note
        return [note]

    def _make_note(self, now: float, within_s: float) -> LinksNoted:
        self._forget(now)
        oldest_s = min((cell.looks[0].at_s for cell in self._cells.values()), default=now)
        return LinksNoted(
            generation=self._generation,
            at_s=now,
            window_s=min(max(now - oldest_s, 0.0), within_s),
            links=self.samples(now - within_s),
            note=self._explain(),
        )

    def _explain(self) -> str:
        """Return what is missing, in words."""
        missing = [f"node {node}: {note}" for node, note in sorted(self._notes.items()) if note]
        if not self._cells and not missing:
            count = sum(self._sockets.values())
            if not count:
                return "no TCP connections between ranks (shared memory, NVLink or RDMA carry it)"
            noun = "connection" if count == 1 else "connections"
            return f"{count} {noun} between ranks, none of which moved 1 MB in a second"
        return "; ".join(missing[:3]) + (f" and {len(missing) - 3} more" * (len(missing) > 3))


class DelayMatrix(msgspec.Struct, frozen=True):
    """One picture of all links, for a screen."""

    generation: int = -1
    at_s: float = 0.0
    window_s: float = 0.0
    links: tuple[LinkSample, ...] = ()
    """One for each directed pair of ranks, all communicators together."""
    comms: tuple[LinkSample, ...] = ()
    """One for each directed pair and communicator."""
    note: str = ""
    """What is missing, or why it is empty."""


def read_delay_matrix(
    entries: Iterable[JournalEntry], newer: LinksNoted | None = None
) -> DelayMatrix:
    """Return the newest matrix that a journal holds, or `newer`; an empty one says why."""
    newest: LinksNoted | None = None
    for entry in entries:
        if isinstance(entry.body, LinksNoted):
            newest = entry.body
    if newer is not None and (newest is None or newer.at_s > newest.at_s):
        newest = newer
    if newest is None:
        why = f"no links were noted (the first note follows {FIRST_NOTE_S:.0f} s of training)"
        return DelayMatrix(note=why)
    return make_delay_matrix(newest)


def make_delay_matrix(noted: LinksNoted) -> DelayMatrix:
    """Return one note as a matrix."""
    pairs: dict[tuple[int, int], LinkSample] = {}
    for sample in noted.links:
        key = (sample.src, sample.dst)
        whole = msgspec.structs.replace(sample, comm="")
        pairs[key] = add_samples(pairs[key], whole) if key in pairs else whole
    return DelayMatrix(
        generation=noted.generation,
        at_s=noted.at_s,
        window_s=noted.window_s,
        links=tuple(pairs[key] for key in sorted(pairs)),
        comms=tuple(sorted(noted.links, key=lambda s: (s.src, s.dst, s.comm))),
        note=noted.note,
    )


def add_samples(one: LinkSample, other: LinkSample) -> LinkSample:
    """Return two samples of one link as one: sums, and the worse state."""
    return msgspec.structs.replace(
        one,
        bytes_acked=one.bytes_acked + other.bytes_acked,
        busy_s=one.busy_s + other.busy_s,
        rtt_s=max(one.rtt_s, other.rtt_s),
        retrans=one.retrans + other.retrans,
        unsent_bytes=one.unsent_bytes + other.unsent_bytes,
        backoff=max(one.backoff, other.backoff),
        last_ack_s=max(one.last_ack_s, other.last_ack_s),
        unread_bytes=one.unread_bytes + other.unread_bytes,
        min_rtt_s=max(one.min_rtt_s, other.min_rtt_s),
    )


def _compute_cell(sample: LinkSample, window_s: float) -> float:
    """Return one sweep's cell; 0 where what moved was small messages, which cost latency only."""
    much = sample.bytes_acked >= CELL_BYTES * min(1.0, window_s)
    held_up = sample.busy_s > 0.5 * window_s
    return sample.busy_ms_per_mb if much or held_up else 0.0


def _quieten(samples: list[LinkSample]) -> list[LinkSample]:
    """Return the samples without the cells of links that carry next to nothing."""
    most: dict[str, int] = {}
    for s in samples:
        most[s.comm] = max(most.get(s.comm, 0), s.bytes_acked)
    return [
        s
        if s.bytes_acked >= SMALL_SHARE * most[s.comm] or s.unsent_bytes or s.backoff
        else msgspec.structs.replace(s, busy_s=0.0)
        for s in samples
    ]


def _make_sample(cell: _Cell, since_s: float) -> LinkSample:
    newest = cell.newest
    looks = [look for look in cell.looks if look.at_s >= since_s] or [cell.looks[-1]]
    count = sum(look.bytes for look in looks)
    cells = [look.cell for look in looks if look.cell]
    rtts = [look.rtt_s for look in looks if look.cell]
    return msgspec.structs.replace(
        newest,
        bytes_acked=count,
        busy_s=median(cells) * count / 1e9 if cells else 0.0,
        rtt_s=median(rtts) if rtts else newest.rtt_s,
        retrans=sum(look.retrans for look in looks),
    )


def _rank_sample(sample: LinkSample) -> tuple[bool, float, int, int, str]:
    unusual = bool(sample.backoff or sample.retrans or sample.unsent_bytes)
    return (not unusual, -sample.busy_ms_per_mb, sample.src, sample.dst, sample.comm)
