"""A controller whose time is over writes nothing and sends nothing."""

import asyncio

import pytest
from tests.fakes import FakeBus, FakeServer, FakeStream
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import Command, NodeOrder, subject_orders
from perdure.model.codec import decode
from perdure.model.errors import FencedError
from perdure.model.events import ControllerStarted
from perdure.model.job import JobSpec
from perdure.service.controller.journal import Journal
from perdure.service.controller.loop import ControllerService
from perdure.service.jobfiles import parse_journal

SPEC = JobSpec(name="job", script="s.py", nodes=3)


class Site:
    """A bus, a journal, and what the agents hear."""

    def __init__(self) -> None:
        self.server, self.stream = FakeServer(), FakeStream()
        self.heard: list[NodeOrder] = []
        self.more = asyncio.Event()

    async def listen(self) -> None:
        bus = FakeBus(self.server)
        await bus.subscribe(subject_orders("job", "all"), self._hear)

    def _hear(self, data: bytes) -> None:
        self.heard.append(decode(data, NodeOrder))
        self.more.set()

    def start(self, name: str) -> "asyncio.Task[object]":
        loop = asyncio.get_running_loop()
        service = ControllerService(
            SPEC,
            FakeBus(self.server),
            Journal(self.stream, writer=name),
            clock=loop.time,
            incarnation=name,
            submitted_s=0.0,
            show=lambda snapshot: None,
        )
        self.newest = service
        return asyncio.create_task(service.run())

    def terms(self) -> list[int]:
        entries = parse_journal(b"".join(self.stream.messages).splitlines(keepends=True))
        return [e.body.term for e in entries if isinstance(e.body, ControllerStarted)]


async def wait_orders(site: Site, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(site.heard) < count:
            site.more.clear()
            await site.more.wait()


async def test_orders_and_journal_carry_a_term_that_grows() -> None:
    site = Site()
    await site.listen()
    for name, terms in (("first", [1]), ("second", [1, 2])):
        task = site.start(name)
        await wait_orders(site, len(terms))
        assert [order.term for order in site.heard] == terms
        assert site.terms() == terms
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_two_that_both_believe_to_be_the_controller_cannot_both_write() -> None:
    site = Site()
    await site.listen()
    first = site.start("first")
    await wait_orders(site, 1)
    deposed = site.newest
    second = site.start("second")
    await wait_orders(site, 2)
    deposed.command(Command(id="x", kind="pause"))
    with pytest.raises(FencedError, match="another controller writes"):
        await asyncio.wait_for(first, PATIENCE_S)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert site.terms() == [1, 2]
