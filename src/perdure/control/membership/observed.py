"""A job that is only observed: each kind of membership, with its actions withheld.

Every decision is made and journaled. What would act becomes the record of what would have been
done (`ActionWithheld`); nobody is called in, left out or started again.
"""

from perdure.control.job import JobState
from perdure.control.membership.elastic import Elastic
from perdure.control.membership.fixed import Fixed, Outcome
from perdure.control.membership.quorum import Quorum
from perdure.control.observing import note_withheld
from perdure.control.world import WorldState
from perdure.model.events import ActionWithheld, NodeLost
from perdure.model.orders import AnyAction


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
