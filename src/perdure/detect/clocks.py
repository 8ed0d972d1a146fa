"""Clocks of nodes need not agree: what a heartbeat stamps, moved to the controller's clock.

Only silence and order of events need it; durations never do. The smallest delay between sending
and receiving is taken for the difference of the clocks; below `TRUSTED_S` it is a delay, and
nothing is moved. Accounts stay as stamped, for the ledger compares them with their own node's.
"""

import msgspec

from perdure.model.signals.progress import BusyPhase, NodeBeat

TRUSTED_S = 5.0
"""Differences up to this are taken for delays of heartbeats."""
DRIFT = 1e-4
"""How fast the clocks of two machines may part."""


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
