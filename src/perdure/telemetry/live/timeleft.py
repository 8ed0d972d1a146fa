"""How long a job still takes, by the pace of its last minutes: a range, or nothing.

The last minutes are cut into stretches, and each has a pace of its own; so have the last seconds,
or a change of pace would be told a minute late. Where the fastest is at most twice the slowest,
what is left takes between the one and the other; else nobody knows. What interrupts a job (a
failure, a pause) is no part of a pace: it begins anew.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SAMPLE_S = 5.0
"""Between two samples."""
SAMPLES_MAX = 61
"""Five minutes."""
SILENT_S = 3 * SAMPLE_S
"""Who was not heard for so long may be gone."""
SPAN_S_MIN = 30.0
"""Of a shorter time nothing is concluded."""
STRETCHES = 5
RECENT_S_MIN, RECENT_STEPS = 15.0, 8
"""The last seconds: so many, and as many as so many steps take, for steps are whole."""
UNSTEADY = 2.0
"""The fastest stretch over the slowest; above it nothing is said."""

MARGIN = 0.03
"""A pace is known no better than this, however alike the stretches are."""


@dataclass(slots=True)
class StepPace:
    """Which step a job was at when."""

    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    """(job time, committed steps), a few seconds apart."""

    def is_due(self, now: float) -> bool:
        """Return whether it is time for another sample."""
        return not self.samples or now - self.samples[-1][0] >= SAMPLE_S

    def take(self, now: float, step: int) -> None:
        """Take that `step` steps are committed."""
        self.samples.append((now, max(step, self.samples[-1][1] if self.samples else step)))

    def begin(self) -> None:
        """Begin anew."""
        self.samples.clear()

    def estimate(self, now: float, num_steps: int) -> tuple[float, float] | None:
        """Return the least and the most seconds until `num_steps` are made; None: nobody knows."""
        samples = list(self.samples)
        if len(samples) < 2 or samples[-1][0] - samples[0][0] < SPAN_S_MIN:
            return None
        (begin_s, _), (end_s, step) = samples[0], samples[-1]
        left, past_s = num_steps - step, now - end_s
        length_s = (end_s - begin_s) / STRETCHES
        bounds = [begin_s + k * length_s for k in range(STRETCHES)]
        steps = [*(_interpolate(samples, at_s) for at_s in bounds), float(step)]
        mean = (step - steps[0]) / (end_s - begin_s)
        if past_s > SILENT_S or left <= 0 or mean <= 0:
            return None
        recent_s = min(end_s - begin_s, max(RECENT_S_MIN, min(length_s, RECENT_STEPS / mean)))
        recent = (step - _interpolate(samples, end_s - recent_s)) / recent_s
        paces = [recent, *((new - old) / length_s for old, new in pairwise(steps))]
        if min(paces) <= 0 or max(paces) > UNSTEADY * min(paces):
            return None
        least_s = left / max(paces) * (1 - MARGIN) - past_s
        most_s = left / min(paces) * (1 + MARGIN) - past_s
        return max(0.0, least_s), max(0.0, most_s)


def _interpolate(samples: Sequence[tuple[float, int]], at_s: float) -> float:
    """Return how many steps were made at `at_s`, which is before the last sample."""
    index = bisect_right(samples, at_s, key=lambda sample: sample[0])
    (old_s, old), (new_s, new) = samples[index - 1], samples[index]
    return old + (new - old) * (at_s - old_s) / (new_s - old_s)
