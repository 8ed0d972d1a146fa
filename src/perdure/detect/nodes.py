"""Which nodes are still heard of, and after what silence one is lost.

A node is lost only after seconds without a heartbeat: its agent may be restarting while its
ranks train on. Sooner it is lost only where somebody else says so, too: its platform, or peers of
its ranks whose connections ended, which the end of no rank explains. After a controller's own
restart every node gets that time again, because the silence was the controller's. A node cut off
from the controller alone is not lost either: its ranks' peers still finish collectives with them,
one a step. And where every node is silent, it is the controller that is cut off; it could reach
nobody with a decision, so it makes none for `all_lost_s`.

Clocks of nodes need not agree: what a heartbeat stamps is moved to the controller's clock. Only
silence and order of events need it; durations never do. The smallest delay between sending and
receiving is taken for the difference of the clocks; below `TRUSTED_S` it is a delay, and nothing
is moved. Accounts stay as stamped, for the ledger compares them with their own node's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from perdure.model.events import NodeLost
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import BusyPhase, NodeBeat

TRUSTED_S = 5.0
"""Differences of clocks up to this are taken for delays of heartbeats."""
DRIFT = 1e-4
"""How fast the clocks of two machines may part."""
DOUBT_S = 3.0
"""A node without a heartbeat for this long is lost where an elastic world has broken, too: fifteen
heartbeats, and its ranks' peers have seen their connections end."""
_LATE_S = 0.2
"""A node's last heartbeat may arrive so long after its peers' word that connections ended."""
_ENDED_S = 0.5
"""A node whose platform says that it has ended is lost after this long: its last heartbeats may
still be on their way, or another machine's in its place."""
_ANY_S = 1.0
"""And some other node was heard of within this time: it is not the controller that is cut off."""


@dataclass(slots=True)
class _Node:
    received_s: float
    sent_s: float = 0.0
    incarnation: str = ""
    """Of the agent that sent the newest heartbeat; only its own stamps tell their order."""
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
        local_nodes: float = math.inf,
    ) -> None:
        """Begin with no nodes; those that never came are not lost.

        Nodes from `local_nodes` on are others' machines. Where peers' connections have ended, a
        silent one of them is lost after three tenths of `doubt_s`: nobody else sees its end.
        """
        self._local_nodes = local_nodes
        self._node_lost_s, self._all_lost_s, self._doubt_s = node_lost_s, all_lost_s, doubt_s
        self._heard_s: float | None = None
        # The last heartbeats of nodes that fall silent together are not of one moment.
        self._quiet_s = node_lost_s / 2
        self._nodes: dict[int, _Node] = {}
        self._broken_s = -math.inf
        """When it was heard last that an elastic world has broken as connections ended."""
        self._ended_s = -math.inf
        """When it was heard last that a rank had failed because its connection to another ended."""
        self.due_s: float | None = None
        """When to look next; heartbeats since then only make it later."""

    def take_beat(self, now: float, beat: NodeBeat) -> bool:
        """Return whether the heartbeat is news: not a duplicate, not overtaken by another.

        Another incarnation's always is: its clock may have been set back, or be another machine's.
        """
        self._hear(now)
        node = self._nodes.setdefault(beat.node, _Node(now))
        if beat.incarnation == node.incarnation and beat.sent_s <= node.sent_s:
            return False
        node.incarnation, node.sent_s = beat.incarnation, beat.sent_s
        self.register(now, beat.node)
        return True

    def reconfigure(self, config: DetectConfig) -> None:
        """Judge by `config` from the next look on."""
        self._node_lost_s, self._doubt_s = config.node_lost_s, config.node_doubt_s

    @property
    def _remote_lost_s(self) -> float:
        return 3 * self._doubt_s / 10

    def register(self, now: float, node: int) -> None:
        """Begin to watch a node whose agent has said hello."""
        self._hear(now)
        known = self._nodes.setdefault(node, _Node(now))
        known.received_s, known.lost, known.ended = now, False, ""
        self._expect(now, node)

    def _choose_limit_s(self, number: int, all_silent_s: float) -> tuple[float, str]:
        """Return how long a node may be silent, and who else speaks for its loss."""
        node = self._nodes[number]
        if node.ended:
            return _ENDED_S, node.ended
        limit_s, why = self._node_lost_s, ""
        if node.received_s <= self._broken_s + _LATE_S and all_silent_s < _ANY_S:
            limit_s, why = min(limit_s, self._doubt_s), "its peers' world has broken"
        remote = number >= self._local_nodes and all_silent_s < self._remote_lost_s / 3
        ended = node.received_s <= self._ended_s
        if remote and (ended or why) and self._remote_lost_s < limit_s:
            limit_s, why = self._remote_lost_s, why or "its peers' connections have ended"
        return limit_s, why

    def _choose_look_s(self, node: int) -> float:
        """Return after what silence to look at a node, should anything else speak for its loss."""
        return self._node_lost_s if node < self._local_nodes else self._remote_lost_s

    def _expect(self, now: float, node: int) -> None:
        """Look again no later than when `node` would have been silent for too long."""
        self.due_s = min(self.due_s or math.inf, now + self._choose_look_s(node))

    def restart(self, now: float) -> None:
        """Count no silence before now: a controller has just started."""
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
        """Doubt all nodes: an elastic world broke as connections ended, and waits to know why."""
        self._broken_s = now
        self.due_s = min(self.due_s or math.inf, now + self._compute_doubt_look_s())

    def note_exit(self, now: float, *, lost_peer: bool) -> None:
        """Note that a rank has failed, by itself or as its connection to another one had ended.

        One that failed of itself explains why the others' connections ended.
        """
        self._ended_s = now if lost_peer else -math.inf
        self.due_s = min(self.due_s or math.inf, now + _ANY_S / 5)

    def _compute_doubt_look_s(self) -> float:
        """Return how often to look while in doubt."""
        return min(_ANY_S, self._doubt_s / 5)

    def note_end(self, now: float, node: int, words: str) -> None:
        """Note that the platform has said that the machine of `node` has ended."""
        if node in self._nodes:
            self._nodes[node].ended = words
            self.due_s = min(self.due_s or math.inf, now + _ENDED_S)

    def trust(self) -> None:
        """Take silence for chance again: the world is whole, or it is known who has ended."""
        self._broken_s = -math.inf

    def mark_lost(self, node: int) -> None:
        """Take note that `node` was lost: that is in the journal."""
        if node in self._nodes:
            self._nodes[node].lost = True

    def detect_lost(
        self,
        now: float,
        alive_s_of: Callable[[int], tuple[float, float]] = lambda node: (0.0, 0.0),
    ) -> list[NodeLost]:
        """Return the nodes that have just fallen silent for too long.

        `alive_s_of` says until when the ranks of a node have surely taken part in collectives,
        as seen by their peers on other nodes, and how long a step takes them: for so long after
        it their silence there says nothing.
        """
        if self.due_s is None or now < self.due_s:
            return []
        lost: list[NodeLost] = []
        all_silent_s = now - self._heard_s if self._heard_s is not None else 0.0
        if self._quiet_s <= all_silent_s < self._all_lost_s:
            self.due_s = now + self._quiet_s
            return lost
        later: list[float] = []
        for number, node in sorted(self._nodes.items()):
            silence_s = now - node.received_s
            limit_s, why = self._choose_limit_s(number, all_silent_s)
            if not node.lost and silence_s >= limit_s:
                alive_s, step_s = alive_s_of(number)
                # A collective that ended before the connections did says nothing of the step after.
                allowed_s = limit_s if why else limit_s + step_s
                if now - alive_s < allowed_s:
                    later.append(alive_s + allowed_s)
                    continue
                node.lost = True
                reason = f"node {number} has sent no heartbeat for {silence_s:.1f} s"
                reason += f"; {why}" if why else ""
                agree = 0.0 <= node.received_s - node.sent_s <= TRUSTED_S
                last_s = node.sent_s if agree else node.received_s
                lost.append(NodeLost(node=number, at_s=now, reason=reason, last_seen_s=last_s))
        for number, node in self._nodes.items():
            look_s = self._choose_look_s(number)
            due_s = node.received_s + look_s
            if not node.lost:
                later.append(due_s if due_s > now else now + look_s / 5)
        self.due_s = min(later, default=None)
        if self._broken_s > -math.inf:
            self.due_s = min(self.due_s or math.inf, now + self._compute_doubt_look_s())
        return lost


