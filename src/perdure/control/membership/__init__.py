"""Who is in a job's worlds, and what becomes of a world that loses one: three kinds.

- `fixed`: all ranks or none. A world that loses one is ended, and the next one formed.
- `elastic`: a world of members, formed again in place without those that it lost.
- `quorum`: replica groups, each a world of its own; a lighthouse says who trains together.

A job is of one kind from its specification on, but for an elastic one, which is fixed until all
ranks have said that they can be members.
"""

from perdure.control.job import JobState
from perdure.control.membership.elastic import ELASTIC
from perdure.control.membership.fixed import FIXED, Fixed
from perdure.control.membership.quorum import QUORUM

__all__ = ["Membership", "membership_of"]
Membership = Fixed
"""Answers what differs from one kind of world to the other."""


def membership_of(state: JobState) -> Membership:
    """Return the kind of a job's worlds, as things stand."""
    if state.of_replicas:
        return QUORUM
    return ELASTIC if state.world.elastic.members else FIXED
