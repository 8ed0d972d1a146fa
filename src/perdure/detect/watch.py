"""One rank as its heartbeats show it: progress, activity, and how much silence it is allowed.

*Progress* is a step, a collective or a change of phase, and nothing else: a pulse proves only
that something can send one. *Activity* is what /proc says (stopped, quiet, busy); it never
clears a suspicion, it only decides how soon one may be acted upon. The one exception is a rank
that has shown no step and no collective yet: its CPU and I/O are all there is to see, and
minutes of preprocessing before the first collective are common.
"""

import math
from dataclasses import dataclass, field

import msgspec

from perdure.detect.cadence import SETTLED, Cadence, Habits
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import CommProgress, RankAccount, RankProgress
from perdure.model.verdicts import Activity

SAMPLE_S = 1.0
"""Activity is judged over at least this long: /proc counts CPU in ticks of 10 ms."""
CPU_SHARE = 0.05
"""Above this share of one core a process is busy."""
IO_RATE = 16384.0
"""Above so many bytes a second, too."""
MOVES_MIN = 5
"""Before so many collectives were seen to move, a script without steps is at its first one."""
STARTUP = 2.0
"""Before the first collective or step, silence may last this many times `phase_allowance_s`."""
SLACK = 1.5
"""How much longer than ever before a known phase or silence may last."""
UNEXPECTED_SLACK = 2.5
"""The same of silences that nothing predicts: where they are the tail of some work, the longest of
a few says little of the next one."""
MOST_S, MOST_STEPS = 2.5, 18.0
"""Noise may ask for so much of silence: a hang is to be told within 3 s, or 20 steps."""

_DISK_PHASES = frozenset({"restore", "checkpoint"})
"""Waiting for a disk moves neither CPU nor bytes, and ends; and one quick save says nothing of
the next, because others use the disk too."""
LONG_PHASES = frozenset({"init", "group", "restore", "checkpoint", "boundary"})
_START_PHASES = frozenset({"init", "group"})
"""A script without `run.steps()` never leaves them: once its collectives move, it trains."""


