"""What nodes were told and have not yet acknowledged: sent again until they have.

Pure: time is an argument, and what to send is returned. Orders are levels, so that repeating one
is always harmless; nothing here survives the controller, because the next one issues again what
its replay says is open.
"""

from dataclasses import dataclass
from typing import Any, assert_never

from perdure.model.actions import (
    AnswerCommand,
    AnyAction,
    Assignment,
    AssignNodes,
    CordonNode,
    EndJob,
    EvictReplica,
    FenceAbort,
    FollowWorld,
    HoldReplicas,
    InjectFault,
    InterruptCollectives,
    NoteDraining,
    NoteFinding,
    RecordEvent,
    ReformWorld,
    RestoreNode,
    ResumeRanks,
    RunProbe,
    SendBoundary,
    TakeStacks,
    WatchClosely,
)
from perdure.model.bus.wire import LIGHTHOUSE, NodeOrder
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CollectivesInterrupted,
    FaultInjected,
    MemberReady,
    NodeLost,
    NodeRegistered,
    ProbeEnded,
    RankExited,
    StacksTaken,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.model.steering import RESUMED

Sending = tuple[int | str, NodeOrder]
"""To a node, or to `all`."""

REPEAT_S = 1.0
_STACKS_SENT_MAX = 5
_PROBE_SENT_MAX = 5
_INTERRUPT_SENT_MAX = 3
_ABORT_SENT_MAX = 30
"""A prepared rank waits for 30 s."""
_COMMIT_SENT_MAX = 600


_ANY_GENERATION = 2**62


@dataclass(slots=True)
class _Open:
    """One order that waits for an answer."""

    order: NodeOrder
    generation: int
    ranks: set[int]
    sent: int = 0
    sent_max: int = 600
    node: int | None = None
    """Set where it is for a node and not for ranks."""


