"""A job that is only observed: each kind of membership, with its actions withheld.

Every decision is made and journaled. Where one would become an action, the membership is asked
first, and here what would have been done is noted instead (`ActionWithheld`): nobody is called in,
left out or started again. What an operator asks for is done all the same: it is the operator's own.
A world that cannot go on without an action ends, as torchrun would end it.
"""

from perdure.control.job import JobState
from perdure.control.membership.elastic import Elastic
from perdure.control.membership.fixed import Fixed, Outcome
from perdure.control.membership.quorum import Quorum
from perdure.control.world import WorldState
from perdure.model.events import ActionWithheld, NodeLost
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


class Observed(Fixed):
    """What is withheld from every kind of world."""

    def withhold(self, world: WorldState, event: ActionWithheld) -> list[AnyAction] | None:
        """Return the record of what would have been done; empty where there is one already."""
        return note_withheld(world, event)

    def cordon(self, state: JobState, node: int, reason: str) -> list[AnyAction]:
        """Leave nothing out: only operators do."""
        return []

    def free(self, state: JobState, node: int, who: str, reason: str) -> list[AnyAction]:
        """Do nothing: nothing was left out but by an operator."""
        return []

    def miss(self, state: JobState, now: float, event: NodeLost, why: str) -> Outcome:
        """Count nothing as lost: the node may train on."""
        world = state.world
        if event.node not in world.placement or not world.has_ranks:
            return Outcome()
        withheld = ActionWithheld(
            at_s=now,
            generation=world.generation,
            cause="NodeLost",
            culprit=f"node {event.node}",
            reason=why,
            would="restarted the world",
            step=state.step,
            first_seen_s=event.at_s,
        )
        return Outcome(note_withheld(world, withheld))


class ObservedElastic(Observed, Elastic):
    """Members that nobody replaces."""

    def try_again(self, state: JobState, now: float) -> Outcome:
        """Form no world again."""
        state.world.elastic.retry_s = None
        return Outcome(broken="the world broke, and is not formed again")


class ObservedQuorum(Observed, Quorum):
    """Groups that are not started again."""