@dataclass(slots=True)
class RankWatch:
    """Follows one rank of the current generation: what it does, and since when."""

    rank: int
    node: int
    cadence: Cadence
    config: DetectConfig
    newest: RankProgress
    """What its newest heartbeat shows."""
    received_s: float = 0.0
    """When the controller heard of it last."""
    began_s: float = 0.0
    """When its first heartbeat was sent."""
    seen_s: float = 0.0
    """When the newest heartbeat was sent: silence is measured up to here, not up to now, so
    that a late heartbeat is never taken for a silent rank."""
    progress_s: float = 0.0
    heartbeat_s: float = 0.0
    account: RankAccount = field(default_factory=RankAccount)
    """As its newest heartbeat has it, or the record of its end."""
    comms: tuple[CommProgress, ...] = ()
    collectives: int = 0
    """Collectives entered so far, in all communicators."""
    moves: int = 0
    instrumented: bool = False
    """It has shown a step or a collective."""
    stopped_in_gap: bool = False
    busy_s: float = 0.0
    """When CPU or I/O was last seen to move."""
    blocked_s: float = -math.inf
    """When it, or a process below it, was last seen in state D."""
    gone: bool = False
    clock_s: float = 0.0
    """Added to its node's stamps to make them the controller's."""
    awaited: tuple[CommProgress, ...] = ()
    """Sends and receives that it is blocked in, where that is known, each as its communicator."""
    moved_s: float = 0.0
    """When the controller last heard of progress."""
    ends: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Communicator -> the last collective that ended, and when the controller first heard so."""
    _anchor: tuple[float, float, int] = field(default=(0.0, 0.0, 0))

    @property
    def silence_s(self) -> float:
        """Return how long it had made no progress when it was last heard of."""
        return self.seen_s - self.progress_s

    @property
    def stopped(self) -> bool:
        """Return whether it is in state T. A debugger's `t` is not: py-spy makes it too."""
        return self.newest.proc.state == "T"

    @property
    def declared_busy(self) -> bool:
        """Return whether a busy phase was in force when it was last heard of.

        A stopped process is in none: no evaluation is ever in state T.
        """
        phase = self.newest.busy_phase
        return phase is not None and self.seen_s <= phase.until_s and not self.stopped

    @property
    def activity(self) -> Activity:
        """Return what its process does."""
        if self.gone:
            return "gone"
        if self.stopped:
            return "stopped"
        if self.newest.phase in _DISK_PHASES:
            return "busy"
        if self.blocked_s > self.busy_s and self.seen_s - self.blocked_s <= 2 * SAMPLE_S:
            return "blocked"
        return "busy" if self.seen_s - self.busy_s <= 2 * SAMPLE_S else "quiet"

    @property
    def changed_s(self) -> float:
        """Return when anything of it was last seen to change: progress, CPU, I/O, or state D."""
        return max(self.progress_s, self.busy_s, self.blocked_s)

    @property
    def position(self) -> int:
        """Return where in training it is: committed steps, or else collectives."""
        return self.account.step if self.account.step >= 0 else self.collectives

    @property
    def joined(self) -> bool:
        """Return whether it declares steps."""
        return self.account.init_s > 0 or self.account.step >= 0

    @property
    def _tolerance(self) -> int:
        """Return by how much its position may be off: collectives of ranks that wait are ahead."""
        return 0 if self.account.step >= 0 else 2

    def learned(self, steps: int) -> bool:
        """Return whether so many steps that the script declares were seen, now or in earlier lives.

        A heartbeat may time several short ones at once.
        """
        seen = max(self.account.step - self.account.start_step, len(self.cadence))
        return self.account.step >= 0 and seen >= steps

    def begin(self, progress: RankProgress, sent_s: float) -> None:
        """Take the first heartbeat of this generation (or the first after a new controller)."""
        self.began_s = self.busy_s = sent_s
        self._anchor = (sent_s, progress.proc.cpu_s, progress.proc.io_bytes)
        self._store(progress, _entered(progress.comms))
        stamps = self._newest_stamp(progress)
        self.progress_s = min(stamps, sent_s) if self.instrumented and stamps > 0 else sent_s

    def hear(self, now: float, sent_s: float, *, moved: bool) -> None:
        """Note that the newest heartbeat, of `sent_s`, has come, and whether it shows progress."""
        self.seen_s, self.received_s = sent_s, now
        if moved:
            self.moved_s = now
        for comm in self.comms:
            if self.ends.get(comm.name, (0, 0.0))[0] != comm.ended_seq:
                self.ends[comm.name] = (comm.ended_seq, now)

    def follow(self, progress: RankProgress, sent_s: float, habits: Habits) -> bool:
        """Take a heartbeat; return whether it shows progress."""
        self._weigh(progress, sent_s)
        if progress.proc.state == "D" or progress.proc.blocked:
            self.blocked_s = sent_s
        collectives = _entered(progress.comms)
        stepped = progress.account.step - self.account.step
        moved = (
            progress.heartbeat_s > self.heartbeat_s
            or stepped > 0
            or collectives > self.collectives
            or progress.phase != self.newest.phase
        )
        if moved:
            self._move(progress, sent_s, habits, stepped, collectives > self.collectives)
        elif not self.instrumented and self.busy_s == sent_s:
            self.progress_s = sent_s
        self._store(progress, collectives)
        self.stopped_in_gap |= self.stopped or progress.phase == "paused" or self.declared_busy
        return moved

    def _move(
        self, new: RankProgress, sent_s: float, habits: Habits, stepped: int, entered: bool
    ) -> None:
        at_s = min(self._newest_stamp(new), sent_s)
        if at_s <= self.progress_s:
            at_s = sent_s
        gap_s, old = at_s - self.progress_s, self.newest
        if new.phase != old.phase and old.phase_since_s > 0 and not self.stopped_in_gap:
            habits.end_phase(old.phase, new.phase_since_s - old.phase_since_s)
        if self.instrumented and len(self.cadence) < SETTLED and not self.stopped_in_gap:
            habits.begin(gap_s)
        if self.instrumented and len(self.cadence) >= 3 and not self.stopped_in_gap:
            floor_s = self.config.hang_floor_s
            if gap_s > floor_s and gap_s > floor_s + self.cadence.usual_s:
                expected_s = habits.expected_s(self.position, self._tolerance)
                if not expected_s or gap_s > floor_s + SLACK * expected_s:
                    habits.end_unexpected(at_s + self.clock_s, gap_s)
                habits.end_gap(self.position, gap_s)
        if self.instrumented and self.account.step >= 0 and not self.stopped_in_gap:
            habits.end_silence(old.phase, gap_s)
        last_s, new_last_s = self.account.last_step_s, new.account.last_step_s
        if self.stopped_in_gap:
            pass  # What a stopped rank took says nothing about what its steps take.
        elif new.account.step >= 0:
            if stepped > 0 and last_s > 0 and new_last_s > last_s:
                self.cadence.add((new_last_s - last_s) / stepped)
        elif entered and self.instrumented:
            self.cadence.add(gap_s)
        self.moves += 1
        self.progress_s = at_s
        self.stopped_in_gap = False

    def _newest_stamp(self, progress: RankProgress) -> float:
        """Return its newest stamp; accounts are in its node's own time."""
        step_s = progress.account.last_step_s
        step_s += self.clock_s if step_s > 0 else 0.0
        return max(progress.heartbeat_s, progress.phase_since_s, step_s)

    def _weigh(self, progress: RankProgress, sent_s: float) -> None:
        at_s, cpu_s, io_bytes = self._anchor
        elapsed_s = sent_s - at_s
        if elapsed_s < SAMPLE_S:
            return
        cpu, read = progress.proc.cpu_s - cpu_s, progress.proc.io_bytes - io_bytes
        # A sum that shrank lost a descendant: that, too, is something moving.
        if cpu > CPU_SHARE * elapsed_s or read > IO_RATE * elapsed_s or cpu < 0 or read < 0:
            self.busy_s = sent_s
        self._anchor = (sent_s, progress.proc.cpu_s, progress.proc.io_bytes)

    def _store(self, progress: RankProgress, collectives: int) -> None:
        self.newest = progress
        self.heartbeat_s = max(self.heartbeat_s, progress.heartbeat_s)
        self.account, self.comms = progress.account, progress.comms
        self.collectives = max(self.collectives, collectives)
        self.awaited = _list_awaited(progress) if progress.spans else ()
        self.instrumented = self.collectives > 0 or progress.account.first_step_s > 0

    def waits_s(self, comm: CommProgress) -> float:
        """Return how long it had been in its newest collective when it was last heard of."""
        return self.seen_s - comm.since_s - self.clock_s

    def is_silent(self, habits: Habits) -> bool:
        """Return whether it had made no progress for longer than it may when it was heard of."""
        silence_s = self.silence_s
        return (
            silence_s > self.config.hang_floor_s and silence_s > self.compute_allowance(habits)[0]
        )

    def compute_allowance(self, habits: Habits) -> tuple[float, str]:
        """Return how long it may be silent now, and why so long.

        A stopped process gets no allowance for a phase: no evaluation is ever in state T.
        """
        config, phase, busy_phase = self.config, self.newest.phase, self.newest.busy_phase
        if phase == "paused" and not self.stopped:
            return math.inf, "a pause"
        if busy_phase is not None and self.declared_busy:
            most_s = busy_phase.until_s - self.progress_s
            return most_s, f"the declared busy phase {busy_phase.name}"
        floor_s = config.hang_floor_s
        if self.stopped:
            return floor_s + self.cadence.typical_s, "a stopped process"
        if not self.instrumented or phase == "finished":
            return STARTUP * config.phase_allowance_s, "before the first, or after the last, step"
        base_s = floor_s + self.cadence.usual_s
        trains = phase in _START_PHASES and self.moves >= MOVES_MIN
        if phase in LONG_PHASES and not trains:
            known_s = habits.phase_s(phase)
            room_s = 0.0 if known_s is None else floor_s + SLACK * known_s
            if known_s is None or phase in _DISK_PHASES:
                room_s = max(room_s, config.phase_allowance_s)
            return max(base_s, room_s), f"phase {phase}"
        steps = self.account.step
        first = steps <= self.account.start_step if steps >= 0 else self.moves < MOVES_MIN
        if first or len(self.cadence) < 3:
            return max(base_s, config.phase_allowance_s), "the first step"
        expected_s = habits.expected_s(self.position, self._tolerance)
        seen_s = min(self._most_s, UNEXPECTED_SLACK * habits.unexpected_s)
        step_s = floor_s + self._step_s
        if len(self.cadence) < SETTLED:
            step_s = max(step_s, floor_s + min(self._most_s, habits.early_s))
        allowed = [(step_s, "the usual step"), (seen_s, "silences that nothing predicted")]
        if expected_s:
            allowed.append((floor_s + SLACK * expected_s, "a silence seen here before"))
        return max(allowed)

    @property
    def room_s(self) -> float:
        """Return how much later than its usual step this one may be without being unusual."""
        return max(0.0, self._step_s - self.cadence.typical_s)

    @property
    def _step_s(self) -> float:
        """Return what a step of its job, as noisy as it is, may take."""
        noisy_s = min(self.cadence.tail_s, self._most_s - self.config.hang_floor_s)
        return max(self.cadence.usual_s, noisy_s)

    @property
    def _most_s(self) -> float:
        """Return the most that noise may ask for.

        Of a job that declares no steps only the times between collectives are known: most are
        between two of one step, and those over which a step is computed are the long ones.
        """
        declared = self.account.step >= 0
        step_s = self.cadence.typical_s if declared else self.cadence.high_s
        return max(MOST_S, MOST_STEPS * step_s)


def _entered(comms: tuple[CommProgress, ...]) -> int:
    return sum([comm.started_seq for comm in comms])


def _list_awaited(progress: RankProgress) -> tuple[CommProgress, ...]:
    """Return the communicators of sends and receives, as they are where a thread is blocked.

    One that is under way need not be waited for: it may be for later, or long since done.
    """
    found = []
    for span in progress.spans:
        if span.awaited and span.peer >= 0 and span.comm < len(progress.comms):
            comm = progress.comms[span.comm]
            found.append(
                msgspec.structs.replace(
                    comm, started_seq=span.seq, op=span.op, since_s=span.start_s, peer=span.peer
                )
            )
    return tuple(found)
