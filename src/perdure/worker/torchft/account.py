"""Where the time of a rank of a replica group goes, stamped at torchft's own step boundaries.

An attempt at a step ends with `should_commit`. From the first quorum on every moment belongs to
one attempt, and every attempt to one account: committed (useful), not committed (lost), or the
first and those made while healing, which add nothing to the gradient. Taken out of it are the
wait for a decision about settings and, where the quorum has other members than before, what the
training thread waited for it and its process group. A steady quorum's round trip is part of a
step.
"""

import threading
import time
from typing import Any

from perdure.model.ring import PHASE_INDEX
from perdure.worker.ring import RingWriter


class ReplicaAccount:
    """The sums of one rank; the training thread's, but for `note_quorum`."""

    def __init__(self) -> None:
        """Count nothing before the first quorum."""
        self._ring: RingWriter | None = None
        self._end_ns = 0
        """Up to here time is accounted for; 0 before the first quorum."""
        self._gate_ns = self._wait_ns = 0
        """Within the attempt."""
        self._lost = self._reform = self._heal = 0
        self._quorum_id = -1
        self._depth = 0

    def begin(self, ring: RingWriter, step: int) -> None:
        """The manager is there."""
        self._ring = ring
        ring.stamp("init")
        ring.start_steps(step)

    def note_quorum(self) -> None:
        """A quorum with other members was answered; called in the quorum's thread."""
        if self._ring is not None and not self._end_ns:
            self._end_ns = time.monotonic_ns()
            self._ring.stamp("first_step", self._end_ns)

    def add_gate(self, ns: int) -> None:
        """The thread has waited for a decision."""
        self._gate_ns += ns if self._end_ns else 0

    def begin_wait(self) -> int:
        """The calling thread is about to wait for the quorum."""
        if threading.current_thread() is not threading.main_thread():
            return 0
        self._depth += 1
        return time.monotonic_ns()

    def end_wait(self, begin: int) -> None:
        """It has waited."""
        if not begin:
            return
        self._depth -= 1
        if self._end_ns and not self._depth:
            self._wait_ns += time.monotonic_ns() - max(begin, self._end_ns)

    def end_attempt(self, manager: Any, *, committed: bool, healing: bool) -> None:
        """`should_commit` has returned."""
        self.note_quorum()  # Its process group is of a kind that was not watched.
        if self._ring is None:
            return
        begin, now = self._end_ns, time.monotonic_ns()
        gate = min(self._gate_ns, now - begin)
        spent = now - begin - gate
        quorum_id = int(manager._quorum_id)
        reform = min(self._wait_ns, spent) if quorum_id != self._quorum_id else 0
        quorum_first, self._quorum_id = self._quorum_id < 0, quorum_id
        useful = 0
        if healing or quorum_first:
            self._heal += spent
        else:
            self._reform += reform
            useful = spent - reform if committed else 0
            self._lost += 0 if committed else spent - reform
        self._gate_ns = self._wait_ns = 0
        self._end_ns = now
        ring, step = self._ring, int(manager.current_step())
        ring.set_group_accounts((self._lost, self._reform, self._heal))
        ring.commit(step, begin, now, (useful, 0, gate, 0), phase=PHASE_INDEX["step"])
