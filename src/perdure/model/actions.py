"""Imperatives that the controller hands to its shell: orders (`model/orders.py`), and its own.

Each says why, and describes itself for the journal.
"""

from typing import Any, Literal

import msgspec

from perdure.model.events import (
    ActionWithheld,
    DeviceReported,
    InvitationMade,
    InvitationRevoked,
    InvitationUsed,
    JobPaused,
    JobResumed,
    MachineReported,
    OperatorNoted,
    PreemptionNoticed,
    PreemptionWithdrawn,
    SettingsChanged,
    VerdictReached,
)
from perdure.model.orders import AnyOrder, Assignment
from perdure.model.signals.links import ProbeFinding


class Action(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Base of all actions that are no orders."""

    reason: str

    def describe(self) -> str:
        """Return the line that the journal keeps of it."""
        return ""


class AssignNodes(Action, frozen=True, kw_only=True):
    """Send `assignment` to `nodes`, and again to each that registers later."""

    nodes: tuple[int, ...]
    assignment: Assignment

    def describe(self) -> str:
        """Return what runs where."""
        a = self.assignment
        where = f", store {a.master_addr}:{a.master_port}" if a.phase == "run" else ""
        return f"#{a.number} {a.phase} generation {a.generation}{where}, nodes {self.nodes}"


class NodeAction(Action, frozen=True, kw_only=True):
    """Base of what takes a node out of the job, or back into it."""

    node: int
    who: str = ""
    """Empty: the policy did it."""

    def describe(self) -> str:
        """Return which node."""
        return f"node {self.node}"


class RestoreNode(NodeAction, frozen=True, kw_only=True):
    """Journal `NodeRestored`: `node` may run ranks again."""


class NoteDraining(NodeAction, frozen=True, kw_only=True):
    """Journal `NodeDraining`: `node` is about to be left, or (`over`) stays after all."""

    over: bool = False

    def describe(self) -> str:
        """Return which node, and whether it stays."""
        return f"node {self.node}{' stays' if self.over else ''}"


class NoteFinding(Action, frozen=True, kw_only=True):
    """Journal `ProbeJudged`: what an active probe has found."""

    id: str
    finding: ProbeFinding

    def describe(self) -> str:
        """Return what was found."""
        return f"{self.id}: {self.finding.kind}"


class CordonNode(NodeAction, frozen=True, kw_only=True):
    """Journal `NodeCordoned`: `node` runs nothing any more while another can."""


class AnswerCommand(Action, frozen=True, kw_only=True):
    """Tell the operator how it went."""

    id: str
    ok: bool
    result: dict[str, Any] = {}

    def describe(self) -> str:
        """Return whose command it was, and whether it was obeyed."""
        return f"{self.id}: {'ok' if self.ok else 'refused'}"


class RecordEvent(Action, frozen=True, kw_only=True):
    """Journal `event`: what a notice has said, what was agreed upon, or that nothing is done."""

    event: (
        DeviceReported
        | MachineReported
        | PreemptionNoticed
        | PreemptionWithdrawn
        | VerdictReached
        | ActionWithheld
        | SettingsChanged
        | JobPaused
        | OperatorNoted
        | JobResumed
        | InvitationMade
        | InvitationUsed
        | InvitationRevoked
    )

    def describe(self) -> str:
        """Return what kind of event."""
        return type(self.event).__name__


class EndJob(Action, frozen=True, kw_only=True):
    """Everything is down: journal `JobEnded` and leave."""

    status: Literal["done", "failed", "stopped"]
    exit_code: int

    def describe(self) -> str:
        """Return how it ended."""
        return f"{self.status}, exit code {self.exit_code}"


AnyAction = (
    AnyOrder
    | AssignNodes
    | NoteFinding
    | CordonNode
    | RestoreNode
    | NoteDraining
    | AnswerCommand
    | RecordEvent
    | EndJob
)
