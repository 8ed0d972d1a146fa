"""Who is in a job's worlds, and what becomes of a world that loses one: three kinds, one Protocol.

- `fixed`: all ranks or none. A world that loses one is ended, and the next one formed.
- `elastic`: a world of members, formed again in place without those that it lost.
- `quorum`: replica groups, each a world of its own; a lighthouse says who trains together.

A job is of one kind from its specification on, but for an elastic one, which is fixed until all
ranks have said that they can be members.
"""

from collections.abc import Collection
from typing import Protocol

from perdure.control.job import JobState
from perdure.control.membership.elastic import ELASTIC
from perdure.control.membership.fixed import FIXED
from perdure.control.membership.quorum import QUORUM
from perdure.control.outcome import Outcome
from perdure.control.world import WorldState
from perdure.model.actions import AnyAction
from perdure.model.events import NodeRegistered, RankExited
from perdure.model.orders import Assignment
from perdure.model.verdicts import Verdict


class Membership(Protocol):
    """What differs from one kind of world to the other."""

    def refuse(self, kind: str) -> str:
        """Return why there is no such command here; empty where there is."""

    def needs_agreement(self, kind: str) -> bool:
        """Return whether ranks have to agree before a command is begun."""

    def refuse_step(self, state: JobState) -> str:
        """Return why no step can be agreed upon; empty where one can, or will."""

    def can_ask(self, state: JobState) -> bool:
        """Return whether all who would have to promise can be asked now."""

    def sets_at_once(self, state: JobState) -> bool:
        """Return whether what only perdure's own parts look at is set without a step."""

    def has_declared(self, state: JobState) -> bool:
        """Return whether it is known which keys the script has, if any."""

    def tell(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return the newest word to whoever says who trains together, where somebody does."""

    def find_told(self, state: JobState, world: WorldState) -> tuple[int, ...]:
        """Return the nodes that are told what `world` shall run."""

    def complete(self, assignment: Assignment, world: WorldState) -> Assignment:
        """Return an assignment of `world` with all that its nodes have to know."""

    def find_waited(self, state: JobState, world: WorldState) -> set[int]:
        """Return the nodes on which nothing older may live before `world` starts."""

    def announce(self, state: JobState, world: WorldState) -> tuple[list[AnyAction], str]:
        """Return what is said before `world` starts, and why it does."""

    def deadline(self, state: JobState) -> float | None:
        """Return when something of the membership is due."""

    def fire(self, state: JobState, now: float, busy: Collection[int]) -> Outcome:
        """Return what is due; the world may have to be formed anew."""

    def again(self, state: JobState, reason: str) -> list[AnyAction]:
        """Return what may have been lost with the last controller; safe to repeat."""

    def lose(
        self, state: JobState, node: int, why: str, begun: Collection[int] | None = None
    ) -> Outcome:
        """Count what a node ran as lost; where a member was among it, the world is broken."""

    def come_back(self, state: JobState, event: NodeRegistered) -> Outcome:
        """Return what follows where a node registers: ranks of the world may be gone with it."""

    def leave(self, state: JobState, now: float, event: RankExited) -> Outcome:
        """A member has ended well: nobody waits for it any more."""

    def has_ended(self, state: JobState) -> bool:
        """Return whether all whom the job needs have ended well."""

    def stand_in(self, state: JobState, now: float, reason: str, *, freed: bool = False) -> Outcome:
        """Go on in place without who is lost, spares in their stead, where that can be."""

    def end_hung(self, state: JobState, verdict: Verdict) -> list[AnyAction]:
        """Return the order that ends a hung process, if there is one without which others go on."""


def membership_of(state: JobState) -> Membership:
    """Return the kind of a job's worlds, as things stand."""
    if state.of_replicas:
        return QUORUM
    return ELASTIC if state.world.elastic.members else FIXED
