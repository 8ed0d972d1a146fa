"""Verbs for torchft's replica groups: the one function that decides them.

A replica group is a world of its own, so no other group ends when one is drained or evicted; the
lighthouse is told (`HoldReplicas`, `EvictReplica`), and a warm spare heals from a peer.
"""

from perdure.control.answers import answer
from perdure.control.state import ControllerState, OpenCommand
from perdure.control.steering.targets import UnknownTargetError, find_groups
from perdure.model.actions import AnyAction


def order_replicas(state: ControllerState, now: float, command: OpenCommand) -> list[AnyAction]:
    """Carry out drain, cordon, evict or restore on the replica groups that `command` names.

    It must answer the command exactly once: at once with `answer`, or later, having put it into
    `state.commands`. A dry run (`args["dry_run"]`) is answered at once and changes nothing. What
    would leave fewer than `torchft.min_replicas` members is refused.
    """
    targets = [str(target) for target in command.args.get("targets", ())]
    try:
        groups = find_groups(state, targets)
    except UnknownTargetError as error:
        return answer(state, command.id, False, str(error), {})
    names = ", ".join(f"replica {group}" for group in groups)
    why = f"{command.kind} of {names}: replica groups of torchft are not moved by this verb yet"
    return answer(state, command.id, False, why, {"replicas": list(groups)})
