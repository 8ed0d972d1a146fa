"""Orders about collectives, all the way: controller's order, agent, rank's control thread."""

from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from perdure.model.events import CollectivesInterrupted, RankExited, StacksTaken
from perdure.model.orders import InterruptCollectives, TakeStacks
from tests.e2e.test_agent import Driver, until

pytestmark = pytest.mark.torch

SCRIPT = """\
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    if os.path.exists("stop") and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    print("one", flush=True)
    dist.all_reduce(torch.ones(10))
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
    outs = [Path(driver.paths.stream(0, rank, "out")) for rank in (0, 1)]

    def count() -> list[int]:
        return [out.read_text().count("one") if out.exists() else 0 for out in outs]

    await until(lambda: count()[0] > 3)
    (driver.folder / "stop").touch()
    rank = psutil.Process(started.pids[1])
    await until(lambda: rank.status() == psutil.STATUS_STOPPED)
    await until(lambda: count()[0] == count()[1] + 1)  # Rank 0 waits for rank 1.

    await driver.order(TakeStacks(generation=0, ranks=(0, 1), reason="suspected"))
    taken = await driver.wait(StacksTaken)
    assert taken.traces == driver.paths.traces(0)
    traces = Path(taken.traces, "gloo")
    await until((traces / "rank_0").exists)
    assert not (traces / "rank_1").exists()

    # Without the order, the collective would end after half an hour, by gloo's own time-out.
    await driver.order(InterruptCollectives(generation=0, ranks=(0, 1), reason="hung"))
    event = await driver.wait(CollectivesInterrupted)
    assert (event.rank, event.sockets, event.error) == (0, 1, "")
    exit_ = await driver.wait(RankExited)
    assert (exit_.record.rank, exit_.record.code) == (0, 1)
    assert exit_.record.error.startswith("RuntimeError")
    assert exit_.record.lost_peer
    assert await driver.end(0) == 0
