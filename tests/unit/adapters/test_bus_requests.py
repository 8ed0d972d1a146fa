"""A request whose caller has gone away fails in silence, however it fails."""

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from perdure.adapters.nats import NatsBus
from perdure.model.errors import RequestError


async def fail_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise nats.errors.NoRespondersError


@pytest.mark.parametrize("how", ["the caller is cancelled", "the connection is lost"])
async def test_an_abandoned_request_is_not_reported(how: str) -> None:
    bus = NatsBus()
    bus.client = SimpleNamespace(is_connected=True)
    said: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: said.append(context))
    caller = asyncio.ensure_future(bus.unless_lost(fail_when_cancelled()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if how == "the caller is cancelled":
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    else:
        bus._lost.set()
        with pytest.raises(RequestError, match="lost"):
            await caller
    for _ in range(5):
        await asyncio.sleep(0)
    del caller
    gc.collect()
    assert said == []
