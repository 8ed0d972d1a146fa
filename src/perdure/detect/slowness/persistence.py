"""How long an excess must last before it is believed: the larger, the shorter.

A sum of n noisy samples can tell an excess e from noise once n e^2 is large enough, so the time
to confirm is `CONFIRM_S / e^2`. It is counted in seconds, not in collectives or steps, so that a
x29 slowdown (which makes every step long) is not the last to be found. A quantile is taken, not
a mean: one long step (a garbage collection, an evaluation) is no slowness, however long.
Where samples are rarer than one a second, because steps are long, all times are longer by that.

It judges communicators and links. Ranks are judged by `shifts`, which needs what they do not have:
peers that do the same at the same time, and so many samples that their spread is known. A link has
one sample a sweep and no peer that carries the same; the thresholds (3 times as slow as others,
1.4 times beside slow collectives) are far above its noise, and it has two seconds.
"""

import math
from collections import deque
from collections.abc import Iterable
from itertools import pairwise

WINDOWS_S = (1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 25.0)
QUANTILES = {w: 0.2 if w < 5.0 else 0.4 if w < 12.0 else 0.5 for w in WINDOWS_S}
"""What must exceed the threshold: a few samples nearly all, hundreds by their median."""
SHORTEST_EXCESS = 2.0
"""What the shortest window is reserved for: a burst of a second is common below it."""
SAMPLES_MIN = 4
"""Fewer are one event: a long step, a burst of a neighbour."""
MANY = 2 * SAMPLES_MIN
"""In fewer, a usual sample tells two events (a burst, then a collection of garbage) from one."""
FEW = {2: 2.0, 3: 0.8}
"""Unless each of so many is this large: what is very slow shows few samples."""
OVER_S = 2.0
ODD = 4
"""One sample in so many is odd where nothing lasts."""
GAP_S, GAP_RATIO = 1.5, 5.0
"""A silence this long, and so many times the usual, is an event of its own: an evaluation."""
_KEPT_S = 30.0
SIGMAS, SURE_SIGMAS = 1.96, 3.3
"""Of the interval of a median; and of one whose lower end is acted upon."""
DURATION_MAX_S = 30 * 86400.0
"""No step and no collective is longer, whatever a rank tells."""
IMPACT = 0.03
"""What costs less than this share of the time is not slow."""
CONFIRM_S = 0.4
"""Seconds after which a slowdown of ratio 2 is confirmed; divided by (ratio - 1)^2 for others."""
CLEAR_S = 5.0
"""Seconds without a slowdown after which its verdict is withdrawn."""
WIDEST = 0.99
"""Likeness of neighbouring samples above which no interval is made wider."""


