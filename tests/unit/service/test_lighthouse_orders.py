"""What the controller orders of perdure's own lighthouse, over a bus in memory."""

import asyncio
from pathlib import Path

import pytest
from tests.fakes import FakeBus, FakeServer

from perdure.model.bus.wire import NodeOrder, subject_orders
from perdure.model.codec import encode
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import LIGHTHOUSE, HoldReplicas
from perdure.service.jobfiles import LighthouseFile, read_document
from perdure.service.lighthouse import IDS, LighthouseService


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
