"""The relay of another machine's ranks and the lighthouse, over a bus in memory, with one rank."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.fakes import FakeBus, FakeServer
from tests.lighthouse import make_member
from tests.waiting import PATIENCE_S

from perdure.files.private import find_private
from perdure.model.bus.wire import (
    EventAck,
    EventMessage,
    LinesHeld,
    NodeOrder,
    ReplicaHello,
    ReplicaWelcome,
    ToWorker,
    WorkerAck,
    WorkerEvent,
    WorkerHello,
    subject_events,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.events import BoundaryAnswered, KeysDeclared, ReplicaSeen, ReplicaWaiting
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import LIGHTHOUSE, FenceAbort, InjectFault, SendBoundary
from perdure.model.paths import JobPaths, lighthouse_door
from perdure.service.lighthouse import relays as relays_module
from perdure.service.lighthouse import replica_relay as relay_module
from perdure.service.lighthouse.loop import LighthouseService
from perdure.service.lighthouse.relays import Relays
from perdure.service.lighthouse.replica_relay import ReplicaRelay

pytest.importorskip("grpc")
ADDRESS = f"192.0.2.{os.getpid() % 200}"
TORCHFT = TorchftConfig(replicas=1, elsewhere=True)
SPEC = JobSpec(script="", name="job", remote=2, torchft=TORCHFT)
ELSEWHERE = msgspec.structs.replace(SPEC, torchft=TorchftConfig(bind=ADDRESS, elsewhere=True))
SHIFT_S = 1000.0
"""By how much this machine's job time differs from what its clock says."""
SILENT_S = 3600.0
"""Silence after which a relay holds no lines; no test is held up for as long."""


