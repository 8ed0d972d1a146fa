"""Whose controller acts: a job's journal and lease, waiting for the lease, and its end.

Both are kept in JetStream, or with an arbiter. The loop around `control/lease.py` has one request
to the register at a time under way. Where this process may act no more it says so by `over`;
whoever acts looks at `check` before each thing that it does, and is cancelled besides.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar, assert_never

import msgspec

from perdure.adapters.nats import SYSTEM, ElectionWatch, NatsBus, NatsLease, NatsStream
from perdure.adapters.shared_folder import make_run_folder, open_journal, open_lease
from perdure.control.lease import (
    Fact,
    Lease,
    LeaseDue,
    LeaseRead,
    LeaseRefused,
    LeaseTimes,
    LeaseUnanswered,
    LeaseWritten,
    ReadLease,
    Request,
    StandDown,
    TakeOver,
    WriteLease,
)
from perdure.failpoints import failpoint
from perdure.model.errors import FencedError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import load_endpoint
from perdure.service.part import Tasks, run_until
from perdure.service.ports import STUCK_S, JournalStream

log = logging.getLogger("perdure.controller")

T = TypeVar("T")
_RETRY_S = 0.1


class LeaseRegister(Protocol):
    """One value with a revision that only grows, and a write that names the one it replaces."""

    async def read(self) -> tuple[int, str]:
        """Return revision and value; (0, "") where nothing was ever written.

        Raises:
            PlatformError: no answer.
        """

    async def write(self, holder: str, expected: int) -> int | None:
        """Return the new revision; None where the register does not hold `expected`.

        Raises:
            PlatformError: no answer; it may have been written all the same.
        """


class LeaseLoop:
    """One process's side of the lease; `run` is its life."""

    def __init__(
        self,
        register: LeaseRegister,
        me: str,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take part as `me`."""
        self._register, self._clock = register, clock
        times = LeaseTimes(ttl_s=lease_s, renew_s=lease_s / 4, margin_s=lease_s / 5)
        self.lease = Lease(me=me, times=times)
        self.won = asyncio.Event()
        self.over = asyncio.Event()
        self.reason = ""
        self._missing = False

    def check(self) -> None:
        """Return if this process may act at this moment.

        Raises:
            FencedError: it may not, and never may again.
        """
        if not self.lease.may_act(self._clock()):
            raise FencedError(
                self.reason or "the lease was not renewed in time",
                hint="another controller goes on",
            )

    async def run(self) -> None:
        """Take part until this process may act no more."""
        fact: Fact = LeaseDue()
        while not self.over.is_set():
            requests = self.lease.handle(self._clock(), fact)
            fact = LeaseDue()
            for request in requests:
                answer = await self._carry_out(request)
                fact = fact if answer is None else answer
            if isinstance(fact, LeaseDue):
                due_s = self.lease.next_deadline()
                await asyncio.sleep(max(0.0, (due_s or 0.0) - self._clock()))

    async def give_back(self) -> None:
        """Let another one begin at once; this process acts no more."""
        revision, self.lease.state = self.lease.revision, "fenced"
        if revision > 0:
            try:
                await self._register.write("", revision)
            except PlatformError as error:
                log.warning("the lease is not given back: %s", error)

    async def _carry_out(self, request: Request) -> Fact | None:
        """Do what is asked; return what the register has answered, where it was asked."""
        fact: Fact
        try:
            match request:
                case ReadLease():
                    revision, holder = await self._register.read()
                    fact = LeaseRead(revision=revision, holder=holder)
                case WriteLease(expected=expected):
                    failpoint("lease/write")
                    written = await self._register.write(self.lease.me, expected)
                    failpoint("lease/written")
                    fact = LeaseRefused() if written is None else LeaseWritten(revision=written)
                case TakeOver(term=term):
                    log.info("holds the lease, in term %d", term)
                    self.won.set()
                    return None
                case StandDown(reason=reason):
                    log.error("acts no more: %s", reason)
                    self.reason = reason
                    self.over.set()
                    return None
                case _:
                    assert_never(request)
        except PlatformError as error:
            if not self._missing:
                log.warning("%s; trying again", error)
            self._missing = True
            return LeaseUnanswered()
        self._missing = False
        return fact


def prepare_arbiter(spec: JobSpec, started_s: float) -> JobSpec:
    """Return `spec` with a folder of this run's own in its arbiter's, if it has one.

    Raises:
        PlatformError: it cannot be an arbiter.
    """
    if not spec.bus.arbiter:
        return spec
    folder = make_run_folder(spec.bus.arbiter, f"{spec.name}-{started_s:.0f}-{os.getpid()}")
    return msgspec.structs.replace(spec, bus=msgspec.structs.replace(spec.bus, arbiter=folder))


@contextlib.asynccontextmanager
async def open_stream(
    spec: JobSpec, bus: NatsBus, on_stuck: Callable[[], object] = lambda: None
) -> AsyncIterator[JournalStream]:
    """Give the journal's stream, made where it is not there, waiting for who keeps it.

    `on_stuck` is called every `STUCK_S` meanwhile.
    """
    if spec.bus.arbiter:
        with open_journal(spec.bus.arbiter) as stream:
            yield stream
        return
    yield await _insist(
        lambda: NatsStream.open(bus, spec.name, replicas=spec.bus.replicas), on_stuck
    )


@contextlib.asynccontextmanager
async def open_register(spec: JobSpec, bus: NatsBus) -> AsyncIterator[LeaseRegister]:
    """Give the lease's register, waiting for who keeps it."""
    if spec.bus.arbiter:
        with open_lease(spec.bus.arbiter) as shared:
            yield shared
        return
    register = NatsLease(bus, spec.name, spec.bus.replicas)
    await _insist(register.open)
    yield register


async def _insist(
    call: Callable[[], Awaitable[T]], on_stuck: Callable[[], object] = lambda: None
) -> T:
    clock = asyncio.get_running_loop().time
    stuck_at_s = clock() + STUCK_S
    while True:
        try:
            return await call()
        except PlatformError as error:
            log.warning("%s; trying again", error)
            if clock() > stuck_at_s:
                stuck_at_s = clock() + STUCK_S
                on_stuck()
            await asyncio.sleep(_RETRY_S)


@contextlib.asynccontextmanager
async def lead(
    spec: JobSpec, paths: JobPaths, bus: NatsBus, me: str, node: int
) -> AsyncIterator[LeaseLoop | None]:
    """Wait until `me` may act, however long that is; None where nobody else could."""
    if not spec.contested:
        yield None
        return
    async with open_register(spec, bus) as register:
        loop = LeaseLoop(register, me, spec.bus.lease_s)
        tasks = Tasks()
        if not (spec.nats.url or spec.bus.arbiter):
            tasks.spawn(_watch_elections(spec, paths, node))
        first = (tasks.spawn(loop.run()), tasks.spawn(loop.won.wait()))
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            loop.check()
            yield loop
        finally:
            await tasks.end()
            await loop.give_back()


async def _watch_elections(spec: JobSpec, paths: JobPaths, node: int) -> None:
    """Have a lost leader of the journal or the lease replaced, whoever acts meanwhile."""
    endpoint = load_endpoint(paths, SYSTEM)
    system = await NatsBus.connect(endpoint, name=f"perdure elections {spec.name}", near=node)
    try:
        await ElectionWatch(system, spec.bus.replicas).run()
    finally:
        await system.close()


async def run_while(lease: LeaseLoop | None, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; end it as soon as the lease is over.

    Raises:
        FencedError: it is over.
    """
    if lease is None:
        return await work
    result = await run_until(lease.over, work)
    if result is None:
        lease.check()
    assert result is not None
    return result
