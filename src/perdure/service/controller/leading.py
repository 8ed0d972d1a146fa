"""Among several controllers: waiting for the lease, and being ended when it is over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from perdure.adapters.nats import SYSTEM, ElectionWatch, NatsBus
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.controller.arbiter import open_register
from perdure.service.controller.lease import LeaseLoop
from perdure.service.jobfiles import load_endpoint
from perdure.service.part import Tasks

T = TypeVar("T")


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
    task = asyncio.create_task(work)
    over = asyncio.create_task(lease.over.wait())
    try:
        await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        lease.check()
    return task.result()
