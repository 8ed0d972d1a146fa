"""Which nodes are still heard of.

A node is lost only after seconds without a heartbeat: its agent may be restarting while its
ranks train on. After a controller's own restart every node gets that time again, because the
silence was the controller's. A node cut off from the controller alone is not lost either: its
ranks' peers still finish collectives with them. And where every node is silent, it is the
controller that is cut off; it could reach nobody with a decision, so it makes none for
`all_lost_s`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from perdure.detect.clocks import TRUSTED_S
from perdure.model.events import NodeLost
from perdure.model.job import DetectConfig
from perdure.model.progress import NodeBeat

DOUBT_S = 3.0
"""A node without a heartbeat for this long is lost where an elastic world has broken, too: fifteen
heartbeats, and its ranks' peers have seen their connections end."""
_ENDED_S = 0.5
"""A node whose platform says that it has ended is lost after this long: its last heartbeats may
still be on their way, or another machine's in its place."""
_ANY_S = 1.0
"""And some other node was heard of within this time: it is not the controller that is cut off."""


@dataclass(slots=True)
class _Node:
    received_s: float
    sent_s: float = 0.0
    lost: bool = False
    ended: str = ""
    """What its platform says of its end; nothing once it is heard of again."""


class NodeWatch:
    """Receives every heartbeat and says when a node fell silent."""

    def __init__(
        self,
        node_lost_s: float,
        all_lost_s: float = 0.0,
        doubt_s: float = DOUBT_S,
        *,
        remote_lost_s: float = math.inf,
        local_nodes: float = math.inf,
    ) -> None:
        """Begin with no nodes; those that never came are not lost.

        Nodes from `local_nodes` on are others' machines, and judged by `remote_lost_s`.
        """
        self._remote_lost_s, self._local_nodes = remote_lost_s, local_nodes
        self._node_lost_s, self._all_lost_s, self._doubt_s = node_lost_s, all_lost_s, doubt_s
        self._heard_s: float | None = None
        # The last heartbeats of nodes that fall silent together are not of one moment.
        self._quiet_s = node_lost_s / 2
        self._nodes: dict[int, _Node] = {}
        self._doubted = False
        self._due_s: float | None = None

    def take_beat(self, now: float, beat: NodeBeat) -> bool:
        """Return whether the heartbeat is news: not a duplicate, not overtaken by another."""
        self._hear(now)
        node = self._nodes.get(beat.node)
        if node is None:
            self._nodes[beat.node] = _Node(now, beat.sent_s)
            self._expect(now, beat.node)
            return True
        if beat.sent_s <= node.sent_s:
            return False
        node.received_s, node.sent_s, node.lost, node.ended = now, beat.sent_s, False, ""
        self._expect(now, beat.node)
        return True

    def reconfigure(self, config: DetectConfig) -> None:
        """Judge by `config` from the next look on."""
        self._node_lost_s, self._doubt_s = config.node_lost_s, config.node_doubt_s
        self._remote_lost_s = config.remote_lost_s

    def register(self, now: float, node: int) -> None:
        """An agent said hello."""
        self._hear(now)
        known = self._nodes.setdefault(node, _Node(now))
        known.received_s, known.lost, known.ended = now, False, ""
        self._expect(now, node)

    def _find_limit_s(self, node: int) -> float:
        return self._node_lost_s if node < self._local_nodes else self._remote_lost_s

    def _expect(self, now: float, node: int) -> None:
        """Look again no later than when `node` would have been silent for too long."""
        self._due_s = min(self._due_s or math.inf, now + self._find_limit_s(node))

    def restart(self, now: float) -> None:
        """A controller has just started: no silence before now counts."""
        self._heard_s = now
        for node in self._nodes.values():
            node.received_s = max(node.received_s, now)

    def _hear(self, now: float) -> None:
        """Somebody is heard: after a silence of all, the others get time to be heard as well."""
        silence_s = now - self._heard_s if self._heard_s is not None else 0.0
        if silence_s >= self._quiet_s:
            self.restart(now)
        elif silence_s >= self._remote_lost_s / 3:
            for number, node in self._nodes.items():
                if number >= self._local_nodes:
                    node.received_s = max(node.received_s, now)
        self._heard_s = now

    def doubt(self, now: float) -> None:
        """An elastic world has broken, and waits to know who is lost."""
        self._doubted = True
        self._due_s = min(self._due_s or math.inf, now + self._find_look_s())

    def _find_look_s(self) -> float:
        """Return how often to look while in doubt."""
        return min(_ANY_S, self._doubt_s / 5)

    def note_end(self, now: float, node: int, words: str) -> None:
        """Its platform says that the machine of `node` has ended."""
        if node in self._nodes:
            self._nodes[node].ended = words
            self._due_s = min(self._due_s or math.inf, now + _ENDED_S)

    def trust(self) -> None:
        """It is whole again."""
        self._doubted = False

    def mark_lost(self, node: int) -> None:
        """It is in the journal that this node was lost."""
        if node in self._nodes:
            self._nodes[node].lost = True

    @property
    def due_s(self) -> float | None:
        """Return when to look next; heartbeats since then only make it later."""
        return self._due_s

    def find_lost(
        self, now: float, find_alive_s: Callable[[int], float] = lambda node: 0.0
    ) -> list[NodeLost]:
        """Return the nodes that have just fallen silent for too long.

        `find_alive_s` says until when the ranks of a node have taken part in collectives, as
        seen by their peers on other nodes.
        """
        if self._due_s is None or now < self._due_s:
            return []
        lost: list[NodeLost] = []
        all_silent_s = now - self._heard_s if self._heard_s is not None else 0.0
        if self._quiet_s <= all_silent_s < self._all_lost_s:
            self._due_s = now + self._quiet_s
            return lost
        later: list[float] = []
        for number, node in sorted(self._nodes.items()):
            silence_s, limit_s = now - node.received_s, self._find_limit_s(number)
            if number >= self._local_nodes and all_silent_s >= limit_s / 3:
                limit_s = self._node_lost_s  # Nobody is heard just now: it may be the controller.
            if self._doubted and all_silent_s < _ANY_S:
                limit_s = min(limit_s, self._doubt_s)
            if node.ended:
                limit_s = _ENDED_S
            if not node.lost and silence_s >= limit_s:
                alive_s = find_alive_s(number)
                if now - alive_s < limit_s:
                    later.append(alive_s + limit_s)
                    continue
                node.lost = True
                reason = f"node {number} has sent no heartbeat for {silence_s:.1f} s"
                reason += f"; {node.ended}" if node.ended else ""
                agree = 0.0 <= node.received_s - node.sent_s <= TRUSTED_S
                last_s = node.sent_s if agree else node.received_s
                lost.append(NodeLost(node=number, at_s=now, reason=reason, last_seen_s=last_s))
        for number, node in self._nodes.items():
            limit_s = self._find_limit_s(number)
            due_s = node.received_s + limit_s
            if not node.lost:
                later.append(due_s if due_s > now else now + limit_s / 5)
        self._due_s = min(later, default=None)
        if self._doubted:
            self._due_s = min(self._due_s or math.inf, now + self._find_look_s())
        return lost
