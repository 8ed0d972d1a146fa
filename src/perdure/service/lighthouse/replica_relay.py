"""The relay of a machine on which others start ranks, to a lighthouse on another machine.

`perdure node join` runs it where it was invited by `perdure serve`. To the ranks here it is what
the lighthouse is to those of its own machine (`replica_ranks.py`): they find its socket by
TORCHFT_LIGHTHOUSE, need no credentials of their own, and say and hear the same. It has the login of
a place at the bus, so everything between the machines is encrypted, and everybody is known.

What ranks tell goes to the controller, end to end as an agent's; that they wait is heard by the
lighthouse, too. Orders come by way of the lighthouse. Which ranks have a line, and whose process
has ended, is said to the lighthouse again and again, so that either of the two may be started anew.

Two machines' clocks are never compared: job time is the lighthouse's here as well, by its answers,
to half of the time that an answer takes.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex

import msgspec

from perdure.model.bus.version import check_spoken
from perdure.model.bus.wire import (
    LinesHeld,
    LinesKnown,
    read_order,
    subject_events,
    subject_lines,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError, RequestError
from perdure.model.events import AnyEvent, ReplicaWaiting
from perdure.model.job import JobSpec
from perdure.model.orders import FenceAbort, RankOrder
from perdure.model.paths import JobPaths
from perdure.service.agent.notices import NoticeWatch, wait_to_leave
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.shell import connect
from perdure.service.jobfiles import MINE, load_endpoint, load_spec
from perdure.service.jobfolders import paths_of, resolve_home
from perdure.service.lighthouse.replica_ranks import ReplicaRanks
from perdure.service.part import Tasks, read_run_pid, run_part, wait_event, watch_process
from perdure.service.ports import Bus
from perdure.worker.system.process import set_title

log = logging.getLogger("perdure.relay")

EVERY_S = 1.0
"""Between two reports of the lines to the lighthouse; what is new is said at once."""
_ANSWER_S = 3.0
_AGAIN_S = 0.2
_FIND_S = 8.0
"""A rank that asks who it is waits no longer."""


@dataclass(slots=True)
class _Clock:
    """Job time on this machine, and how far it has drifted from the lighthouse's."""

    offset_s: float
    drift_s: float = 0.0

    def now(self) -> float:
        return time.monotonic() + self.offset_s

    def compare(self, offset_s: float) -> None:
        """Take what an answer says of the offset; job time itself never steps."""
        self.drift_s = offset_s - self.offset_s


class _Passing(Outbox):
    """What ranks tell; since when they wait is told by the lighthouse's clock."""

    clock: _Clock

    def put_from(self, source: str, seq: int, event: AnyEvent, done: Callable[[], None]) -> None:
        """Queue event `seq` of a rank."""
        if isinstance(event, ReplicaWaiting):
            since_s = event.since_s + self.clock.drift_s
            event = msgspec.structs.replace(event, since_s=since_s)
        super().put_from(source, seq, event, done)


