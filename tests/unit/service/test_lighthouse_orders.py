"""What the controller orders of perdure's own lighthouse, over a bus in memory."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.fakes import FakeBus, FakeServer
from tests.lighthouse import make_member
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import NodeOrder, subject_orders
from perdure.model.codec import encode
from perdure.model.events import AnyEvent, FaultInjected, ReplicaSeen
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import LIGHTHOUSE, EvictReplica, HoldReplicas, InjectFault, ReplicaGroup
from perdure.service.jobfiles import read_document
from perdure.service.lighthouse import endings
from perdure.service.lighthouse.loop import IDS, LighthouseService
from perdure.service.lighthouse.remembered import LighthouseFile


async def test_the_newest_word_on_patience_holds(tmp_path: Path) -> None:
    spec = JobSpec(name="job", script="x.py", torchft=TorchftConfig(replicas=2))
    server = FakeServer()
    lighthouse = LighthouseService(
        spec, str(tmp_path / "lighthouse.json"), clock=lambda: 1.0, incarnation="l1"
    )
    await lighthouse.join(FakeBus(server))
    try:
        given = lighthouse.machine.config
        for number, startup_s in ((2, 300.0), (1, 7.0), (3, None)):  # The second one is stale.
            hold = HoldReplicas(replicas=(), number=number, startup_s=startup_s, reason="")
            order = NodeOrder(controller="c", orders=(hold,))
            await FakeBus(server).publish(subject_orders("job", LIGHTHOUSE), encode(order))
            await asyncio.sleep(0)
        assert lighthouse.machine.config.startup_s == 300.0
        assert lighthouse.machine.config.alone_s == given.alone_s
    finally:
        await lighthouse.close()


async def start_served(path: Path) -> tuple[int, str]:
    spec = JobSpec(name="job", script="", torchft=TorchftConfig(replicas=1, elsewhere=True))
    lighthouse = LighthouseService(spec, str(path), clock=lambda: 1.0, incarnation="l1")
    await lighthouse.start()
    await lighthouse.close()
    known = read_document(str(path), LighthouseFile)
    assert known is not None
    return lighthouse.machine.next_id, known.line


async def test_ids_and_lines_of_an_earlier_run_are_none_of_the_next_one(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    first_id, line = await start_served(tmp_path / "first.json")
    again_id, again = await start_served(tmp_path / "first.json")
    assert (again_id, again) == (first_id + IDS, line), "a lighthouse that is started anew"
    other_id, other = await start_served(tmp_path / "second.json")
    assert line != other
    # A manager that is in the quorum of an id does not form its connections anew for that id.
    assert other_id != first_id


async def test_a_group_that_could_not_be_harmed_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grpc")
    # If the proxy were asked, its silence would look like the end of the group.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    spec = JobSpec(name="job", script="", torchft=TorchftConfig(replicas=1, elsewhere=True))
    path = str(tmp_path / "lighthouse.json")
    lighthouse = LighthouseService(spec, path, clock=time.monotonic, incarnation="l1")
    told: list[AnyEvent] = []
    lighthouse._outbox.put = told.append  # type: ignore[method-assign]
    lighthouse.machine.ask(time.monotonic(), 1, make_member("a_0:x"))  # It names no manager.
    crash = InjectFault(id="c1", generation=0, rank=0, kind="crash", at_step=-1, reason="by me")
    lighthouse._take_order(encode(NodeOrder(controller="c", orders=(crash,))))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await lighthouse.close()
    (refused,) = told
    assert isinstance(refused, FaultInjected)
    assert refused.error
    assert lighthouse.machine.members == ("a_0:x",)
    assert "a_0:x" in lighthouse.machine.replicas


@pytest.mark.parametrize("lives", [True, False])
async def test_a_group_whose_manager_is_not_reached_is_not_said_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    pytest.importorskip("grpc")
    spec = JobSpec(name="job", script="", torchft=TorchftConfig(replicas=1, elsewhere=True))
    path = str(tmp_path / "lighthouse.json")
    now = 1000.0
    lighthouse = LighthouseService(spec, path, clock=lambda: now, incarnation="l1")
    told: list[AnyEvent] = []
    lighthouse._outbox.put = told.append  # type: ignore[method-assign]

    async def let_pass(seconds: float) -> None:
        nonlocal now
        now += seconds
        if lives:
            lighthouse._do(lighthouse.machine.hear(now, "a_0:x"))

    monkeypatch.setattr(endings, "asyncio", SimpleNamespace(sleep=let_pass))
    member = msgspec.structs.replace(make_member("a_0:x"), manager="http://127.0.0.1:1")
    lighthouse.machine.ask(now, 1, member)
    evict = EvictReplica(replica="a_0:x", generation=0, group=0, kill=True, reason="evict")
    lighthouse._take_order(encode(NodeOrder(controller="c", orders=(evict,))))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await lighthouse.close()
    (gone,) = [event for event in told if isinstance(event, ReplicaSeen)]
    assert gone.silent is not lives, "it has ended"
    assert ("its heartbeats go on" in gone.reason) is lives


async def test_a_group_that_is_evicted_was_not_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a quorum between the order and its end, and so is held for a moment."""
    pytest.importorskip("grpc")
    spec = JobSpec(name="job", script="", torchft=TorchftConfig(replicas=1, elsewhere=True))
    lighthouse = LighthouseService(
        spec, str(tmp_path / "lighthouse.json"), clock=lambda: 1000.0, incarnation="l1"
    )
    told: list[AnyEvent] = []
    lighthouse._outbox.put = told.append  # type: ignore[method-assign]
    killed = asyncio.Event()

    async def kill(manager: str, reason: str) -> str:
        await killed.wait()
        return ""

    monkeypatch.setattr(endings, "kill_replica", kill)
    lighthouse.machine.ask(1000.0, 1, make_member("a_0:x"))
    evict = EvictReplica(replica="a_0:x", generation=0, group=0, kill=True, reason="evict")
    groups = (ReplicaGroup(0, 0, "", held=True),)
    hold = HoldReplicas(replicas=("a_0:x",), number=1, groups=groups, reason="evict")
    for order in (evict, hold):
        lighthouse._take_order(encode(NodeOrder(controller="c", orders=(order,))))
    lighthouse._do(lighthouse.machine.ask(1000.0, 2, make_member("a_0:x", step=2)))
    killed.set()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not any(  # noqa: ASYNC110
                isinstance(event, ReplicaSeen) and event.gone for event in told
            ):
                await asyncio.sleep(0.01)
    finally:
        await lighthouse.close()
    assert [event for event in told if isinstance(event, ReplicaSeen) and event.held] == []
