"""Orders about collectives, all the way: controller's order, agent, rank's control thread."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.model.events import CollectivesInterrupted, RankExited, StacksTaken
from perdure.model.orders import InterruptCollectives, TakeStacks
from tests.e2e.test_agent import Driver, until

pytestmark = [pytest.mark.serial, pytest.mark.torch, pytest.mark.timeout(120)]

SCRIPT = """\
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(10))
    print("one", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Driver]:
    driver = Driver(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    try:
        await driver.start()
        yield driver
    finally:
        await driver.close()


async def test_unmodified_script_is_traced_and_its_collective_broken(driver: Driver) -> None:
    started = await driver.form(0)
    out = Path(driver.paths.stream(0, 0, "out"))
    await until(lambda: out.exists() and out.read_text().count("one") > 3)
    os.kill(started.pids[1], signal.SIGSTOP)
    await asyncio.sleep(0.3)

    await driver.order(TakeStacks(generation=0, ranks=(0, 1), reason="suspected"))
    taken = await driver.wait(StacksTaken)
    assert taken.traces == driver.paths.traces(0)
    traces = Path(taken.traces, "gloo")
    await until((traces / "rank_0").exists)
    assert not (traces / "rank_1").exists()

    sent_s = time.monotonic()
    await driver.order(InterruptCollectives(generation=0, ranks=(0, 1), reason="hung"))
    event = await driver.wait(CollectivesInterrupted)
    print(f"interrupted {(event.at_s - sent_s) * 1e3:.1f} ms after the order")
    assert (event.rank, event.sockets, event.error) == (0, 1, "")
    assert event.at_s - sent_s < 0.5
    exit_ = await driver.wait(RankExited)
    assert (exit_.record.rank, exit_.record.code) == (0, 1)
    assert exit_.record.error.startswith("RuntimeError")
    assert exit_.record.lost_peer
    assert await driver.end(0) == 0
