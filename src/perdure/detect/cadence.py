"""What is usual for this job: how long a step takes, and which long silences are its habit.

Nothing here is configured. A threshold that a person sets is wrong for the next model; the job's
own steps are the only yardstick that always fits. Two memories, because they forget differently:
`Cadence` follows the last steps, `Habits` keeps every silence that once ended by itself.
"""

import math
from collections import deque

from perdure.model.signals.progress import JobHabits

WINDOW = 64
"""Samples a rank keeps: seconds to minutes of training, and 20 MB at 10,000 ranks."""

SETTLED = 16
"""From so many samples on the spread is trusted."""
TAIL = 5.5
"""A step is unusual beyond so many standard deviations of the logarithm of its time."""
HALF_NORMAL = math.sqrt(2.0 / math.pi)
"""The mean of the upper half of a normal distribution, in standard deviations."""

TOGETHER_S = 1.0
"""Ranks that wait for one another are silent together; their silences end within so long."""


class Cadence:
    """The times between one rank's last steps (or between its collectives, where it has none)."""

    __slots__ = ("_high_s", "_samples", "_stale", "_tail_s", "_typical_s", "_usual_s")

    def __init__(self) -> None:
        """Begin knowing nothing."""
        self._samples: deque[float] = deque(maxlen=WINDOW)
        self._typical_s = self._high_s = self._usual_s = self._tail_s = 0.0
        self._stale = False

    def __len__(self) -> int:
        """Return how many samples are known."""
        return len(self._samples)

    def add(self, duration_s: float) -> None:
        """Take one more sample; sorting waits until somebody asks."""
        self._samples.append(duration_s)
        self._stale = True

    @property
    def typical_s(self) -> float:
        """Return the median; 0 where nothing is known."""
        self._sort()
        return self._typical_s

    @property
    def high_s(self) -> float:
        """Return the longest but two of 64; 0 where nothing is known."""
        self._sort()
        return self._high_s

    @property
    def usual_s(self) -> float:
        """Return a time that a healthy step stays below; 0 where nothing is known.

        The two longest of 64 are left out, so that one evaluation does not blunt the detector;
        the distance from the median to the rest is added once more, so that a job with noisy
        long steps gets the room its own noise asks for. Few samples say little about noise:
        until there are `SETTLED`, a step is added at least.
        """
        self._sort()
        return self._usual_s

    @property
    def tail_s(self) -> float:
        """Return what a healthy step hardly ever exceeds if its logarithm is normal; 0 if unknown.

        The spread is the mean excess of the upper half, in logarithms, over the median; that of a
        normal distribution is `HALF_NORMAL` of its standard deviation. The two longest of 64 are
        left out of it, too: what is heavier than lognormal is the concern of `Habits`.
        """
        self._sort()
        return self._tail_s

    def _sort(self) -> None:
        if not self._stale:
            return
        self._stale = False
        ordered = sorted(self._samples)
        n = len(ordered)
        high = self._high_s = ordered[n - 1 - n // 32]
        self._typical_s = ordered[n // 2]
        room_s = high - self._typical_s
        if n < SETTLED:
            room_s = max(room_s, self._typical_s)
        self._usual_s = high + room_s
        self._tail_s = 0.0
        if n >= SETTLED and self._typical_s > 0.0:
            upper = ordered[n // 2 : n - n // 32]
            excess = sum(math.log(each / self._typical_s) for each in upper) / len(upper)
            self._tail_s = self._typical_s * math.exp(TAIL * excess / HALF_NORMAL)


class Habits:
    """Long silences that ended by themselves: by phase, and by where in training they came.

    Evaluation every 500 steps is not known to be one, only as a silence at step 500. It is
    allowed again where two silences (or one, and step 0) predict it: at 1000, then at 1500; and
    only while at least half of what they predicted so far has come true, for any two predict
    something.
    """

    __slots__ = ("_early_s", "_gaps", "_longest", "_phases", "_unexpected")

    KEPT = 16
    OFTEN = 2
    """What nothing predicted is a habit of the job once it came so often."""

    def __init__(self) -> None:
        """Begin knowing nothing."""
        self._gaps: dict[int, float] = {}
        self._phases: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._unexpected: deque[tuple[float, float]] = deque(maxlen=self.KEPT)
        """Silences that nothing predicted: when each ended, and how long it was."""
        self._early_s = 0.0

    def note(self) -> JobHabits:
        """Return all of it, for a detector that comes later."""
        return JobHabits(
            tuple(self._gaps.items()), dict(self._phases), dict(self._longest),
            unexpected=tuple(self._unexpected),
        )  # fmt: skip

    def learn(self, known: JobHabits) -> None:
        """Take over what an earlier detector has known; what was seen since stays."""
        for position, duration_s in known.gaps:
            if position not in self._gaps:
                self.end_gap(position, duration_s)
        for end_s, duration_s in known.unexpected:
            self.end_unexpected(end_s, duration_s)
        for mine, earlier in ((self._phases, known.phases), (self._longest, known.longest)):
            for phase, duration_s in earlier.items():
                mine[phase] = max(mine.get(phase, 0.0), duration_s)

    def begin(self, duration_s: float) -> None:
        """Learn from a silence of a rank of which too little is known yet."""
        if math.isfinite(duration_s):
            self._early_s = max(self._early_s, duration_s)

    @property
    def early_s(self) -> float:
        """Return the longest of these, of any rank: each knows its own first steps alone."""
        return self._early_s

    def end_silence(self, phase: str, duration_s: float) -> None:
        """Learn from a silence in `phase`, of a rank that declares steps, that ended by itself."""
        if self._longest.get(phase, 0.0) < duration_s < math.inf:
            self._longest[phase] = duration_s

    def longest_s(self, phase: str) -> float:
        """Return the longest silence in `phase` that ever ended by itself; 0 if none is known."""
        return self._longest.get(phase, 0.0)

    def end_phase(self, phase: str, duration_s: float) -> None:
        """A phase ended by itself."""
        if math.isfinite(duration_s):  # A rank that lies shall not be what is journaled.
            self._phases[phase] = max(self._phases.get(phase, 0.0), duration_s)

    def phase_s(self, phase: str) -> float | None:
        """Return the longest time that ever ended by itself in `phase`; None if none did."""
        return self._phases.get(phase)

    def end_gap(self, position: int, duration_s: float) -> None:
        """Learn from a silence at `position` (step, or collectives so far) that ended by itself."""
        if not math.isfinite(duration_s):
            return
        self._gaps[position] = max(self._gaps.pop(position, 0.0), duration_s)
        while len(self._gaps) > self.KEPT:
            del self._gaps[next(iter(self._gaps))]

    def end_unexpected(self, end_s: float, duration_s: float) -> None:
        """Learn from a silence that nothing predicted and that ended by itself at `end_s`.

        It is one silence, however many ranks waited for its end.
        """
        if not math.isfinite(duration_s):
            return
        if self._unexpected:
            last_s, longest_s = self._unexpected[-1]
            if end_s - duration_s < last_s + TOGETHER_S:
                self._unexpected[-1] = (max(last_s, end_s), max(longest_s, duration_s))
                return
        self._unexpected.append((end_s, duration_s))

    @property
    def unexpected_s(self) -> float:
        """Return which length of silences that nothing predicted came `OFTEN`; 0 if none did."""
        longest = sorted((duration_s for _, duration_s in self._unexpected), reverse=True)
        return longest[self.OFTEN - 1] if len(longest) >= self.OFTEN else 0.0

    def expected_s(self, position: int, tolerance: int = 0) -> float:
        """Return how long a silence at `position` is usual; 0 where none is expected.

        `tolerance` is for positions counted in collectives: ranks that wait are one ahead of
        the rank that they wait for.
        """
        points = sorted(self._gaps.items())
        # A generation that goes back to a checkpoint comes to the same step once more.
        best = 0.0 if tolerance else self._gaps.get(position, 0.0)
        for index, (at, duration_s) in enumerate(points):
            for earlier, earlier_s in ((0, 0.0), *points[:index]):
                period = at - earlier
                if period < 2 or position <= at:
                    continue
                allowed = min(tolerance, period // 8)
                offset = (position - at + allowed) % period
                longer = max(duration_s, earlier_s) > best
                if offset <= 2 * allowed and longer:
                    due = position - period + allowed - offset
                    if self._came_true(due, period, at, earlier, allowed):
                        best = max(duration_s, earlier_s)
        return best

    def _came_true(self, last: int, period: int, at: int, earlier: int, allowed: int) -> bool:
        """Return whether half of what `earlier` and `at` predict, up to `last`, were silences."""
        oldest = min(self._gaps)
        predicted = came = 0
        for start, stop, pace in ((at + period, last + 1, period), (earlier - period, 0, -period)):
            for point in range(start, stop, pace):
                if predicted >= self.KEPT or point + allowed < oldest:
                    break
                predicted += 1
                came += any(p in self._gaps for p in range(point - allowed, point + allowed + 1))
        return 2 * came >= predicted
