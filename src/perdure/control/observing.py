"""What is not done, and is written down instead: the policy says so, or the job is only observed.

Where a decision would become an action, the membership is asked first: that of a job that is only
observed (`membership/observed.py`) withholds it, and has it noted here. What an operator asks for
is done all the same: it is the operator's own. A world that cannot go on without an action ends,
as torchrun would end it.
"""

from perdure.control.world import WorldState
from perdure.model.events import ActionWithheld
from perdure.model.orders import AnyAction, RecordEvent
from perdure.model.verdicts import Verdict

_WITHHELD_MAX = 1024
"""Grounds that are remembered: replica groups have no common generation that would end them."""


def note_withheld(world: WorldState, event: ActionWithheld, ground: str = "") -> list[AnyAction]:
    """Return the record that nothing is done, and what would have been; once for each ground."""
    about, would = f"{event.cause} {event.culprit}", event.would
    key = f"{about} {event.first_seen_s!r} {ground or would}"
    if key in world.withheld:
        return []
    world.withheld.append(key)
    del world.withheld[:-_WITHHELD_MAX]
    lead = f"observed only: would have {would}" if would else "nothing was done"
    reason = f"{lead}, about {event.cause} of {event.culprit}: {event.reason}"
    return [RecordEvent(event=event, reason=reason)]


def describe_withheld(
    now: float, verdict: Verdict, reason: str, *, would: str = ""
) -> ActionWithheld:
    """Return the record that nothing is done about `verdict`."""
    return ActionWithheld(
        at_s=now,
        generation=verdict.generation,
        cause=verdict.kind,
        culprit=str(verdict.culprit),
        reason=reason,
        would=would,
        step=verdict.step,
        first_seen_s=verdict.first_seen_s,
    )
