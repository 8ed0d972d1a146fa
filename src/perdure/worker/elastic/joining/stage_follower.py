"""How a rank that comes in gets a stage's blocks while the members train on.

It chooses its stage as all will choose it when it has come: where the layout stays what it is, and
only then. Of several that come at once each counts those in who were told before it, so that they
have different stages; once they are members, what they have is theirs. It follows its stage's
copies as one follows a replicated state, and is given with each step's gradients the norms of all
parameters, by which the members clip them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from perdure.plan.elastic.stages import Choose, Runs, Section, find_rest
from perdure.worker.elastic.gradients.buckets import Buckets
from perdure.worker.elastic.joining.follower import Lost
from perdure.worker.elastic.joining.wire import At, hash_settings
from perdure.worker.elastic.state.blocks import StagedReplica


class StagePupil:
    """A rank that becomes one more copy of a stage."""

    def __init__(
        self,
        replica: StagedReplica,
        me: int,
        choose: Choose,
        fit: Callable[[Runs], Buckets],
        list_norms: Callable[[int], Tensor],
    ) -> None:
        """Bring `replica` up to its donors, whose gradients go through the buckets that `fit` made.

        `choose` is how the members choose their layout. `list_norms` gives the room for the norms
        of a step.
        """
        self._replica, self._me, self._choose = replica, me, choose
        self._fit, self._list_norms = fit, list_norms

    def choose_donors(
        self, answers: Mapping[int, At], ahead: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the copies of the stage that this rank is to have.

        Raises:
            Lost: the members will have other blocks when it has come.
        """
        me, blocks = self._me, len(self._replica.blocks)
        runs = {m: tuple(Section(*run) for run in at.runs) for m, at in answers.items()}
        nodes = {member: answers[member].node for member in sorted(answers)}
        nodes |= dict.fromkeys([*ahead, me], find_node())
        rest = find_rest(blocks, answers, runs)
        choice = self._choose(list(nodes), nodes, rest, ())
        if rest is None or choice.stays is None:
            raise Lost(f"blocks move when it comes: {choice.reason}")
        return rest.copies[choice.stays.find_place(me)]

    def take_state(self, state: Any) -> None:
        """Become what the donors are."""
        runs = tuple(Section(*run) for run in state["runs"])
        self._replica.adopt(runs, state["blocks"], state["plain"])
        self._fit(runs)

    def list_sent(self, step: int) -> list[Tensor]:
        """Return the stage's gradients, and the norms of all parameters' gradients."""
        return [*self._fit(self._replica.runs).flats(step), self._list_norms(step)]

    def update(self, step: int) -> None:
        """Apply the gradients of a step."""
        buckets = self._fit(self._replica.runs)
        self._replica.take_norms(self._list_norms(step))
        buckets.expose(step)
        self._replica.update()
        buckets.drop()

    def hash_settings(self) -> str:
        """Return a hash of the optimizer's settings."""
        return hash_settings(self._replica.optimizer)


def find_node() -> str:
    """Return the name of this rank's node; an empty string outside a job."""
    return os.environ.get("PERDURE_NODE", "")
