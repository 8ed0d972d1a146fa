"""Which step to ask for: the one that the ranks come to once they have heard the question.

S is the step that the ranks will come to once they have heard the question. The journal knows
only now and then how far they are, so a command, or the timer of a checkpoint, brings with it what
the newest heartbeats say (`Pace`), and that is carried on to the moment when the question should
be there. A guess that is too low costs a veto, which tells more, and another try further ahead;
one that is too high costs waiting. Neither can harm.
"""

import math

from msgspec import structs

from perdure.control.agreements import OpenBoundary
from perdure.control.job import JobState
from perdure.model.steering import Pace

_PACE_S = 1.0
"""Older than this and a step, a pace is not carried on: the ranks may have stood meanwhile."""
_JITTER_STEPS = 0.1
"""Steps are not all of one length."""
_LEAD_S_MIN, _LEAD_S_MAX = 0.004, 1.0


def note_pace(state: JobState, pace: Pace | None) -> None:
    """Take what an event has brought; another generation's is worth nothing."""
    if pace is not None:
        known = state.the_spec().torchft.replicas or pace.generation == state.world.generation
        state.steering.pace = pace if known else None


def find_next_step(pace: Pace | None, known: int, now: float, lead_s: float, tries: int) -> int:
    """Return the step that the ranks should come to next, `lead_s` from `now`.

    `known` is a step that some rank is known to have committed. Each further try looks twice as
    far ahead, by time and by steps.

    >>> pace = Pace(generation=0, step=100, at_s=10.0, step_s=0.1)
    >>> find_next_step(pace, known=90, now=10.12, lead_s=0.01, tries=1)
    102
    >>> find_next_step(None, known=90, now=10.12, lead_s=0.01, tries=1)
    92
    """
    if pace is None or now - pace.at_s > _PACE_S + pace.step_s:
        return known + (1 << min(tries, 10))
    there_s = now + lead_s * (1 << (tries - 1))
    expected = math.floor(pace.find_step(there_s) + _JITTER_STEPS)
    return max(expected + 1, known + (1 << min(tries - 1, 10)))


def look_ahead(state: JobState, now: float, tries: int) -> int:
    """Return the step to ask for, by what is known of the ranks' pace and of earlier questions."""
    steering = state.steering
    lead_s = min(_LEAD_S_MAX, max(_LEAD_S_MIN, steering.answer_s))
    return find_next_step(steering.pace, max(state.step, 0), now, lead_s, tries)


def note_answered(state: JobState, now: float, boundary: OpenBoundary) -> None:
    """All have answered: so long does a question take."""
    state.steering.answer_s += 0.3 * (now - boundary.asked_s - state.steering.answer_s)


def correct_pace(state: JobState, now: float, step: int) -> None:
    """A rank was further than expected: go on from there."""
    pace = state.steering.pace
    if pace is not None and pace.find_step(now) < step + 1:
        state.steering.pace = structs.replace(pace, step=step, at_s=now)
