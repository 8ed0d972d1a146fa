"""A new order is its class, who decides it and who carries it out: all between passes it unseen."""

import asyncio
import inspect
import re
import typing
from pathlib import Path

import pytest
from tests.fakes import FakeBus, FakeServer
from tests.waiting import PATIENCE_S

from perdure.agent import messages as agent_messages
from perdure.agent.machine import Agent
from perdure.agent.messages import KeeperUp, OrderReceived, TellWorker
from perdure.agent.state import NodeIdentity
from perdure.control import orders as order_book
from perdure.control.orders import REPEAT_S, OrderBook
from perdure.model import orders
from perdure.model.bus import wire
from perdure.model.bus.wire import KeeperState, NodeOrder, WorkerHello, read_order, subject_orders
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, NodeRegistered, RankJoined
from perdure.model.job import JobSpec
from perdure.model.orders import AnyOrder, LighthouseOrder, Order, RankOrder, TakeStacks
from perdure.service.agent import ranks as agent_ranks
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.ranks import WorkerServer
from perdure.worker import control as rank_control

SPEC = JobSpec(name="j", script="s.py", nproc=2)


class Greet(RankOrder, frozen=True, kw_only=True):
    """Say hello to ranks, which answer with a figure."""

    ranks: tuple[int, ...]
    name: str

    @property
    def level(self) -> str:
        return f"greet {self.generation}"

    def list_done(self, event: AnyEvent) -> tuple[int, ...]:
        return (event.rank,) if isinstance(event, RankJoined) else ()


class Message(NodeOrder, frozen=True):
    """A `NodeOrder` of a version that knows `Greet`."""

    orders: tuple[AnyOrder | Greet, ...] = ()


GREET = Greet(generation=0, ranks=(0, 1), name="ada", reason="it is morning")


class Site:
    """Order book, bus, agent and the ranks' socket of one node."""

    def __init__(self) -> None:
        self.bus = FakeBus(FakeServer())
        self.book = OrderBook(SPEC, "c1")
        self.book.start(0.0)
        self.book.note(NodeRegistered(node=0, incarnation="a0", host="h", boot_id="b", slots=2))
        self.agent = Agent(SPEC, NodeIdentity(node=0, incarnation="a0"))
        held = KeeperState(pid=5, generation=0, running={0: 10, 1: 11}, exits=())
        self.agent.handle(0.0, KeeperUp(state=held))
        self.hellos: asyncio.Queue[object] = asyncio.Queue()
        self.workers = WorkerServer(
            SPEC.name,
            Outbox(self.bus, "s", node=0, source="a0"),
            self.hellos.put_nowait,
        )

    def take(self, data: bytes) -> None:
        for request in self.agent.handle(1.0, OrderReceived(order=decode(data, Message))):
            assert isinstance(request, TellWorker)
            self.workers.send(request.rank, request.message)

    async def send(self, sendings: list[order_book.Sending]) -> None:
        for to, message in sendings:
            await self.bus.publish(subject_orders("j", to), encode(message))
        await asyncio.sleep(0)


async def test_an_order_that_nobody_between_knows_reaches_the_ranks(tmp_path: Path) -> None:
    site, path = Site(), str(tmp_path / "a")
    await site.bus.subscribe(subject_orders("j", 0), site.take)
    await site.workers.start(path)
    ranks = []
    for rank in (0, 1):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(encode(WorkerHello("j", rank, 0, 10 + rank)) + b"\n")
        await site.hellos.get()
        ranks.append((reader, writer))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await site.send(site.book.take(GREET))  # type: ignore[arg-type]
            for reader, _ in ranks:
                assert decode(await reader.readline(), Greet) == GREET
            site.book.note(RankJoined(generation=0, rank=0))
            await site.send(site.book.repeat(REPEAT_S))
            assert decode(await ranks[0][0].readline(), Greet) == GREET, "one has not answered"
        site.book.note(RankJoined(generation=0, rank=1))
        assert [m.orders for _, m in site.book.repeat(2 * REPEAT_S)] == []
    finally:
        await site.workers.close()
        for _, writer in ranks:
            writer.close()
    assert GREET.describe() == "generation 0, ranks (0, 1)"


@pytest.mark.parametrize(
    "module",
    [order_book, wire, agent_messages, agent_ranks, rank_control],
    ids=lambda module: module.__name__,
)
def test_who_passes_orders_on_names_none(module: typing.Any) -> None:
    source = inspect.getsource(module)
    named = [t.__name__ for t in typing.get_args(AnyOrder) if re.search(t.__name__, source)]
    assert named == []


def test_every_order_is_one_of_the_union() -> None:
    bases = {Order, RankOrder, LighthouseOrder}
    defined = {
        value
        for value in vars(orders).values()
        if isinstance(value, type) and issubclass(value, Order) and value not in bases
    }
    assert defined == set(typing.get_args(AnyOrder))


def test_what_only_a_newer_controller_orders_is_left_out_alone() -> None:
    known = TakeStacks(generation=0, ranks=(0,), reason="suspected")
    data = encode(Message(controller="c1", register=True, orders=(GREET, known)))
    message, unknown = read_order(data)
    assert message == NodeOrder(controller="c1", register=True, orders=(known,))
    assert unknown == ("Greet",)
    for broken in (b'{"controller":"c","orders":[7]}', data.replace(b"ranks", b"Ranks")):
        with pytest.raises(ProtocolError):
            read_order(broken)
