"""What nodes were told and have not yet acknowledged: sent again until they have.

The book knows no kind of order: it looks at what all orders share (`model/orders.py`).

Pure: time is an argument, and what to send is returned. Orders are levels, so that repeating one
is always harmless; nothing here survives the controller, because the next one issues again what
its replay says is open.
"""

from dataclasses import dataclass
from typing import Any

from perdure.model.bus.wire import NodeOrder
from perdure.model.events import AnyEvent, NodeLost, NodeRegistered
from perdure.model.job import JobSpec
from perdure.model.orders import (
    LIGHTHOUSE,
    AnyAction,
    Assignment,
    AssignNodes,
    Order,
    RankOrder,
)

Sending = tuple[int | str, NodeOrder]
"""A message to a node, to `all`, or to the lighthouse."""

REPEAT_S = 1.0


@dataclass(slots=True)
class _Open:
    """One order that waits for an answer."""

    order: Order
    waiting: set[int | str]
    """Recipients that have not answered."""
    sent: int = 1


class OrderBook:
    """The open orders of one job."""

    def __init__(self, spec: JobSpec, controller: str, term: int = 0) -> None:
        """Sign orders as `controller`, in its `term`."""
        self._spec, self._controller, self._term = spec, controller, term
        self._assignments: dict[int, Assignment] = {}
        self._placement: tuple[int, ...] = tuple(range(spec.num_nodes))
        self._homes: dict[int, int] = {}
        """Member of an elastic world that was started beside its first ranks -> node."""
        self._registered: dict[int, str] = {}
        """Node -> the incarnation of its agent; not of a node that is lost."""
        self._open: dict[str, _Open] = {}
        """By level."""
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
        if isinstance(action, AssignNodes):
            return self._assign(action)
        return self._keep(action) if isinstance(action, Order) else []

    def _keep(self, order: Order) -> list[Sending]:
        open_ = _Open(order, set(order.recipients))
        if order.sent_max > 1:
            self._open[order.level] = open_
        if order.for_all_nodes:
            return self._address(self._order(orders=(order,)), set(range(self._spec.num_nodes)))
        return self._send(open_)

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
            if not isinstance(open_.order, RankOrder) or assignment.replica >= 0:
                continue
            if open_.order.generation < assignment.generation:
                del self._open[key]
        if self._spec.remote:  # Whoever had a place, and has it no more, hears as well.
            return [sending for node in sorted(action.nodes) for sending in self._tell(node)]
        return self._address(self._order(assignment=assignment), set(action.nodes))

    def note(self, event: AnyEvent) -> None:
        """Take what may be an acknowledgement.

        Who registers is told nothing by it: what it shall run now is decided from that.
        """
        match event:
            case NodeRegistered():
                self._registered[event.node] = event.incarnation
            case NodeLost():
                self._registered.pop(event.node, None)
            case _:
                pass
        for level, open_ in list(self._open.items()):
            open_.waiting.difference_update(open_.order.list_answered(event))
            if not open_.waiting:
                del self._open[level]

    def repeat(self, now: float) -> list[Sending]:
        """Return everything that is open, again, if it is time."""
        if self._repeat_at_s is None or now < self._repeat_at_s:
            return []
        self._repeat_at_s = now + REPEAT_S
        sendings: list[Sending] = []
        for node in range(self._spec.num_nodes):
            sendings += self._tell(node)
        for level, open_ in list(self._open.items()):
            open_.sent += 1
            sendings += self._send(open_)
            if open_.sent >= open_.order.sent_max:
                del self._open[level]
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
        """Return the order for whom it waits, by way of their nodes where they are ranks."""
        order = open_.order
        message = self._order(orders=(order,))
        if isinstance(order, RankOrder) and self._spec.served:
            return [(LIGHTHOUSE, message)]  # No agent is there, and it passes on what it can.
        if isinstance(order, RankOrder):
            ranks = (rank for rank in order.ranks if rank in open_.waiting)
            return self._address(message, {self._locate_rank(rank) for rank in ranks})
        return [(to, message) for to in order.recipients if to in open_.waiting]

    def _locate_rank(self, rank: int) -> int:
        home = self._homes.get(rank)
        return self._placement[self._spec.node_of(rank)] if home is None else home

    def _address(self, order: NodeOrder, nodes: set[int]) -> list[Sending]:
        if len(nodes) == self._spec.num_nodes > 1:
            return [("all", order)]
        return [(node, order) for node in sorted(nodes)]
