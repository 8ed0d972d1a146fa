"""Ends replicas that others have started, by their managers: there is no other way from here.

A manager has its process end without an answer, so that its heartbeats are listened for: one that
was not reached is not said to have ended.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from perdure.adapters.lighthouse import kill_replica
from perdure.control.lighthouse.quorum import Quorums
from perdure.model.events import FaultInjected, ReplicaSeen
from perdure.model.job import JobSpec
from perdure.model.orders import EvictReplica, InjectFault
from perdure.service.agent.outbox import Outbox
from perdure.service.part import Tasks

log = logging.getLogger("perdure.lighthouse")

_HEARD_S = 0.3
_GAPS = 3.0
"""A heartbeat comes in such a time, or in so many times the longest gap between two of late, of a
manager that was to end and has not."""


class Endings:
    """Those that are on their way."""

    def __init__(
        self,
        spec: JobSpec,
        machine: Quorums,
        outbox: Outbox,
        tasks: Tasks,
        *,
        clock: Callable[[], float],
        forget: Callable[[str, str], None],
    ) -> None:
        """End replicas that `machine` knows, and tell of it; `forget` takes its name, and why."""
        self._spec, self._machine, self._outbox, self._tasks = spec, machine, outbox, tasks
        self._clock, self._forget = clock, forget
        self._ending: set[str] = set()

    def is_ending(self, name: str) -> bool:
        """Return whether a replica is on its way to its end."""
        return name in self._ending

    def kill(self, order: EvictReplica) -> None:
        """End a replica that others have started, and tell of it, as often as it is ordered."""
        reason = order.reason

        def tell(why: str) -> None:
            said = f"{reason}; {why}" if why else reason
            self._tell_ended(order.replica, (order.group, order.generation), said, ended=not why)

        self._end(order.replica, reason, tell)

    def harm(self, order: InjectFault) -> None:
        """Do harm to a replica that others have started: it can be ended, and no more."""
        replica = self._machine.find_life(order.generation)
        first = order.rank % self._spec.nproc == 0
        if replica is None or order.kind != "crash" or order.at_step >= 0 or not first:
            why = "only crash, now, and of a group's first rank" if replica else "it is not there"
            why = (
                f"{order.kind} on rank {order.rank}: {why}, where no line of perdure is in a script"
            )
            self._tell_harmed(order, why)
            return
        name, home = replica.name, replica.home

        def tell(why: str) -> None:
            self._tell_harmed(order, why)
            if not why:
                self._tell_ended(name, home, "crash, injected", ended=True)

        self._end(name, f"crash, injected: {order.reason}", tell, anyway=False)

    def _end(
        self, name: str, reason: str, tell: Callable[[str], None], *, anyway: bool = True
    ) -> None:
        """Have a replica end by its manager; `tell` why it has not, or nothing.

        It is forgotten for ever, `anyway` or where it has ended.
        """
        if name in self._ending:
            return
        self._ending.add(name)
        known = self._machine.replicas.get(name)

        async def end() -> None:
            why = await kill_replica(known.manager, reason) if known else ""
            if known and not why:
                done_s = self._clock()
                await asyncio.sleep(max(_HEARD_S, _GAPS * known.gap_s))
                if known.beat_s > done_s + _HEARD_S / 3:
                    why = f"its heartbeats go on: its manager, {known.manager}, is not reached"
            self._ending.discard(name)
            log.warning("%s: %s: %s", name, reason, why or "it has ended")
            tell(why)
            if anyway or not why:
                self._forget(name, reason)

        self._tasks.spawn(end())

    def _tell_harmed(self, order: InjectFault, error: str) -> None:
        event = FaultInjected(
            id=order.id, rank=order.rank, kind=order.kind, at_s=self._clock(), error=error
        )
        note = "" if error else "by its manager's Kill"
        self._outbox.put(msgspec.structs.replace(event, note=note))

    def _tell_ended(self, name: str, home: tuple[int, int], reason: str, *, ended: bool) -> None:
        known = self._machine.replicas.get(name) if ended else None
        self._outbox.put(
            ReplicaSeen(
                replica=name,
                group=home[0],
                at_s=self._clock(),
                gone=True,
                reason=reason,
                silent=ended,
                step=self._machine.step,
                life=home[1],
                heard_s=known.last_s if known is not None else 0.0,
            )
        )
