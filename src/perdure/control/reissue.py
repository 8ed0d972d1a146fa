"""What a controller says once more when it takes over: all that may have been lost with the last.

Everything here is a level, so that whoever has heard it before does nothing.
"""

from perdure.control.elastic.reform import reissue
from perdure.control.recovery.evidence import ask_stacks_again
from perdure.control.recovery.formation import close_job
from perdure.control.recovery.placement import cordon_again
from perdure.control.recovery.probing import probe_again
from perdure.control.state import ControllerState
from perdure.control.steering.boundary import send_boundary_again
from perdure.control.steering.changes import changes_again
from perdure.control.steering.commands import inject_again
from perdure.control.steering.moves import moves_again
from perdure.control.steering.pauses import pauses_again
from perdure.model.actions import AnyAction, AssignNodes


def issue_again(state: ControllerState, now: float, reason: str) -> list[AnyAction]:
    """Return everything that is outstanding, once more."""
    actions: list[AnyAction] = []
    if state.phase == "ended":
        return close_job(state)
    if state.assignment is None:
        return actions
    nodes = tuple(sorted(state.nodes))
    actions.append(AssignNodes(nodes=nodes, assignment=state.assignment, reason=reason))
    actions += send_boundary_again(state, reason)
    actions += ask_stacks_again(state, reason)
    actions += [*cordon_again(state), *moves_again(state)]
    actions += [*changes_again(state), *pauses_again(state, now)]
    actions += [*probe_again(state), *reissue(state, reason)]
    return actions + inject_again(state, reason)
