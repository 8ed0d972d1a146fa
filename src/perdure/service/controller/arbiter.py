"""Where a job keeps its journal and its lease: in JetStream, or with an arbiter that holds both."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from perdure.adapters.nats import NatsBus, NatsLease, NatsStream
from perdure.adapters.shared_folder import make_run_folder, open_journal, open_lease
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.service.controller.lease import LeaseRegister
from perdure.service.ports import STUCK_S, JournalStream

log = logging.getLogger("perdure.controller")

T = TypeVar("T")
_RETRY_S = 0.1


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