class Site:
    """A lighthouse, a controller that acknowledges, and the relay of place 1."""

    def __init__(self, folder: Path) -> None:
        self.server = FakeServer()
        self.told: list[tuple[str, Any]] = []
        self.lighthouse = LighthouseService(
            SPEC,
            str(folder / "lighthouse.json"),
            clock=lambda: time.monotonic() + SHIFT_S,
            incarnation="l1",
        )
        paths = JobPaths(str(folder), str(folder), str(folder))
        self.relay = ReplicaRelay(ELSEWHERE, 1, paths, FakeBus(self.server))

    async def start(self) -> None:
        await FakeBus(self.server).serve_each(subject_events("job", "*"), self._acknowledge)
        port = await self.lighthouse.start()
        self.door = lighthouse_door(find_private("/tmp"), port, ADDRESS)
        os.makedirs(os.path.dirname(self.door), mode=0o700, exist_ok=True)
        await self.lighthouse.join(FakeBus(self.server))
        self.running = asyncio.create_task(self.relay.run())
        await self.until(lambda: os.path.exists(self.door))

    def _acknowledge(self, sender: str, data: bytes, reply: Any) -> None:
        message = decode(data, EventMessage)
        seqs = {}
        for batch in message.batches:
            seqs[batch.source] = batch.first_seq + len(batch.events) - 1
            self.told += [(sender, event) for event in batch.events]
        self.running_reply = asyncio.ensure_future(reply(encode(EventAck(seqs))))

    def events(self, type_: type) -> list[Any]:
        return [event for _, event in self.told if isinstance(event, type_)]

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def introduce(self) -> ReplicaWelcome:
        reader, writer = await asyncio.open_unix_connection(self.door)
        hello = ReplicaHello(replica="train_3:ab", local_rank=0, ranks=1, pid=os.getpid())
        writer.write(encode(hello) + b"\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return decode(answer, ReplicaWelcome)

    async def order(self, *orders: Any) -> None:
        message = NodeOrder(controller="c", orders=orders)
        await FakeBus(self.server).publish(subject_orders("job", LIGHTHOUSE), encode(message))


@pytest_asyncio.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(relays_module, "SILENT_S", SILENT_S)
    monkeypatch.setattr(relay_module, "_FIND_S", PATIENCE_S)
    made = Site(tmp_path)
    await made.start()
    yield made
    made.running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await made.running
    await made.lighthouse.close()
    os.unlink(made.door)


async def read(reader: asyncio.StreamReader) -> Any:
    return decode(await asyncio.wait_for(reader.readline(), PATIENCE_S), ToWorker)


@pytest.mark.asyncio
async def test_a_rank_elsewhere_says_and_hears_what_one_beside_the_lighthouse_does(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await site.introduce()
    assert (told.rank, told.generation, told.place, told.refusal) == (3, 0, 1, "")
    assert [seen.replica for seen in site.events(ReplicaSeen)] == ["train_3:ab"], "told before it"
    assert abs(told.clock_offset_s - SHIFT_S) < SHIFT_S / 2, "job time is the lighthouse's"

    reader, writer = await asyncio.open_unix_connection(site.door)
    writer.write(encode(WorkerHello(told.line, 3, 0, os.getpid())) + b"\n")
    keys = KeysDeclared(generation=0, keys=())
    writer.write(encode(WorkerEvent(1, keys)) + b"\n")
    assert await read(reader) == WorkerAck(1)
    assert ("1", keys) in site.told, "under the name of its place"

    await site.until(lambda: site.lighthouse._relays.holds(3, 0))
    ask = {"kind": "set", "step": 9, "ranks": (3,), "number": 1, "reason": "r"}
    promise = SendBoundary(id="b1", move="prepare", generation=0, **ask)
    await site.order(promise)
    assert await read(reader) == promise
    fault = InjectFault(id="f1", generation=0, rank=3, kind="sleep", at_step=-1, reason="by me")
    await site.order(fault)
    assert await read(reader) == fault
    fence = FenceAbort(quorum_id=4, groups=(3,), reason="a peer is gone")
    site.lighthouse._pass_on(msgspec.structs.replace(fence, groups=(2,)))
    site.lighthouse._pass_on(fence)
    assert await read(reader) == fence

    heard: list[ReplicaWaiting] = []
    site.lighthouse._take_waiting = heard.append  # type: ignore[method-assign]
    clock = site.relay._clock
    clock.compare(clock.offset_s + 5.0)
    monkeypatch.setattr(type(clock), "compare", lambda clock, offset_s: None)  # The drift stays.
    waiting = ReplicaWaiting(generation=0, rank=3, quorum_id=4, step=9, since_s=100.0)
    writer.write(encode(WorkerEvent(2, waiting)) + b"\n")
    assert await read(reader) == WorkerAck(2)
    assert [round(event.since_s) for event in heard] == [105], "by the lighthouse's clock"
    writer.close()


@pytest.mark.asyncio
async def test_a_rank_whose_group_was_heard_a_moment_ago_is_told_who_it_is_once_that_is_seen(
    site: Site,
) -> None:
    machine, now = site.lighthouse.machine, time.monotonic() + SHIFT_S
    site.lighthouse._do(machine.ask(now, 1, make_member("train_3:before")))
    told = await site.introduce()
    assert (told.rank, told.generation, told.refusal) == (3, 1, "")
    before, gone, seen = site.events(ReplicaSeen)
    assert gone.at_s >= now + 1.0, "it might have been heard until then"
    assert (before.life, gone.life, seen.life) == (0, 0, 1)
    assert (gone.gone, gone.heard_s) == (True, now)


@pytest.mark.asyncio
async def test_the_end_of_a_process_elsewhere_is_the_end_of_its_group(site: Site) -> None:
    told = await site.introduce()
    process = await asyncio.create_subprocess_exec("sleep", "3600")
    _, writer = await asyncio.open_unix_connection(site.door)
    writer.write(encode(WorkerHello(told.line, 3, 0, process.pid)) + b"\n")
    await site.until(lambda: site.lighthouse._relays.holds(3, 0))
    ended: list[tuple[int, str]] = []
    site.lighthouse._take_end = lambda *args: ended.append(args)  # type: ignore[method-assign]
    process.kill()
    writer.close()
    await process.wait()
    await site.until(lambda: ended)
    assert ended == [(0, "rank 3: its process has ended")]
    await site.until(lambda: not site.lighthouse._relays.holds(3, 0))


@pytest.mark.asyncio
async def test_no_relay_ends_or_waits_for_what_another_one_holds() -> None:
    now = 100.0
    relays = Relays(lambda: now)
    relays.take("0", LinesHeld(lines={4: 7}), {})
    assert relays.take("1", LinesHeld(ended={7: "a lie", 8: "so it is"}), {9: 9}) == {8: "so it is"}
    assert relays.take("1", LinesHeld(ended={9: "a lie"}), {9: 9}) == {}
    assert relays.holds(4, 7, "0")
    assert not relays.holds(4, 7, "1")
    assert relays.take("0", LinesHeld(ended={7: "its process has ended"}), {}).keys() == {7}
    assert not relays.holds(4, 7)
    relays.take("0", LinesHeld(lines={4: 7}), {})
    now += relays_module.SILENT_S + 0.1
    assert not relays.holds(4, 7), "nothing was heard of it"


@pytest.mark.parametrize("lie", [{4: 7}, {5: 7}, {0: 7, 9: 7}])
def test_a_relay_that_claims_anothers_rank_cannot_end_its_group(lie: dict[int, int]) -> None:
    """Not by its number, nor by one that is of no such group."""
    relays = Relays(lambda: 100.0)
    relays.take("0", LinesHeld(lines={4: 7}), {})
    relays.take("1", LinesHeld(lines=lie), {})
    assert relays.take("1", LinesHeld(lines=lie, ended={7: "a lie"}), {}) == {}
    relays.take("1", LinesHeld(lines={9: 9}), {9: 9})
    assert relays.take("1", LinesHeld(ended={9: "a lie"}), {9: 9}) == {}


def test_two_machines_with_ranks_of_one_group_both_tell_of_its_end() -> None:
    for place in ("0", "1"):
        relays = Relays(lambda: 100.0, nproc=2)
        relays.take("0", LinesHeld(lines={8: 7}), {})
        relays.take("1", LinesHeld(lines={9: 7}), {})
        assert relays.take(place, LinesHeld(ended={7: "it has ended"}), {}).keys() == {7}


@pytest.mark.asyncio
async def test_who_has_no_relay_any_more_is_said_to_be_lost_and_not_waited_for(site: Site) -> None:
    """A login that was ended: its rank trains on in the quorum, and would answer no try."""
    told = await site.introduce()
    _, writer = await asyncio.open_unix_connection(site.door)
    writer.write(encode(WorkerHello(told.line, 3, 0, os.getpid())) + b"\n")
    relays = site.lighthouse._relays
    await site.until(lambda: relays.holds(3, 0))
    site.running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await site.running
    ask = {"kind": "set", "step": 9, "ranks": (3,), "reason": "r", "generation": 0}

    def order(id_: str, move: Any, number: int) -> None:
        asked = SendBoundary(id=id_, move=move, number=number, **ask)
        site.lighthouse._take_order(encode(NodeOrder(controller="c", orders=(asked,))))

    order("b1.1", "prepare", 1)
    relays._clock = lambda: time.monotonic() + SHIFT_S + SILENT_S + 0.1
    order("b1.1", "abort", 1)
    order("b1.2", "prepare", 2)
    await site.until(lambda: site.events(BoundaryAnswered))
    ((sender, answer),) = [row for row in site.told if isinstance(row[1], BoundaryAnswered)]
    assert (sender, answer.id, answer.rank) == (LIGHTHOUSE, "b1.2", 3), "a moment's silence is none"
    assert answer.refused
    assert "no line" in answer.reason
    writer.close()
