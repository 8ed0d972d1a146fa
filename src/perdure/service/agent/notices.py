"""What a node's sources announce, turned into events: each notice once, and its withdrawal.

A source says all that is announced at the moment. What is new is noticed; what is gone before its
time is withdrawn; and while a source cannot be read, what it said last holds. A source that
cannot be reached is said once, and asked less and less often.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from perdure.model.errors import PlatformError
from perdure.model.events import Announced, PreemptionNoticed, PreemptionWithdrawn
from perdure.model.job import PreemptionConfig
from perdure.service.part import keep_looking
from perdure.service.ports import Bus, NoticeSource

log = logging.getLogger("perdure.agent")

_PAUSE_S_MIN = 0.1
"""Between two looks at a source that should have waited, and did not."""
_LOOK_S = 1.0
"""Between two looks at whether the node is left."""
_EARLIER_S = 1.0
"""A deadline that has come nearer by less is the same one."""
_IDLE_S = 0.5
"""A machine from elsewhere is left once no rank was there for so long."""


class OrphanedError(PlatformError):
    """The job's own machine has not been reached for too long: who joined it may go."""

    exit_code = os.EX_TEMPFAIL


class StartedAnewError(OrphanedError):
    """The job was started anew: who joined the run before may ask for a place in this one."""

    exit_code = os.EX_PROTOCOL


class ReplacedError(OrphanedError):
    """Another agent is this node now."""

    exit_code = os.EX_UNAVAILABLE


@dataclass(slots=True)
class _Known:
    """What one source has announced."""

    gone: dict[str, float] = field(default_factory=dict)
    """Id -> job time at which the machine goes away."""
    acknowledged: set[str] = field(default_factory=set)


class NoticeWatch:
    """Watches the sources of one node."""

    def __init__(
        self,
        config: PreemptionConfig,
        sources: Sequence[NoticeSource],
        *,
        node: int,
        report: Callable[[PreemptionNoticed | PreemptionWithdrawn], None],
        now: Callable[[], float],
        handles: Callable[[], bool] = lambda: False,
        wall: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Report events in the time of `now`; platforms speak in that of `wall`.

        `handles` says whether the ranks here handle SIGTERM.
        """
        self._handles = handles
        self._config, self.sources, self._node = config, tuple(sources), node
        self._report, self._now, self._wall = report, now, wall
        self._pause = pause
        self._known = {id(source): _Known() for source in self.sources}
        self.warned = False
        """A signal has come that is a notice."""

    async def watch(self, source: NoticeSource) -> None:
        """Look at `source` until cancelled."""

        async def look() -> float:
            self.take(source, await source.read())
            return max(source.pause_s, _PAUSE_S_MIN)

        failed = f"{source.name}: no notices from there for now"
        await keep_looking(look, self._pause, failed=failed, well=f"{source.name}: can be read")

    def take(self, source: NoticeSource, found: Sequence[Announced]) -> None:
        """Compare what `source` announces with what it did before."""
        known, now = self._known[id(source)].gone, self._now()
        for one in found:
            gone_s = self._compute_deadline_s(one, now)
            if gone_s < known.get(one.id, float("inf")) - _EARLIER_S:
                known[one.id] = gone_s
                self._notice(source.name, one, now, gone_s)
        announced = {one.id for one in found}
        for id_ in [id_ for id_ in known if id_ not in announced]:
            gone_s = known.pop(id_)
            if now < gone_s:
                reason = "not announced any more"
                self._report(
                    PreemptionWithdrawn(
                        node=self._node, at_s=now, source=source.name, id=id_, reason=reason
                    )
                )

    def warn(self, signal: str) -> None:
        """Take a signal that is a notice."""
        now, grace_s = self._now(), self._config.signals.get(signal, self._config.grace_s)  # type: ignore[call-overload]
        self.warned = True
        one = Announced(id=signal, reason=f"the agent got {signal}", waits=True)
        self._notice(signal, one, now, now + grace_s)

    async def acknowledge(self, is_left: Callable[[], bool]) -> None:
        """Tell the sources that the machine may go as soon as nothing runs here; until cancelled.

        Before a notice nothing running is no sign of anything.
        """
        while True:
            await self._pause(_LOOK_S)
            for source in self.sources if is_left() else ():
                await self._acknowledge(source)

    async def _acknowledge(self, source: NoticeSource) -> None:
        known = self._known[id(source)]
        for id_ in sorted(set(known.gone) - known.acknowledged):
            known.acknowledged.add(id_)
            try:
                await source.acknowledge(id_)
            except PlatformError as error:
                log.warning("%s: %s", source.name, error.message)

    def _compute_deadline_s(self, one: Announced, now: float) -> float:
        """Return the job time at which the machine goes away; a mere risk has none."""
        if not one.certain:
            return now + 7 * 86_400.0
        if one.gone_s is not None:
            return now + max(0.0, one.gone_s - self._wall())
        return now + (self._config.grace_s if one.grace_s is None else one.grace_s)

    def _notice(self, source: str, one: Announced, now: float, gone_s: float) -> None:
        self._report(
            PreemptionNoticed(
                node=self._node,
                at_s=now,
                grace_s=round(gone_s - now, 3) if one.certain else 0.0,
                source=source,
                id=one.id,
                reason=one.reason,
                certain=one.certain,
                waits=one.waits or self._config.acknowledge,
                handled=one.certain and self._handles(),
            )
        )


async def wait_to_leave(
    bus: Bus,
    watch: NoticeWatch,
    is_idle: Callable[[], bool],
    orphan_s: float,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> OrphanedError | None:
    """Return when a machine from elsewhere is to be left, and as what error if it is one.

    That is once nothing runs here after a signal to leave, or when the bus has been away for
    `orphan_s`; at once where a server does not take this agent's login any more: the job was
    started anew, and who still runs for the run before is in the way.
    """
    idle, away, look_s = 0, 0, 0.1
    while idle * look_s < _IDLE_S:
        await pause(look_s)
        idle = idle + 1 if watch.warned and is_idle() else 0
        if bus.refused:
            return StartedAnewError(
                "the job was started anew, or ended this login", hint="perdure node join again"
            )
        away = 0 if bus.connected else away + 1
        if away * look_s >= orphan_s:
            return OrphanedError(
                f"the job's own machine was not reached for {orphan_s:g} s",
                hint="perdure node join again, once it runs",
            )
    return None