class Persistence:
    """The recent excesses (0.5 is half as much again) of one suspect, from its first on."""

    __slots__ = ("_samples", "_spacing_s", "began_s", "least", "seen_s", "unit")

    def __init__(self, now: float, least: float, every_s: float = 0.0) -> None:
        """Begin at the first excess; nothing below `least` is ever confirmed.

        A sample is expected every `every_s`.
        """
        self.unit = max(1.0, every_s)
        """The factor by which all times are longer."""
        self.began_s = self.seen_s = now
        self.least = least
        self._samples: deque[tuple[float, float]] = deque()
        self._spacing_s = every_s

    def add(self, now: float, excess: float) -> None:
        """Take one more sample."""
        gap_s = now - self._samples[-1][0] if self._samples else 0.0
        if gap_s > max(GAP_S, GAP_RATIO * self._spacing_s):
            self.began_s = now  # What was seen before so long a gap says nothing of it.
            self._samples.clear()
        elif gap_s > 0.0:
            self._spacing_s += 0.3 * (gap_s - self._spacing_s)
        self._samples.append((now, excess))
        if excess >= self.least:
            self.seen_s = now
        while self._samples[0][0] < now - _KEPT_S * self.unit:
            self._samples.popleft()

    def confirm(self, now: float, *, hurry: float = 1.0) -> float:
        """Return the confirmed excess; 0 if there is none (yet).

        `hurry` below 1 shortens the time: there is evidence of another kind as well.
        """
        if (
            self._samples
            and self._samples[-1][0] > self.seen_s
            and now - self.seen_s > OVER_S * self.unit
        ):
            return 0.0  # It lasted, and is over.
        for window_s in WINDOWS_S:
            length_s = window_s * self.unit
            if now - self.began_s < length_s * hurry - 1e-6:
                return 0.0
            seen = [(at_s, e) for at_s, e in self._samples if at_s > now - length_s]
            if len(seen) < 2 or _has_gap(seen, now, length_s):
                continue
            recent = sorted(e for _, e in seen)
            if len(seen) < SAMPLES_MIN and recent[0] < FEW[len(seen)]:
                continue
            odd = len(recent) * QUANTILES[window_s] if len(recent) >= MANY else 0
            low = recent[int(odd)]
            wanted = max((CONFIRM_S / window_s) ** 0.5, self.least)
            if window_s <= WINDOWS_S[0] and hurry == 1.0:
                wanted = max(wanted, SHORTEST_EXCESS)
            if low >= wanted and seen[-1][1] >= wanted / 2:
                return recent[len(recent) // 2]
        return 0.0

    def is_recent(self, now: float, window_s: float) -> bool:
        """Return whether an excess was seen in the last `window_s`."""
        return now - self.seen_s <= window_s * self.unit

    def onset_s(self) -> float:
        """Return when the excess that lasts until now set in.

        A suspect is watched from its first odd sample on; this is where the samples turn odd for
        good: the start of the newest run in which odd ones outnumber the others the most.
        """
        onset_s, score, best = self.began_s, 0, 0
        for at_s, excess in reversed(self._samples):
            score += 1 if excess >= self.least else -1
            if score > best:
                onset_s, best = at_s, score
        return onset_s

    def recent(self, now: float, window_s: float) -> float:
        """Return the median excess of the last `window_s`; 0 where nothing was seen."""
        since_s = now - window_s * self.unit
        recent = sorted(e for at_s, e in self._samples if at_s > since_s)
        return recent[len(recent) // 2] if recent else 0.0

    def lasting(self, now: float, window_s: float) -> float:
        """Return what three in four of the last `window_s` exceed; 0 where the newest is usual.

        A burst comes and goes, and a link that is slow is slow each time.
        """
        since_s = now - window_s * self.unit
        recent = sorted(e for at_s, e in self._samples if at_s > since_s)
        if not recent or self._samples[-1][1] < self.least:
            return 0.0
        return recent[len(recent) // 4]

    def interval(
        self, now: float, window_s: float, *, sure: bool
    ) -> tuple[float, float, float] | None:
        """Return the median excess of the last `window_s` between the ends of its interval."""
        since_s = now - window_s
        return compute_interval((e for at_s, e in self._samples if at_s > since_s), sure=sure)

    def is_over(self, now: float, clear_s: float) -> bool:
        """Return whether little unusual was seen for `clear_s`: noise has odd samples as well."""
        clear_s *= self.unit
        if now - self.seen_s >= clear_s:
            return True
        recent = [excess >= self.least for at_s, excess in self._samples if at_s > now - clear_s]
        return now - self.began_s >= clear_s and len(recent) > ODD * sum(recent)


def _has_gap(seen: list[tuple[float, float]], now: float, window_s: float) -> bool:
    """Return whether half of a window went by without a sample: something else happened there."""
    before_s = now - window_s
    for at_s, _ in seen:
        if at_s - before_s > window_s / 2:
            return True
        before_s = at_s
    return now - before_s > window_s / 2


def is_duration(seconds: float) -> bool:
    """Return whether it can be one: finite, not below 0, no longer than `DURATION_MAX_S`.

    >>> is_duration(0.5), is_duration(float("nan")), is_duration(-1.0)
    (True, False, False)
    """
    return 0.0 <= seconds <= DURATION_MAX_S


def compute_interval(
    samples: Iterable[float], *, sure: bool = False
) -> tuple[float, float, float] | None:
    """Return low end, median and high end: in 95 of 100 cases the median lies between the ends.

    The ends are order statistics, so no shape of the noise is assumed; samples that depend on one
    another make the truth wider. None without samples. `sure` asks for what can be acted upon: the
    truth is below the low end once in 2,000 times, samples in the order of time may depend on one
    another, and too few of them are None as well.

    >>> compute_interval([1.0, 2.0, 9.0])
    (1.0, 2.0, 9.0)
    """
    series = list(samples)
    ordered, n = sorted(series), len(series)
    if not n or (sure and n < SURE_SIGMAS**2):
        return None
    reach = 0.5 * (SURE_SIGMAS * _compute_dependence(series) if sure else SIGMAS) * n**0.5
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
    return ordered[low], ordered[n // 2], ordered[high]


def _compute_dependence(series: list[float]) -> float:
    """Return how much wider an interval is because each sample resembles the one before.

    Work that changes slowly makes one rank slow for many steps: they are one event.
    """
    mean = sum(series) / len(series)
    off = [x - mean for x in series]
    variance = sum(x * x for x in off)
    if variance <= 0.0:
        return 1.0
    alike = sum(a * b for a, b in pairwise(off)) / variance
    alike = min(max(alike, 0.0), WIDEST) if math.isfinite(alike) else WIDEST
    return float(((1.0 + alike) / (1.0 - alike)) ** 0.5)


class Baseline:
    """Learns what a duration usually is in this generation, and follows slow drift.

    The first samples of a thing (first steps, a bucket just rebuilt) are not its usual ones: two
    are left out and the median of the next few is the start.
    """

    __slots__ = ("_first", "_seen", "_updated_s", "learned", "value")

    SKIPPED, LEARNED = 2, 6
    DRIFT_S = 60.0
    """Time constant with which it follows."""

    def __init__(self, learned: int = LEARNED) -> None:
        """Begin knowing nothing; the median of so many samples is the start."""
        self.value = 0.0
        self.learned = learned
        self._first: list[float] = []
        self._seen = 0
        self._updated_s = 0.0

    @property
    def known(self) -> bool:
        """Whether enough was seen."""
        return self.value > 0.0

    def add(self, now: float, sample: float, tolerance: float) -> None:
        """Take a sample; one beyond `tolerance` times the value is not learned from."""
        self._seen += 1
        if self._seen <= self.SKIPPED:
            return
        if not self.known:
            self._first.append(sample)
            if len(self._first) >= self.learned:
                self.value = max(sorted(self._first)[len(self._first) // 2], 1e-9)
                self._first, self._updated_s = [], now
            return
        if sample > tolerance * self.value:
            self._updated_s = now
            return
        # The mean of all samples at first, because few of them are far off by chance.
        weight = min(0.1, max((now - self._updated_s) / self.DRIFT_S, 1.0 / self._seen))
        self.value += weight * (sample - self.value)
        self._updated_s = now