class NodeClocks:
    """The difference of each node's clock to the controller's."""

    def __init__(self) -> None:
        """Begin knowing none."""
        self._least: dict[int, tuple[str, float, float]] = {}
        """Node -> its agent's incarnation, which has a clock of its own, when, and by how much."""

    def translate(self, now: float, beat: NodeBeat) -> tuple[NodeBeat, float]:
        """Return the heartbeat in the controller's time, and what was added."""
        behind_s = now - beat.sent_s
        known = self._least.get(beat.node)
        if known is not None and known[0] == beat.incarnation:
            behind_s = min(behind_s, known[2] + DRIFT * (now - known[1]))
        self._least[beat.node] = (beat.incarnation, now, behind_s)
        if abs(behind_s) <= TRUSTED_S:
            return beat, 0.0
        ranks = tuple(
            msgspec.structs.replace(
                p,
                heartbeat_s=_move(p.heartbeat_s, behind_s),
                phase_since_s=_move(p.phase_since_s, behind_s),
                busy_phase=p.busy_phase and _move_phase(p.busy_phase, behind_s),
            )
            for p in beat.ranks
        )
        sweep = beat.sweep
        if sweep is not None:
            sweep = msgspec.structs.replace(sweep, at_s=sweep.at_s + behind_s)
        sent_s = beat.sent_s + behind_s
        moved = msgspec.structs.replace(beat, sent_s=sent_s, ranks=ranks, sweep=sweep)
        return moved, behind_s


def _move_phase(phase: BusyPhase, by_s: float) -> BusyPhase:
    return BusyPhase(phase.name, phase.since_s + by_s, phase.until_s + by_s)


def _move(stamp_s: float, by_s: float) -> float:
    """Return a stamp moved; 0 means that it was not reached."""
    return stamp_s + by_s if stamp_s > 0 else stamp_s
