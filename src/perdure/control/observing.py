"""Jobs that are only observed: every decision is made and journaled, and none becomes an action.

Each place in `control` where a decision would become an action asks `is_observed` first, and
`note_withheld` in place of acting. What an operator asks for is done all the same: it is the
operator's own. A world that cannot go on without an action ends, as torchrun would end it.
"""

from perdure.control.job import JobState
from perdure.control.world import WorldState
from perdure.model.events import ActionWithheld
from perdure.model.orders import AnyAction, RecordEvent
from perdure.model.verdicts import Verdict

_WITHHELD_MAX = 1024
"""Grounds that are remembered: replica groups have no common generation that would end them."""


def is_observed(state: JobState) -> bool:
    """Return whether nothing may be done about what is found."""
    return state.the_spec().observe


def note_withheld(
    state: JobState,
    world: WorldState,
    now: float,
    *,
    cause: str,
    culprit: str,
    reason: str,
    would: str = "",
    ground: str = "",
    step: int | None = None,
    first_seen_s: float = 0.0,
    generation: int | None = None,
) -> list[AnyAction]:
    """Return the record that nothing is done, and what would have been; once for each ground."""
    key = f"{cause} {culprit} {first_seen_s!r} {ground or would}"
    if key in world.withheld:
        return []
    world.withheld.append(key)
    del world.withheld[:-_WITHHELD_MAX]
    event = ActionWithheld(
        at_s=now,
        generation=world.generation if generation is None else generation,
        cause=cause,
        culprit=culprit,
        reason=reason,
        would=would,
        step=state.step if step is None else step,
        first_seen_s=first_seen_s,
    )
    lead = f"observed only: would have {would}" if would else "nothing was done"
    return [RecordEvent(event=event, reason=f"{lead}, about {cause} of {culprit}: {reason}")]


def withhold_verdict(
    state: JobState,
    now: float,
    verdict: Verdict,
    reason: str,
    *,
    would: str = "",
    ground: str = "",
) -> list[AnyAction]:
    """Return the record that nothing is done about `verdict`, once for each ground."""
    return note_withheld(
        state,
        state.world,
        now,
        cause=verdict.kind,
        culprit=str(verdict.culprit),
        reason=reason,
        would=would,
        ground=ground,
        step=verdict.step,
        first_seen_s=verdict.first_seen_s,
        generation=verdict.generation,
    )
