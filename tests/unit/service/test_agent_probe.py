"""Two agents' probers on one bus, with real sockets between them."""

import asyncio

import pytest
from tests.fakes import FakeBus, FakeServer
from tests.waiting import PATIENCE_S

from perdure.agent.probe import ProbeParts
from perdure.model.codec import encode
from perdure.model.errors import RequestError
from perdure.model.events import ProbeEnded
from perdure.model.orders import RunProbe
from perdure.model.signals.links import ProbeAsk, subject_probe
from perdure.service.agent.probe import Prober


def order(
    *pairs: tuple[int, int], hosts: tuple[int, ...] = (), deadline_s: float = PATIENCE_S
) -> RunProbe:
    return RunProbe(
        id="p", round=1, pairs=pairs, hosts=hosts, bytes=500_000, deadline_s=deadline_s, reason=""
    )


class Node:
    def __init__(self, server: FakeServer, number: int, address: str = "127.0.0.1") -> None:
        self.ended: asyncio.Queue[ProbeEnded] = asyncio.Queue()
        self.prober = Prober(
            FakeBus(server),
            "job",
            number,
            address=lambda: address,
            report=self.ended.put_nowait,
            now=lambda: 7.0,
        )

    async def answer(self) -> ProbeEnded:
        return await asyncio.wait_for(self.ended.get(), PATIENCE_S)


async def test_a_pair_is_measured_both_ways_and_both_nodes_answer_once() -> None:
    server = FakeServer()
    nodes = [Node(server, 0), Node(server, 1)]
    for node in nodes:
        await node.prober.start()
    for node in nodes:
        node.prober.take(order((1, 0), hosts=(0,)))
        node.prober.take(order((1, 0), hosts=(0,)))  # Orders are repeated.
    receiver, sender = await nodes[0].answer(), await nodes[1].answer()
    assert [(p.src, p.dst, p.bytes) for p in sender.pairs] == [(1, 0, 500_000), (0, 1, 500_000)]
    assert all(p.seconds > 0 and p.rtt_s > 0 for p in sender.pairs)
    assert (sender.hosts, sender.error, sender.at_s) == ((), "", 7.0)
    assert receiver.pairs == ()
    assert [(h.node, h.device) for h in receiver.hosts] == [(0, "cpu")]
    assert receiver.hosts[0].seconds > 0
    for node in nodes:
        await node.prober.close()
        assert node.ended.empty()


async def test_a_node_that_cannot_be_asked_is_not_called_slow() -> None:
    node = Node(FakeServer(), 0)
    await node.prober.start()
    node.prober.take(order((0, 5), deadline_s=0.3))
    ended = await node.answer()
    assert ended.pairs == ()
    assert ended.error.startswith("node 5 was not measured: ")
    await node.prober.close()


async def test_a_node_that_cannot_open_a_door_says_why() -> None:
    server = FakeServer()
    sender, receiver = Node(server, 0), Node(server, 1, address="192.0.2.77")
    await sender.prober.start()
    await receiver.prober.start()
    sender.prober.take(order((0, 1)))
    receiver.prober.take(order((0, 1)))
    assert "cannot listen on 192.0.2.77" in (await sender.answer()).error
    await sender.prober.close()
    await receiver.prober.close()


@pytest.mark.parametrize(
    "ask", [("p", 1, 2), ("p", 2, 0), ("q", 1, 0), ("", 0, 0)], ids=["src", "round", "id", "none"]
)
async def test_only_who_was_ordered_to_is_let_in(ask: tuple[str, int, int]) -> None:
    """D3: any agent had any other open a door, and move a gigabyte beside its training."""
    server = FakeServer()
    receiver, other = Node(server, 1), FakeBus(server)
    await receiver.prober.start()
    receiver.prober.take(order((0, 1), hosts=()))
    await receiver.answer()
    asked = encode(ProbeAsk(*ask, bytes=1 << 30, deadline_s=30.0))
    with pytest.raises(RequestError):
        await other.request(subject_probe("job", 1), asked, timeout_s=0.1)
    await receiver.prober.close()


def test_parts() -> None:
    parts = ProbeParts(1)
    assert parts.take(order((0, 2))) is None
    part = parts.take(order((1, 2), (0, 3), hosts=(0, 1)))
    assert part is not None
    assert (part.destinations, part.computes) == ((2,), True)
    assert parts.take(order((1, 2))) is None
