# ruff: noqa: ASYNC220, ASYNC240
"""A real agent and a real keeper under a driver that plays the controller over real NATS."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from perdure.failpoints import SWITCH
from perdure.model.events import (
    FaultInjected,
    GenerationStopped,
    KeeperLost,
    NodeRegistered,
    RankExited,
    RanksStarted,
    StacksTaken,
    StoreReady,
)
from perdure.model.orders import Assignment, InjectFault, TakeStacks
from perdure.model.steering import Steering
from tests.e2e.agent_driver import Driver, until
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.torch


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Driver]:
    """Return a node without an image. `test_interrupt` has ranks that come from one."""
    driver = Driver(tmp_path, cold=True)
    try:
        await driver.start()
        yield driver
    finally:
        await driver.close()


def is_alive(pid: int) -> bool:
    """Return whether a process runs: a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_life(driver: Driver) -> None:
    hello = await driver.wait(NodeRegistered)
    assert (hello.node, hello.slots, hello.generation, hello.running) == (0, 2, -1, ())
    started = await driver.form(0)
    assert sorted(started.pids) == [0, 1]
    text = Path(driver.paths.stream(0, 1, "out"))
    await until(lambda: text.exists() and text.read_text())
    store = await driver.wait(StoreReady)
    assert text.read_text() == f"rank 1 port {store.port}\n"

    await until(lambda: driver.beats and len(driver.beats[-1].ranks) == 2)
    assert driver.beats[-1].generation == 0
    assert all(rank.proc.rss_bytes > 1 << 20 for rank in driver.beats[-1].ranks)

    os.kill(started.pids[1], signal.SIGKILL)
    exit_ = await driver.wait(RankExited)
    assert (exit_.record.rank, exit_.record.signal, exit_.record.asked) == (1, 9, False)
    assert exit_.account.spawned_s > 0

    # The same generation is never started twice; the next one is, after the old one is gone.
    await driver.order(
        assignment=Assignment(number=driver.number, generation=0, phase="run", reason="again")
    )
    second = await driver.form(1)
    assert set(second.pids.values()).isdisjoint(started.pids.values())
    other = await driver.wait(RankExited, lambda e: e.record.rank == 0)
    assert other.record.asked
    assert sum(isinstance(event, RanksStarted) for event in driver.events) == 2

    assert await driver.end(1) == 0
    assert driver.leftovers() == []


async def test_agent_is_replaced(driver: Driver) -> None:
    started = await driver.form(0)
    driver.kill_agent()
    os.kill(started.pids[1], signal.SIGKILL)  # While nobody looks.
    after = len(driver.events)
    driver.start_agent()
    hello = await driver.wait(NodeRegistered, after=after)
    assert (hello.generation, hello.running) == (0, (0,))
    exit_ = await driver.wait(RankExited, after=after)
    assert (exit_.record.rank, exit_.record.signal) == (1, 9)
    await driver.order(
        assignment=Assignment(number=driver.number, generation=0, phase="run", reason="again")
    )
    again = await driver.wait(RanksStarted, after=after)
    assert again.pids == {0: started.pids[0]}
    await driver.form(1)
    assert await driver.end(1) == 0
    assert driver.leftovers() == []


async def test_keeper_is_lost(driver: Driver) -> None:
    hello = await driver.wait(NodeRegistered)
    started = await driver.form(0)
    os.kill(hello.keeper_pid, signal.SIGKILL)
    lost = await driver.wait(KeeperLost)
    assert lost.generation == 0
    ends = [event for event in driver.events if isinstance(event, RankExited)]
    assert [(e.record.rank, e.record.asked, e.account.spawned_s > 0) for e in ends] == [
        (0, True, True),
        (1, True, True),
    ]
    for pid in started.pids.values():
        assert not is_alive(pid)
    second = await driver.form(1)
    assert sorted(second.pids) == [0, 1]
    assert await driver.end(1) == 0
    assert driver.leftovers() == []


async def test_agent_and_keeper_are_lost_together(driver: Driver) -> None:
    hello = await driver.wait(NodeRegistered)
    await driver.form(0)
    driver.kill_agent()
    os.kill(hello.keeper_pid, signal.SIGKILL)
    after = len(driver.events)
    driver.start_agent()
    hello = await driver.wait(NodeRegistered, after=after)
    assert (hello.generation, hello.running) == (-1, ())
    await driver.order(
        assignment=Assignment(number=driver.number, generation=0, phase="run", reason="again")
    )
    lost = await driver.wait(KeeperLost, after=after)
    assert lost.generation == 0
    assert len([e for e in driver.events[after:] if isinstance(e, RankExited)]) == 2
    assert await driver.end(0) == 0
    assert driver.leftovers() == []


async def test_faults_and_stacks(driver: Driver) -> None:
    await driver.form(0)
    outputs = [Path(driver.paths.stream(0, rank, "out")) for rank in (0, 1)]
    await until(lambda: all(path.exists() and path.stat().st_size for path in outputs))
    fault = InjectFault(id="f1", generation=0, rank=1, kind="stop", reason="test")
    await driver.order(fault)
    await driver.order(fault)
    done = await driver.wait(FaultInjected)
    assert (done.id, done.error) == ("f1", "")
    await until(
        lambda: any(r.proc.state == "T" for b in driver.beats for r in b.ranks if r.rank == 1)
    )
    await driver.order(TakeStacks(generation=0, ranks=(0, 1), reason="test"))
    taken = await driver.wait(StacksTaken)
    for rank in (0, 1):
        assert "train.py" in taken.stacks[rank] or "no stack" in taken.stacks[rank]
    await driver.order(InjectFault(id="f2", generation=0, rank=0, kind="crash", reason=""))
    exit_ = await driver.wait(RankExited)
    assert (exit_.record.rank, exit_.record.signal) == (0, 9)
    assert sum(isinstance(event, FaultInjected) for event in driver.events) == 2
    assert await driver.end(0) == 0
    assert driver.leftovers() == []


async def test_nothing_survives_perdure_run(tmp_path: Path) -> None:
    boss = subprocess.Popen(["sleep", "infinity"])
    driver = Driver(tmp_path, run_pid=boss.pid, cold=True)
    try:
        await driver.start()
        await driver.form(0)
        boss.kill()
        boss.wait()
        await driver.wait(GenerationStopped, lambda e: e.generation == 0)
        assert driver.agent is not None
        assert await asyncio.to_thread(driver.agent.wait, PATIENCE_S) == 0
        assert driver.leftovers() == []
    finally:
        boss.kill()
        boss.wait()
        await driver.close()


async def test_ranks_are_started_once_a_full_disk_has_room_for_their_settings(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent ended with the first refusal, and so did each one after it: then the job."""
    driver.kill_agent()
    monkeypatch.setenv(SWITCH, "file/write=error(ENOSPC),about=g0-n0.json,times=2")
    driver.start_agent()
    started = await driver.form(0, steering=Steering(heals=True))
    assert sorted(started.pids) == [0, 1]
    assert driver.agent is not None
    assert driver.agent.poll() is None
    assert Path(driver.paths.steering(0, 0)).exists()
    assert "No space left on device" in Path(driver.paths.log("agent-0")).read_text()
    assert await driver.end(0) == 0
