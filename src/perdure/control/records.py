"""What a decision of the controller's own adds to the journal: facts that only it can know."""

from perdure.model.events import AnyEvent, NodeCordoned, NodeDraining, NodeRestored, ProbeJudged
from perdure.model.orders import (
    AnyAction,
    CordonNode,
    NoteDraining,
    NoteFinding,
    RecordEvent,
    RestoreNode,
)


def make_journal_event(now: float, action: AnyAction) -> AnyEvent | None:
    """Return the event that `action` asks to journal; None where it asks for none."""
    match action:
        case NoteFinding():
            return ProbeJudged(id=action.id, at_s=now, finding=action.finding)
        case CordonNode():
            return NodeCordoned(node=action.node, at_s=now, reason=action.reason, who=action.who)
        case RestoreNode():
            return NodeRestored(node=action.node, at_s=now, reason=action.reason, who=action.who)
        case NoteDraining():
            return NodeDraining(
                node=action.node, at_s=now, reason=action.reason, who=action.who, over=action.over
            )
        case RecordEvent():
            return action.event
        case _:
            return None
