"""What a controller says once more when it takes over: all that may have been lost with the last.

Everything here is a level, so that whoever has heard it before does nothing.
"""

from perdure.control.agreement.boundary import send_boundary_again
from perdure.control.agreement.changes import changes_again
from perdure.control.agreement.pauses import pauses_again
from perdure.control.job import JobState
from perdure.control.membership import membership_of
from perdure.control.recovery.evidence import ask_stacks_again
from perdure.control.recovery.formation import assign_again, close_job
from perdure.control.recovery.placement import cordon_again
from perdure.control.recovery.probing import probe_again
from perdure.control.steering.commands import inject_again
from perdure.control.steering.moves import moves_again
from perdure.model.actions import AnyAction


def issue_again(state: JobState, now: float, reason: str) -> list[AnyAction]:
    """Return everything that is outstanding, once more."""
    if state.phase == "ended":
        return close_job(state)
    actions = assign_again(state, reason)
    if not actions and not state.of_replicas:
        return actions
    actions += send_boundary_again(state, reason)
    if not state.of_replicas:
        actions += ask_stacks_again(state, reason)
    actions += [*cordon_again(state), *moves_again(state)]
    actions += [*changes_again(state), *pauses_again(state, now), *probe_again(state)]
    actions += membership_of(state).again(state, reason)
    return actions + inject_again(state, reason)
