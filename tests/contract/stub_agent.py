# ruff: noqa: ASYNC110
"""A stand-in for agent, keeper and ranks: `python stub_agent.py JOB NODE`. No torch.

A rank's arguments are how long it runs (seconds, or the path of a file that ends it) and its exit
code. SIGUSR1 makes the agent leave in good order. STUB_LEAVE_S is how long the end takes node 0.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import NodeOrder, subject_events, subject_orders
from perdure.model.codec import decode
from perdure.model.events import (
    GenerationStopped,
    NodeRegistered,
    RankExited,
    RanksStarted,
    StoreReady,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import RankAccount
from perdure.service.agent.outbox import Outbox
from perdure.service.jobfiles import load_endpoint, load_spec
from perdure.service.jobfolders import paths_of, resolve_home

RANK = """echo hello from $RANK of generation $GEN
case ${1:-0.3} in
/*) until [ -e $1 ]; do sleep 0.05; done ;;
*) sleep ${1:-0.3} ;;
esac
exit ${2:-0}"""


def start_rank(
    paths: JobPaths, spec: JobSpec, rank: int, generation: int
) -> subprocess.Popen[bytes]:
    path = paths.stream(generation, rank, "out")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as out:
        return subprocess.Popen(
            ["sh", "-c", RANK, "rank", *spec.args],
            stdout=out,
            start_new_session=True,
            env=dict(os.environ, RANK=str(rank), GEN=str(generation)),
        )


async def wait_rank(
    outbox: Outbox, now: Callable[[], float], node: int, rank: int, generation: int,
    process: subprocess.Popen[bytes],
) -> None:  # fmt: skip
    while process.poll() is None:
        await asyncio.sleep(0.01)
    code = process.returncode
    record = ExitRecord(
        rank=rank, generation=generation, pid=process.pid, at_s=now(),
        code=max(code, 0), signal=max(-code, 0),
    )  # fmt: skip
    outbox.put(RankExited(node=node, record=record, account=RankAccount(), detected_s=now()))


async def main(job: str, node: int) -> None:
    paths = paths_of(resolve_home(), job)
    spec, endpoint = load_spec(paths), load_endpoint(paths, f"agent-{node}")
    bus = await NatsBus.connect(endpoint)
    outbox = Outbox(bus, subject_events(job, node), node=node, source=f"a{node}-{os.getpid()}")
    sender = asyncio.create_task(outbox.run())
    orders: asyncio.Queue[NodeOrder] = asyncio.Queue()
    for name in (node, "all"):
        await bus.subscribe(
            subject_orders(job, name), lambda data: orders.put_nowait(decode(data, NodeOrder))
        )
    now = lambda: time.monotonic() + endpoint.clock_offset_s  # noqa: E731

    def hello() -> NodeRegistered:
        return NodeRegistered(
            node=node,
            incarnation=f"a{node}-{os.getpid()}",
            host="h",
            boot_id="b",
            slots=spec.nproc,
            generation=generation,
            running=tuple(ranks),
        )

    ranks: dict[int, subprocess.Popen[bytes]] = {}
    generation = -1
    outbox.put(hello())
    number = -1

    waits = []
    while True:
        order = await orders.get()
        if order.register:
            outbox.put(hello())
        wanted = order.assignment
        if wanted is None or wanted.number <= number:
            continue
        number = wanted.number
        if wanted.phase in ("store", "end"):
            for process in ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if wanted.phase == "end" and node == 0:
                await asyncio.sleep(float(os.environ.get("STUB_LEAVE_S", "0")))
            stopped = GenerationStopped(node=node, generation=wanted.generation - 1, at_s=now())
            outbox.put(stopped)
        if wanted.phase == "store":
            outbox.put(
                StoreReady(generation=wanted.generation, host="127.0.0.1", port=1, agent_store=True)
            )
        if wanted.phase == "run":
            generation = wanted.generation
            for rank in spec.ranks_of(node):
                ranks[rank] = start_rank(paths, spec, rank, wanted.generation)
                waits.append(
                    asyncio.create_task(
                        wait_rank(outbox, now, node, rank, wanted.generation, ranks[rank])
                    )
                )
            pids = {rank: process.pid for rank, process in ranks.items()}
            outbox.put(
                RanksStarted(
                    node=node, generation=wanted.generation, pids=pids, at_s=now(), warm=False
                )
            )
        if wanted.phase == "end":
            await outbox.flush(3)
            sender.cancel()
            await bus.close()
            return


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
