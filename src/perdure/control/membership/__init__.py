"""Who is in a job's worlds, and what becomes of a world that loses one: three kinds.

- `fixed`: all ranks or none. A world that loses one is ended, and the next one formed.
- `elastic`: a world of members, formed again in place without those that it lost.
- `quorum`: replica groups, each a world of its own; a lighthouse says who trains together.

A job is of one kind from its specification on, but for an elastic one, which is fixed until all
ranks have said that they can be members. Of each kind there is one whose actions are withheld
(`observed`).
"""

from perdure.control.job import JobState
from perdure.control.membership.elastic import Elastic
from perdure.control.membership.fixed import Fixed
from perdure.control.membership.observed import Observed, ObservedElastic, ObservedQuorum
from perdure.control.membership.quorum import Quorum
from perdure.model.job import JobSpec

__all__ = ["Membership", "choose_membership", "membership_of"]
Membership = Fixed
"""Answers what differs from one kind of world to the other."""
_FIXED = (Fixed(), Observed())
_ELASTIC = (Elastic(), ObservedElastic())
_QUORUM = (Quorum(), ObservedQuorum())


def membership_of(state: JobState) -> Membership:
    """Return the kind of a job's worlds, as things stand."""
    spec, world = state.spec, state.worlds.get(0)
    if spec is None:
        return _FIXED[False]
    if world is not None and world.elastic.members:
        return _ELASTIC[spec.observe]
    return choose_membership(spec)


def choose_membership(spec: JobSpec) -> Membership:
    """Return the kind of a job's worlds before any rank has said that it can be a member."""
    return (_QUORUM if spec.torchft.replicas else _FIXED)[spec.observe]
