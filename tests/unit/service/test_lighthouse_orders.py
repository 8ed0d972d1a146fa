"""What the controller orders of perdure's own lighthouse, over a bus in memory."""

import asyncio
from pathlib import Path

from tests.fakes import FakeBus, FakeServer

from perdure.model.bus.wire import NodeOrder, subject_orders
from perdure.model.codec import encode
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import LIGHTHOUSE, HoldReplicas
from perdure.service.lighthouse import LighthouseService


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
