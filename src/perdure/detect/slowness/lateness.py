"""Whose own work takes longer, where no stages are recorded: who arrives late at collectives.

Of one collective all ranks come out together, and the last to arrive waits for nobody; how much
longer another was inside is how long it waited. What a rank has not waited, of the time from one
collective to a later one, it has worked; that is told from chance as the work of stages is
(`shifts`). Collectives in flight together, beside which the rank works on, are waited for as long
as in one of them at most; those that are not told of count for nothing. Who waits for a late rank
in one communicator, or for what it sends, is itself late in another: of all that are late, the one
to blame is late wherever it is, and waits least.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from perdure.detect.slowness.persistence import compute_interval
from perdure.detect.slowness.shifts import Excursion, Passed, PeerShifts
from perdure.detect.slowness.stages import GAINED_KEPT, make_slowness
from perdure.model.verdicts import Slowness

WHOLE = 0.9
"""So much of a usual step is taken for one: its collectives come in a row."""
LEAST = 0.02
"""A rank works for so much of the time at least."""
STALE_S, STALE_STEPS = 30.0, 10
"""What a communicator showed is forgotten after so long, and so many steps, without it."""
LEARN = 0.1
"""Weight of the newest wait in what a rank usually waits."""


@dataclass(slots=True)
class _Comm:
    shifts: PeerShifts
    first: tuple[int, float] = (-1, 0.0)
    """Sequence number and end of the collective that the step under way came after."""
    seq: int = -1
    waits: dict[int, float] = field(default_factory=dict)
    until: dict[int, float] = field(default_factory=dict)
    """Rank -> when its last collective ended, by its own clock."""
    most: dict[int, float] = field(default_factory=dict)
    """Rank -> its longest wait in the collectives that are in flight together."""
    seen_s: float = 0.0
    step_s: float = 0.0
    suspects: dict[int, Excursion] = field(default_factory=dict)


class LatenessWatch:
    """The arrivals of all ranks of a generation, by communicator."""

    def __init__(self, passed: Passed) -> None:
        """Begin knowing nothing but which slowness has `passed`."""
        self._passed = passed
        self._comms: dict[tuple[str, int], _Comm] = {}
        self._gains: dict[int, deque[tuple[float, float, float]]] = {}
        """Suspect -> time, ratio of its work, share of the step that it costs."""
        self.waited: dict[int, float] = {}
        """Rank -> how long it waits in a collective, as a moving average."""
        self.suspects: dict[int, Excursion] = {}
        """Ranks that are later than usual by more than most noise, confirmed or not."""

    def take(
        self,
        now: float,
        key: tuple[str, int],
        arrived: tuple[int, float, Mapping[int, float], Mapping[int, float]],
        *,
        alike: bool,
        step_s: float,
    ) -> None:
        """Take one collective of communicator `key`, in which each of its ranks was.

        It has `arrived` as its number, when it ended by the clock of one rank, and by rank when it
        began and how long it took. `step_s` is what a step usually takes; 0 where unknown. The work
        of the ranks is `alike`, or each is compared with its own past.
        """
        seq, end_s, starts, durations = arrived
        comm = self._comms.get(key)
        if comm is None:
            shifts = PeerShifts(alike=alike, passed=self._passed)
            comm = self._comms[key] = _Comm(shifts, step_s=step_s)
        comm.seen_s = now
        least_s = min(durations.values())
        for rank, duration_s in durations.items():
            wait_s = duration_s - least_s
            self.waited[rank] = (1.0 - LEARN) * self.waited.get(rank, 0.0) + LEARN * wait_s
        first_seq, first_s = comm.first
        if first_seq < 0 or seq <= comm.seq or end_s <= first_s:
            self._begin(comm, seq, end_s)
            return
        for rank, start_s in starts.items():
            done_s = start_s + durations[rank] - least_s
            # A clock that has jumped is believed until the next collective's end.
            until_s = min(comm.until.get(rank, start_s), start_s + durations[rank])
            most_s = comm.most.get(rank, 0.0) if start_s < until_s else 0.0
            comm.most[rank] = max(most_s, done_s - start_s)
            comm.waits[rank] = comm.waits.get(rank, 0.0) + comm.most[rank] - most_s
            comm.until[rank] = max(start_s + durations[rank], until_s)
        comm.seq = seq
        whole_s = end_s - first_s
        if whole_s < WHOLE * step_s or not step_s:
            return
        own = {r: max(whole_s - wait_s, LEAST * whole_s) for r, wait_s in comm.waits.items()}
        self._begin(comm, seq, end_s)
        comm.step_s = whole_s
        ordered = sorted(own.values())
        if comm.shifts.take(now, whole_s, own, ordered):
            suspects = {
                rank: excursion
                for rank in own
                if (excursion := comm.shifts.excursion(rank)) is not None
                and (excursion.excess or excursion.notable)
            }
            if suspects or comm.suspects:
                comm.suspects = suspects
                self._gather()
        self._note_costs(now, own, ordered, whole_s)

    def _begin(self, comm: _Comm, seq: int, end_s: float) -> None:
        comm.first, comm.seq = (seq, end_s), seq
        comm.waits = {}

    def skip(self, key: tuple[str, int]) -> None:
        """Take no step of which a collective says nothing about its ranks."""
        if (comm := self._comms.get(key)) is not None:
            comm.first = (-1, 0.0)

    def _gather(self) -> None:
        self.suspects = {}
        for _, comm in sorted(self._comms.items()):
            for rank, excursion in comm.suspects.items():
                known = self.suspects.get(rank)
                if known is None or excursion.excess > known.excess:
                    self.suspects[rank] = excursion
        self._gains = {r: gains for r, gains in self._gains.items() if r in self.suspects}

    def _note_costs(
        self, now: float, own: Mapping[int, float], ordered: list[float], whole_s: float
    ) -> None:
        usual_s = ordered[(len(ordered) - 1) // 2]
        for rank in own.keys() & self.suspects.keys():
            next_s = ordered[-2] if own[rank] == ordered[-1] else ordered[-1]
            share = min(max(0.0, own[rank] - next_s) / whole_s, 1.0)
            gains = self._gains.setdefault(rank, deque(maxlen=GAINED_KEPT))
            gains.append((now, own[rank] / usual_s, share))

    def look(self, now: float) -> None:
        """Forget communicators in which nothing was seen for long: of an earlier epoch, perhaps."""
        old = [
            key
            for key, comm in self._comms.items()
            if now - comm.seen_s > max(STALE_S, STALE_STEPS * comm.step_s)
        ]
        for key in old:
            del self._comms[key]
        if old:
            self._gather()

    def compares(self, rank: int) -> bool:
        """Return whether `rank` is compared, in any communicator that is not forgotten."""
        return any(comm.shifts.compares(rank) for comm in self._comms.values())

    def rate(self, rank: int) -> tuple[int, float]:
        """Return in how many communicators a rank is not late, and how long it waits."""
        found = [c.shifts.excursion(rank) for c in self._comms.values() if rank in c.until]
        punctual = sum(excursion is None or not excursion.slower for excursion in found)
        return punctual, self.waited.get(rank, 0.0)

    def measure(self, now: float, rank: int, window_s: float, *, sure: bool) -> Slowness | None:
        """Return what a suspect has cost in the last `window_s`; None where unknown."""
        seen = [g for g in self._gains.get(rank, ()) if g[0] > now - window_s]
        ratio = compute_interval((g[1] for g in seen), sure=sure)
        share = compute_interval((g[2] for g in seen), sure=sure)
        if ratio is None or share is None:
            return None
        return make_slowness(ratio, share[1], share[0])

    def forget(self, rank: int) -> None:
        """Forget a rank that has left."""
        self.waited.pop(rank, None)
        for comm in self._comms.values():
            comm.suspects.pop(rank, None)
            comm.shifts.forget(rank)
        self._gather()
