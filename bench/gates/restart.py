"""How soon a killed rank runs again."""

import os
import signal
import tempfile
import time
from pathlib import Path

from bench.gates.gate import Gate
from tests.e2e.node import Node

from perdure.model.bus.wire import KeeperKill, KeeperStopped

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


GATES = (Gate("warm-start", "s", 0.3, measure_warm_start),)
