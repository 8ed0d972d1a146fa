"""How soon a killed rank runs again, and how soon a peer leaves the collective that it waits in."""

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

from bench.gates.gate import Gate
from tests.e2e.agent_driver import Driver, until
from tests.e2e.node import Node

from perdure.model.bus.wire import KeeperKill, KeeperStopped
from perdure.model.events import CollectivesInterrupted
from perdure.model.orders import InterruptCollectives

NOTING = """\
import json, os, time
with open(os.environ["TRAIL"], "a") as file:
    file.write(json.dumps(["first", time.monotonic()]) + "\\n")
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
"""
REDUCING = """\
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(10))
    print("one", flush=True)
    time.sleep(0.05)
"""


def measure_warm_start() -> float:
    """Return the seconds from the order to start two ranks to the later first line of them.

    It is the second generation. In the first one, rank 1 was killed.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        node = Node(Path(folder))
        try:
            script = node.script(NOTING)
            node.wait_warm()
            node.serve_store(0, 2)
            spawned = node.spawn(0, script, world=2)
            node.wait_trail(2)
            os.kill(spawned.pids[1], signal.SIGKILL)
            node.ended(0, 1)
            node.ask(KeeperKill(0))
            node.expect(KeeperStopped, generation=0)
            node.serve_store(1, 2)
            began_s = time.monotonic()
            spawned = node.spawn(1, script, world=2)
            assert spawned.warm, spawned.why_cold
            return max(at_s for _, at_s in node.wait_trail(4)[2:]) - began_s
        finally:
            node.end()


async def interrupt(folder: Path) -> float:
    """Return the seconds from the order until the collective with a stopped peer is broken."""
    driver = Driver(folder)
    (folder / "train.py").write_text(REDUCING)
    try:
        await driver.start()
        started = await driver.form(0)
        out = Path(driver.paths.stream(0, 0, "out"))
        await until(lambda: out.exists() and out.read_text().count("one") > 3)
        os.kill(started.pids[1], signal.SIGSTOP)
        await asyncio.sleep(0.3)
        began_s = time.monotonic()
        await driver.order(InterruptCollectives(generation=0, ranks=(0, 1), reason="hung"))
        return (await driver.wait(CollectivesInterrupted)).at_s - began_s
    finally:
        await driver.close()


def measure_interrupt() -> float:
    """Return what `interrupt` finds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return asyncio.run(interrupt(Path(folder)))


GATES = (
    Gate("warm-start", "s", 0.3, measure_warm_start),
    Gate("collective-interrupt", "s", 0.5, measure_interrupt),
)
