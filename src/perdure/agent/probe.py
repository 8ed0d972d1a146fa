"""One node's part of a probe's round: whom it sends to, and whether it computes.

Orders are repeated until they are answered; each part is carried out once.
"""

from dataclasses import dataclass, field

import msgspec

from perdure.model.events import ProbeEnded
from perdure.model.orders import RunProbe
from perdure.model.signals.links import HostProbe, PairProbe

_KEPT = 32


class ProbePart(msgspec.Struct, frozen=True):
    """One node's part in one round of a probe; a node that only receives waits to be asked."""

    order: RunProbe
    node: int
    destinations: tuple[int, ...]
    computes: bool

    def end(
        self,
        now: float,
        pairs: tuple[PairProbe, ...] = (),
        compute_s: float | None = None,
        error: str = "",
    ) -> ProbeEnded:
        """Return the answer."""
        hosts: tuple[HostProbe, ...] = ()
        if compute_s is not None:
            hosts = (HostProbe(self.order.round, self.node, "cpu", compute_s),)
        return ProbeEnded(
            id=self.order.id,
            node=self.node,
            round=self.order.round,
            at_s=now,
            pairs=pairs,
            hosts=hosts,
            error=error,
        )


@dataclass(slots=True)
class ProbeParts:
    """The parts that one node has taken on."""

    node: int
    _taken: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    """(probe, round) -> the nodes that were ordered to ask this one for a door."""

    def take(self, order: RunProbe) -> ProbePart | None:
        """Return this node's part of `order`; None where it has none, or has it already."""
        key = (order.id, order.round)
        concerned = {node for pair in order.pairs for node in pair} | set(order.hosts)
        if key in self._taken or self.node not in concerned:
            return None
        self._taken[key] = {src for src, dst in order.pairs if dst == self.node}
        while len(self._taken) > _KEPT:
            del self._taken[next(iter(self._taken))]
        destinations = tuple(dst for src, dst in order.pairs if src == self.node)
        return ProbePart(order, self.node, destinations, self.node in order.hosts)

    def expects(self, id_: str, round_: int, src: int) -> bool:
        """Return whether the controller has ordered node `src` to send something here."""
        return src in self._taken.get((id_, round_), ())