class OrderBook:
    """The open orders of one job."""

    def __init__(self, spec: JobSpec, controller: str, term: int = 0) -> None:
        """Sign orders as `controller`, in its `term`."""
        self._spec, self._controller, self._term = spec, controller, term
        self._assignments: dict[int, Assignment] = {}
        nodes = spec.num_nodes if spec.torchft.replicas else spec.nodes
        self._placement: tuple[int, ...] = tuple(range(nodes))
        self._homes: dict[int, int] = {}
        """Member of an elastic world that was started beside its first ranks -> node."""
        self._hold: NodeOrder | None = None
        """To the lighthouse, which answers nothing: repeated for ever."""
        self._registered: dict[int, str] = {}
        """Node -> the incarnation of its agent; not of a node that is lost."""
        self._open: dict[str, _Open] = {}
        self._repeat_at_s: float | None = None

    def _order(self, **said: Any) -> NodeOrder:
        return NodeOrder(controller=self._controller, term=self._term, **said)

    def next_deadline(self) -> float | None:
        """Return when to call `repeat`."""
        return self._repeat_at_s

    def start(self, now: float) -> list[Sending]:
        """Ask every agent to register: a controller has just started."""
        self._repeat_at_s = now + REPEAT_S
        return [("all", self._order(register=True))]

    def take(self, action: AnyAction) -> list[Sending]:
        """Keep `action` until it is acknowledged; return what to send now."""
        match action:
            case AssignNodes():
                return self._assign(action)
            case SendBoundary():
                limit = {"prepare": 600, "commit": _COMMIT_SENT_MAX, "abort": _ABORT_SENT_MAX}
                order = self._order(boundary=action)
                return self._keep(
                    f"boundary {action.id}",
                    _Open(order, action.generation, set(action.ranks), 1, limit[action.move]),
                )
            case TakeStacks():
                order = self._order(stacks=action)
                self._keep(
                    f"stacks {action.generation}",
                    _Open(order, action.generation, set(action.ranks), 1, _STACKS_SENT_MAX),
                )
                # Once to all: ranks elsewhere write their Flight Recorder traces.
                return self._address(order, set(range(self._spec.num_nodes)))
            case InjectFault():
                order = self._order(inject=action)
                return self._keep(
                    f"inject {action.id}", _Open(order, action.generation, {action.rank}, 1)
                )
            case WatchClosely():
                order = self._order(watch=action)
                return [(node, order) for node in action.nodes]
            case RunProbe():
                return self._probe(action)
            case InterruptCollectives():
                order = self._order(interrupt=action)
                return self._keep(
                    f"interrupt {action.generation}",
                    _Open(order, action.generation, set(action.ranks), 1, _INTERRUPT_SENT_MAX),
                )
            case ReformWorld():
                order = self._order(reform=action)
                return self._keep(
                    f"reform {action.generation}",
                    _Open(order, action.generation, set(action.ranks), 1),
                )
            case FollowWorld():
                order = self._order(follow=action)
                key = f"follow {action.generation} {action.rank}"
                return self._keep(key, _Open(order, action.generation, {action.rank}, 1))
            case ResumeRanks():
                order = self._order(resume=action)
                return self._keep(
                    f"boundary {action.id}{RESUMED}",
                    _Open(order, action.generation, set(action.ranks), 1, _COMMIT_SENT_MAX),
                )
            case HoldReplicas():
                self._hold = self._order(hold=action)
                return [(LIGHTHOUSE, self._hold)]
            case EvictReplica():
                return [(LIGHTHOUSE, self._order(evict=action))]
            case FenceAbort():
                order = self._order(fence=action)
                return [(group, order) for group in action.groups]
            case _:
                return []

    def _probe(self, action: RunProbe) -> list[Sending]:
        """Keep one order a node: nodes answer a probe one by one, and it has no generation."""
        order = self._order(probe=action)
        nodes = {node for pair in action.pairs for node in pair} | set(action.hosts)
        sendings: list[Sending] = []
        for node in sorted(nodes):
            open_ = _Open(order, _ANY_GENERATION, set(), 1, _PROBE_SENT_MAX, node)
            sendings += self._keep(f"probe {action.id} {action.round} {node}", open_)
        return sendings

    def _assign(self, action: AssignNodes) -> list[Sending]:
        assignment = action.assignment
        if assignment.replica < 0:
            self._placement = assignment.placement or self._placement
            self._homes = assignment.homes
        for node in action.nodes:
            held = self._assignments.get(node)
            if held is None or held.number <= assignment.number:
                self._assignments[node] = assignment
        for key, open_ in list(self._open.items()):
            # A replica group's assignment says nothing of the other groups' generations.
            if open_.generation < assignment.generation and assignment.replica < 0:
                del self._open[key]
        if self._spec.remote:  # Whoever had a place, and has it no more, hears as well.
            return [sending for node in sorted(action.nodes) for sending in self._tell(node)]
        return self._address(self._order(assignment=assignment), set(action.nodes))

    def _keep(self, key: str, open_: _Open) -> list[Sending]:
        self._open[key] = open_
        return self._send(open_)

    def note(self, event: AnyEvent) -> None:
        """Take what may be an acknowledgement.

        Who registers is told nothing by it: what it shall run now is decided from that.
        """
        match event:
            case NodeRegistered():
                self._registered[event.node] = event.incarnation
            case NodeLost():
                self._registered.pop(event.node, None)
            case BoundaryReached():
                self._settle(f"boundary {event.id}", event.rank)
            case BoundaryAnswered() if event.planned:
                self._settle(f"boundary {event.id}", event.rank)
            case FaultInjected():
                self._settle(f"inject {event.id}", event.rank)
            case StacksTaken():
                for rank in event.stacks:
                    self._settle(f"stacks {event.generation}", rank)
            case ProbeEnded():
                self._open.pop(f"probe {event.id} {event.round} {event.node}", None)
            case CollectivesInterrupted():
                self._settle(f"interrupt {event.generation}", event.rank)
            case MemberReady():
                self._settle(f"follow {event.generation} {event.rank}", event.rank)
            case WorldReformed():
                self._settle(f"follow {event.generation} {event.rank}", event.rank)
                open_ = self._open.get(f"reform {event.generation}")
                sent = open_.order.reform if open_ is not None else None
                if sent is not None and sent.epoch == event.epoch:
                    self._settle(f"reform {event.generation}", event.rank)
            case RankExited():
                for key in [k for k, o in self._open.items() if event.record.rank in o.ranks]:
                    if self._open[key].generation == event.record.generation:
                        self._settle(key, event.record.rank)
            case _:
                pass

    def _settle(self, key: str, rank: int) -> None:
        if key in self._open:
            self._open[key].ranks.discard(rank)
            if not self._open[key].ranks:
                del self._open[key]

    def repeat(self, now: float) -> list[Sending]:
        """Return everything that is open, again, if it is time."""
        if self._repeat_at_s is None or now < self._repeat_at_s:
            return []
        self._repeat_at_s = now + REPEAT_S
        sendings: list[Sending] = []
        for node in range(self._spec.num_nodes):
            sendings += self._tell(node)
        if self._hold is not None:
            sendings.append((LIGHTHOUSE, self._hold))
        for key, open_ in list(self._open.items()):
            open_.sent += 1
            sendings += self._send(open_)
            if open_.sent >= open_.sent_max:
                del self._open[key]
        return sendings

    def _tell(self, node: int) -> list[Sending]:
        """Repeat what a node shall run to the agent that has registered, and to no other.

        One in its place has yet to say what runs there: what it shall run follows from that.
        """
        agent, assignment = self._registered.get(node), self._assignments.get(node)
        if agent is None:
            return [(node, self._order(register=True))]
        return [(node, self._order(assignment=assignment, agent=agent))] if assignment else []

    def _send(self, open_: _Open) -> list[Sending]:
        if open_.node is not None:
            return [(open_.node, open_.order)]
        return self._address(open_.order, {self._find_node(rank) for rank in open_.ranks})

    def _find_node(self, rank: int) -> int:
        home = self._homes.get(rank)
        return self._placement[self._spec.node_of(rank)] if home is None else home

    def _address(self, order: NodeOrder, nodes: set[int]) -> list[Sending]:
        if len(nodes) == self._spec.num_nodes > 1:
            return [("all", order)]
        return [(node, order) for node in sorted(nodes)]