class ReplicaRelay:
    """One relay, of one place."""

    def __init__(self, spec: JobSpec, place: int, paths: JobPaths, bus: Bus) -> None:
        """Wire it; `run` is its life."""
        self._spec, self._place, self._paths, self._bus = spec, place, paths, bus
        self._ended: dict[int, str] = {}
        self._lines: Callable[[], dict[int, int]] = dict
        self._wake = asyncio.Event()
        self._clock = _Clock(0.0)
        self._tasks = Tasks()
        self.notices = NoticeWatch(
            spec.preemption, (), node=place, report=lambda event: None, now=self._clock.now
        )

    async def run(self) -> None:
        """Pass on until this machine is to leave, or until cancelled.

        Raises:
            OrphanedError: the lighthouse's machine was away for too long, or was started anew.
        """
        leaving = self._tasks.spawn(
            wait_to_leave(self._bus, self.notices, lambda: True, self._spec.bus.orphan_s)
        )
        try:
            serving = self._tasks.spawn(self._serve())
            await asyncio.wait((leaving, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            if (error := leaving.result()) is not None:
                raise error
        finally:
            await self._tasks.end()

    async def _serve(self) -> None:
        known, offset_s = await self._begin()
        self._clock.offset_s = offset_s
        job, place = self._spec.name, self._place
        source = f"a{place}-{os.getpid()}-{token_hex(3)}"
        outbox = _Passing(self._bus, subject_events(job, place), node=place, source=source)
        outbox.clock = self._clock
        ranks = ReplicaRanks(
            self._spec,
            outbox,
            clock=self._clock.now,
            clock_offset_s=offset_s,
            find=self._find,
            ended=self._note_ended,
            place=place,
        )

        self._lines = lambda: ranks.lines

        def take(data: bytes) -> None:
            self._take_orders(ranks, data)

        await self._bus.subscribe(subject_orders(job, place), take)
        await ranks.start(self._paths, known.port, known.line, self._spec.torchft.bind)
        log.info("ranks here find %s:%d", self._spec.torchft.bind, known.port)
        try:
            await asyncio.gather(outbox.run(), self._tell())
        finally:
            await ranks.close()

    async def _begin(self) -> tuple[LinesKnown, float]:
        while True:
            try:
                return await self._ask(LinesHeld())
            except (RequestError, ProtocolError) as error:
                log.warning("the lighthouse gives no answer: %s", error)
                await asyncio.sleep(EVERY_S)

    async def _ask(self, held: LinesHeld) -> tuple[LinesKnown, float]:
        """Return the lighthouse's answer, and job time less this machine's clock by it."""
        began_s = time.monotonic()
        subject = subject_lines(self._spec.name, self._place)
        data = await self._bus.request(subject, encode(held), timeout_s=_ANSWER_S)
        known: LinesKnown = decode(data, LinesKnown)
        return known, known.at_s - (began_s + time.monotonic()) / 2

    async def _tell(self) -> None:
        while True:
            self._wake.clear()
            ended = dict(self._ended)
            try:
                _, offset_s = await self._ask(LinesHeld(lines=self._lines(), ended=ended))
            except (RequestError, ProtocolError):
                await asyncio.sleep(_AGAIN_S)
                continue
            self._clock.compare(offset_s)
            for life in ended:
                self._ended.pop(life, None)
            await wait_event(self._wake, EVERY_S)

    async def _find(self, replica: str) -> tuple[int, int]:
        deadline_s = time.monotonic() + _FIND_S
        while time.monotonic() < deadline_s:
            try:
                known, _ = await self._ask(LinesHeld(lines=self._lines(), find=replica))
            except (RequestError, ProtocolError):
                await asyncio.sleep(_AGAIN_S)
            else:
                self._wake.set()
                return known.group, known.life
        return -1, -1

    def _note_ended(self, life: int, reason: str) -> None:
        log.info("life %d: %s", life, reason)
        self._ended[life] = reason
        self._wake.set()

    def _take_orders(self, ranks: ReplicaRanks, data: bytes) -> None:
        """Pass on what the lighthouse says; all else on this subject is for agents."""
        try:
            message, _ = read_order(data)
        except ProtocolError as error:
            log.error("refused: %s", error)
            return
        for order in message.orders:
            if isinstance(order, FenceAbort):
                ranks.tell_groups(order.groups, order)
            elif isinstance(order, RankOrder):
                ranks.take(order)


def main(job: str, place: int) -> int:
    """Run the relay of `place` of `job` as a process; return its exit code."""
    set_title(f"perdure relay {job} {place}")
    return run_part(_main(job, place), log, "; the ranks go on")


async def _main(job: str, place: int) -> None:
    paths = paths_of(resolve_home(), job)
    spec, endpoint = load_spec(paths), load_endpoint(paths, f"agent-{place}")
    check_spoken(MINE, endpoint.speaks, f"the job {job}")
    loop, task, run_pid = asyncio.get_running_loop(), asyncio.current_task(), read_run_pid()
    assert task is not None
    bus = await connect(endpoint, f"perdure relay {job} {place}", run_pid)
    if bus is None:
        return
    relay = ReplicaRelay(spec, place, paths, bus)
    for name in spec.preemption.signals:
        loop.add_signal_handler(signal.Signals[name], relay.notices.warn, name)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        with watch_process(run_pid, task.cancel):
            await relay.run()
    finally:
        await bus.close()
