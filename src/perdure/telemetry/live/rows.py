"""One row a rank: what its newest heartbeat says, and what the journal says beside that.

At 10,000 ranks a picture is mostly these rows, so one is made again only when something that it
shows has changed: a heartbeat of its node, its exit, its place, or a suspicion. A picture made of
kept rows equals one that is made from scratch (`tests/properties/test_snapshot_rows.py`).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from perdure.model.events import JournalEntry, ProgressNoted, RankExited, RanksStarted
from perdure.model.job import JobSpec
from perdure.model.report import RankRow
from perdure.model.signals.progress import NodeBeat, RankProgress
from perdure.model.steering import Pace
from perdure.telemetry.accounting.history import Generation

SPEED_WINDOW_S = 10.0
_WAITING_SHOWN_S = 0.1
_WAITING_S = 1.0
_SILENT_S = 1.0
"""Of whom nothing was heard for so long may be gone, while others go on."""
_IN_LOOP = frozenset({"step", "checkpoint", "boundary", "paused"})


@dataclass(slots=True)
class Track:
    """One rank's newest heartbeat, and two of its steps to tell its speed by.

    The older of them lies between half a window and a window back, so that a speed costs two
    numbers a rank and not a list of them.
    """

    progress: RankProgress
    sent_s: float
    old_s: float = 0.0
    old_step: int = -1
    """-1: no step is known to count from."""
    mid_s: float = 0.0
    mid_step: int = -1
    last_s: float = 0.0
    paused_s: float = 0.0
    """When it was last seen to stand still by order: time that is no part of its speed."""

    def take(self, progress: RankProgress, sent_s: float) -> None:
        """Take the next heartbeat."""
        account = progress.account
        before = self.progress.account
        begun = progress.pid != self.progress.pid or account.step < before.step
        begun |= account.heal_s > before.heal_s  # A group that heals leaps to its peers' step.
        self.progress, self.sent_s = progress, sent_s
        if progress.phase == "paused":
            self.paused_s = sent_s
        if begun or progress.phase == "paused":
            self.old_step = self.mid_step = -1
        if not account.first_step_s or account.step < 0 or progress.phase == "paused":
            return  # A rank that resumes leaps to its step; that is no speed.
        at_s = max(account.last_step_s or sent_s, self.paused_s)
        if self.old_step < 0:
            self.old_s = self.mid_s = at_s
            self.old_step = self.mid_step = account.step
        self.last_s = at_s
        if at_s - self.mid_s >= SPEED_WINDOW_S / 2:
            self.old_s, self.old_step = self.mid_s, self.mid_step
            self.mid_s, self.mid_step = at_s, account.step

    def compute_speed(self) -> float:
        """Return steps a second; it falls, and ends at 0, while no step comes."""
        if self.old_step < 0 or self.last_s <= self.old_s:
            return 0.0
        steps = self.progress.account.step - self.old_step
        if steps <= 0:
            return 0.0
        length_s = self.last_s - self.old_s
        idle_s = self.sent_s - self.last_s
        if idle_s * steps <= 2 * length_s:
            return steps / length_s
        if idle_s > SPEED_WINDOW_S and idle_s * steps > 3 * length_s:
            return 0.0
        return steps / (length_s + idle_s)


class RankRows:
    """The rows of one job's ranks, and which of them have to be made again."""

    def __init__(self, spec: JobSpec) -> None:
        """Begin without any."""
        self._spec = spec
        self._tracks: dict[int, Track] = {}
        self._left: set[int] = set()
        self._rows: list[RankRow] = []
        self._changed: set[int] = set()
        self._suspected: AbstractSet[int] = frozenset()
        self._key: tuple[object, ...] = ()
        self._newest: dict[int, int] = {}
        """Slot -> the member that has taken it over, in an elastic world."""
        self._num_steps: dict[int, float] = {}
        """How many steps a loop is to make, as ranks say -> when one has said so last."""

    @property
    def joined(self) -> bool:
        """Whether any rank's script has called `perdure.init`."""
        return any(track.progress.account.init_s > 0 for track in self._tracks.values())

    @property
    def unseen(self) -> set[int]:
        """Ranks of which no steps can be seen, whatever they do."""
        return {rank for rank, track in self._tracks.items() if track.progress.unseen}

    def estimate_pace(self, generation: int) -> Pace | None:
        """Return how far the furthest rank is and how fast it goes; None where none moves."""
        heard = self._list_heard(_SILENT_S)
        furthest = max(heard, key=lambda track: track.progress.account.step, default=None)
        speed = furthest.compute_speed() if furthest is not None else 0.0
        if furthest is None or speed <= 0.0 or furthest.progress.phase != "step":
            return None
        step_s = 1.0 / speed
        # What was not committed when the heartbeat was sent has at least that step to go.
        at_s = max(furthest.last_s, furthest.sent_s - step_s)
        step = furthest.progress.account.step
        return Pace(generation=generation, step=step, at_s=at_s, step_s=step_s)

    def find_slowest(self, heard_s: float) -> int | None:
        """Return how many steps whoever is furthest behind has made, of those heard `heard_s` ago.

        None where nobody makes any. A job takes as long as its slowest rank.
        """
        slowest: int | None = None
        for track in self._list_heard(heard_s):
            account = track.progress.account
            if track.progress.rank in self._left:
                continue
            if account.step <= 0 or (slowest is not None and account.step >= slowest):
                continue
            if account.first_step_s and track.progress.phase in _IN_LOOP:
                slowest = account.step
        return slowest

    def measure_open_step(self) -> float:
        """Return the seconds that the step in progress has lasted, in the slowest rank."""
        lengths = [0.0]
        for track in self._list_heard(_SILENT_S):
            account = track.progress.account
            begun_s = account.last_step_s or account.first_step_s
            if begun_s and track.progress.phase == "step":
                lengths.append(track.sent_s - begun_s)
        return max(lengths)

    def list_num_steps(self, heard_s: float) -> set[int]:
        """Return how many steps loops have said within `heard_s` that they make, of those that do.

        A picture is made twice a second, so that no rank is asked for it.
        """
        since_s = max(self._num_steps.values(), default=0.0) - heard_s
        self._num_steps = {n: at_s for n, at_s in self._num_steps.items() if at_s >= since_s}
        return set(self._num_steps)

    def _list_heard(self, heard_s: float) -> list[Track]:
        newest_s = max((track.sent_s for track in self._tracks.values()), default=0.0)
        return [track for track in self._tracks.values() if track.sent_s >= newest_s - heard_s]

    def list_busy_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose declared busy phase is in force; whoever is stopped is in none."""
        heard_s = max((track.sent_s for track in self._tracks.values()), default=0.0)
        return tuple(
            rank
            for rank, track in sorted(self._tracks.items())
            if (phase := track.progress.busy_phase) is not None
            and heard_s - _SILENT_S <= track.sent_s <= phase.until_s
            and track.progress.proc.state != "T"
        )

    def begin(self) -> None:
        """Forget what older generations have said."""
        self._tracks, self._left = {}, set()
        self._newest = {}
        self._num_steps = {}
        self._key = ()

    def take_beat(self, beat: NodeBeat) -> None:
        """Take a heartbeat."""
        tracks, sent_s = self._tracks, beat.sent_s
        for progress in beat.ranks:
            track = tracks.get(progress.rank)
            if track is None:
                track = tracks[progress.rank] = Track(progress, sent_s)
            track.take(progress, sent_s)
            self._changed.add(progress.rank)
            if progress.num_steps:
                self._num_steps[progress.num_steps] = sent_s

    def leave(self, rank: int) -> None:
        """Note that a rank of this generation has ended: nobody waits for it any more."""
        self._left.add(rank)

    def add(self, entry: JournalEntry) -> None:
        """Note which rows the next entry of the journal changes, beside a new generation's."""
        match entry.body:
            case RankExited() as event:
                self._changed.add(event.record.rank)
            case RanksStarted() as event:
                nproc = self._spec.nproc if self._spec.groups else 0  # A group begins anew as one.
                group = range(event.node * nproc, (event.node + 1) * nproc)
                self._changed.update(event.pids, group)
                slots = {rank: self._spec.slot_of(rank) for rank in event.pids}
                later = {slot: r for r, slot in slots.items() if r >= self._spec.world_size}
                self._newest |= {} if self._spec.groups else later
            case ProgressNoted() as event:
                self._changed.update(event.accounts)

    def make(
        self,
        newest: Generation | None,
        suspected: AbstractSet[int],
        homes: dict[int, int],
        pids: dict[int, int],
        lives: Mapping[int, Generation],
    ) -> tuple[RankRow, ...]:
        """Return all rows; `homes` and `pids` are by rank, as last started.

        A replica group has a generation of its own, by its number in `lives`.
        """
        count = self._spec.groups * self._spec.nproc
        count = count or max([self._spec.world_size, *(slot + 1 for slot in self._newest)])
        stepping = newest is not None and newest.stepping is not None
        key = (count, newest and newest.number, stepping)
        if key != self._key or len(self._rows) != count:
            self._key = key
            ranks: AbstractSet[int] = frozenset(range(count))
            self._rows = [_EMPTY] * count
        else:
            ranks = self._changed | (suspected ^ self._suspected)
        for slot in {self._spec.slot_of(rank) for rank in ranks}:
            if not 0 <= slot < count:
                continue
            rank = self._newest.get(slot, slot)
            node = homes.get(rank)
            self._rows[slot] = self._make_row(
                rank,
                self._spec.node_of(rank) if node is None else node,
                pids.get(rank, 0),
                lives.get(rank // self._spec.nproc, newest),
                stepping,
                rank in suspected,
            )
        self._changed, self._suspected = set(), suspected
        return tuple(self._rows)

    def _make_row(
        self,
        rank: int,
        node: int,
        pid: int,
        newest: Generation | None,
        stepping: bool,
        suspected: bool,
    ) -> RankRow:
        history = newest.ranks.get(rank) if newest is not None else None
        record = history.exit if history is not None else None
        over = "" if record is None else "exited"
        if record is not None and record.failed and not record.asked:
            over = "failed"
        state = over or ("suspected" if suspected else "")
        known = history.account.step if history is not None else -1
        track = self._tracks.get(rank)
        if track is None:
            return RankRow(rank, node, pid, state or "starting", "", known, 0.0, "", 0.0, 0)
        progress = track.progress
        phase, proc = progress.phase, progress.proc
        collective, waiting = _describe_collective(progress, track.sent_s)
        step = progress.account.step
        if not state and phase not in _IN_LOOP:
            state = "running" if stepping else "starting"
        elif not state:
            state = "waiting" if waiting and phase != "paused" else "running"
        return RankRow(
            rank,
            node,
            progress.pid,
            state,
            phase,
            max(step, known) if over else step,
            0.0 if over else track.compute_speed(),
            collective,
            proc.cpu_s,
            proc.rss_bytes,
            progress.busy_phase if record is None else None,
        )


_EMPTY = RankRow(-1, -1, 0, "starting", "", -1, 0.0, "", 0.0, 0)


def _describe_collective(progress: RankProgress, sent_s: float) -> tuple[str, bool]:
    """Return the newest collective in words, and whether the rank has long waited in it."""
    comms = progress.comms
    if not comms:
        return "", False
    comm = comms[0] if len(comms) == 1 else max(comms, key=lambda c: (c.since_s, c.name))
    text = f"{comm.op or 'collective'} #{comm.started_seq}"
    if 0 <= comm.ended_seq < comm.started_seq and comm.since_s > 0:
        waited_s = sent_s - comm.since_s
        if waited_s > _WAITING_SHOWN_S:
            return f"{text} (waiting {waited_s:.1f} s)", waited_s > _WAITING_S
    return text, False
