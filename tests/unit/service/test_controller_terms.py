"""A controller whose time is over writes nothing and sends nothing."""

import asyncio

import pytest
from tests.fakes import FakeBus, FakeServer, FakeStream
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import Command, NodeOrder, subject_orders
from perdure.model.codec import decode
from perdure.model.errors import FencedError
from perdure.model.events import ControllerStarted
from perdure.model.job import BusConfig, JobSpec
from perdure.service.controller.journal import Journal
from perdure.service.controller.loop import ControllerService
from perdure.service.jobfiles import parse_journal

SPEC = JobSpec(name="job", script="s.py", nodes=3, bus=BusConfig(replicas=3))


class Site:
    """A bus, a journal, and what the agents hear."""

    def __init__(self) -> None:
        self.server, self.stream = FakeServer(), FakeStream()
        self.heard: list[NodeOrder] = []
        self.more = asyncio.Event()
        self.lapsed = False

    async def listen(self) -> None:
        bus = FakeBus(self.server)
        await bus.subscribe(subject_orders("job", "all"), self._hear)

    def _hear(self, data: bytes) -> None:
        self.heard.append(decode(data, NodeOrder))
        self.more.set()

    def check(self) -> None:
        if self.lapsed:
            raise FencedError("the lease is over")

    def start(self, term: int) -> "asyncio.Task[object]":
        loop = asyncio.get_running_loop()
        service = ControllerService(
            SPEC,
            FakeBus(self.server),
            Journal(self.stream, writer=f"c{term}"),
            clock=loop.time,
            incarnation=f"c{term}",
            submitted_s=0.0,
            show=lambda snapshot: None,
            term=term,
            check=self.check,
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


async def test_orders_and_journal_carry_the_term() -> None:
    site = Site()
    await site.listen()
    task = site.start(4)
    await wait_orders(site, 1)
    assert [order.term for order in site.heard] == [4]
    assert site.terms() == [4]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("term", [4, 3])
async def test_a_lease_older_than_the_journal_is_worth_nothing(term: int) -> None:
    site = Site()
    await site.listen()
    first = site.start(4)
    await wait_orders(site, 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    with pytest.raises(FencedError, match="term 4"):
        await site.start(term)
    assert site.terms() == [4]


async def test_what_was_written_when_the_lease_lapsed_is_not_sent() -> None:
    """It is in the journal, so the next controller does it."""
    site = Site()
    await site.listen()
    append = site.stream.append

    async def slow(data: bytes, *, expected_last: int, message_id: str) -> int:
        number = await append(data, expected_last=expected_last, message_id=message_id)
        site.lapsed = True
        return number

    site.stream.append = slow  # type: ignore[method-assign]
    with pytest.raises(FencedError, match="lease"):
        await site.start(4)
    assert site.terms() == [4]
    assert site.heard == []


async def test_two_that_both_believe_to_be_the_controller_cannot_both_write() -> None:
    site = Site()
    await site.listen()
    first = site.start(4)
    await wait_orders(site, 1)
    deposed = site.newest
    second = site.start(6)
    await wait_orders(site, 2)
    deposed.command(Command(id="x", kind="pause"))
    with pytest.raises(FencedError, match="another controller writes"):
        await asyncio.wait_for(first, PATIENCE_S)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert site.terms() == [4, 6]