def describe_action(action: AnyAction) -> str:
    """Return the line that the journal keeps of a decision."""
    match action:
        case AssignNodes(assignment=a):
            where = f", store {a.master_addr}:{a.master_port}" if a.phase == "run" else ""
            return f"#{a.number} {a.phase} generation {a.generation}{where}, nodes {action.nodes}"
        case SendBoundary():
            what = f"{action.kind} {action.id}"
            if action.change is not None:
                values = " ".join(f"{name}={value}" for name, value in action.change.values.items())
                what = f"{what} (epoch {action.change.epoch}: {values})"
            return f"{action.move} {what} at step {action.step}"
        case TakeStacks():
            return f"stacks of ranks {action.ranks}"
        case WatchClosely():
            return f"nodes {action.nodes} until {action.until_s:.1f}"
        case NoteFinding():
            return f"{action.id}: {action.finding.kind}"
        case CordonNode():
            return f"node {action.node}"
        case RunProbe():
            return f"{action.id} round {action.round}: pairs {action.pairs}, hosts {action.hosts}"
        case InterruptCollectives():
            return f"generation {action.generation}, ranks {action.ranks}"
        case ReformWorld():
            return f"epoch {action.epoch} of generation {action.generation}, ranks {action.ranks}"
        case FollowWorld():
            return f"rank {action.rank} follows ranks {sorted(action.donors)}"
        case InjectFault():
            when = f"at step {action.at_step}" if action.at_step >= 0 else "now"
            return f"{action.kind} on rank {action.rank} {when}"
        case AnswerCommand():
            return f"{action.id}: {'ok' if action.ok else 'refused'}"
        case ResumeRanks():
            return f"generation {action.generation}, ranks {action.ranks}"
        case RestoreNode():
            return f"node {action.node}"
        case NoteDraining():
            return f"node {action.node}{' stays' if action.over else ''}"
        case HoldReplicas():
            return f"#{action.number}: {', '.join(action.replicas) or 'none'}"
        case EvictReplica():
            return f"replica {action.replica}"
        case FenceAbort():
            return f"quorum {action.quorum_id}, groups {action.groups}"
        case RecordEvent():
            return type(action.event).__name__
        case EndJob():
            return f"{action.status}, exit code {action.exit_code}"
        case _:
            assert_never(action)
