# ruff: noqa: ASYNC110, ASYNC220, ASYNC230, ASYNC240
"""Runs a real agent and a real keeper, and plays the controller over real NATS."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from perdure.adapters.host import find_marked
from perdure.adapters.nats import NatsBus, NatsServer
from perdure.model.bus.wire import (
    Endpoint,
    EventAck,
    EventMessage,
    NodeOrder,
    subject_beats,
    subject_events,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.events import (
    AnyEvent,
    GenerationStopped,
    NodeRegistered,
    RanksStarted,
    StoreReady,
)
from perdure.model.job import JobSpec
from perdure.model.orders import AnyOrder, Assignment
from perdure.model.signals.progress import NodeBeat
from perdure.service.jobfiles import MINE, make_folders, write_document
from perdure.service.jobfolders import paths_of
from perdure.service.ports import Reply
from tests.waiting import PATIENCE_S

SCRIPT = """\
import os, time
print("rank", os.environ["RANK"], "port", os.environ["MASTER_PORT"], flush=True)
time.sleep(86_400)
"""
T = TypeVar("T")


class Driver:
    """Plays the controller: acknowledges every event, sends the newest assignment again."""

    def __init__(
        self, folder: Path, *, nproc: int = 2, run_pid: int = 0, cold: bool = False
    ) -> None:
        """Prepare a node: `cold` without an image of torch, which SCRIPT does not import."""
        self.folder, self.run_pid = folder, run_pid or os.getpid()
        self.home = str(folder / "home")
        self.job = f"agent-{os.getpid()}"
        self.paths = paths_of(self.home, self.job)
        (folder / "train.py").write_text(SCRIPT)
        self.spec = JobSpec(
            name=self.job, script="train.py", nproc=nproc, cwd=str(folder), cold=cold
        )
        self.server = NatsServer(folder=str(folder / "nats"), token="t0ken", sync="2m")
        self.events: list[AnyEvent] = []
        self.received_s: list[float] = []
        self.beats: list[NodeBeat] = []
        self.taken: dict[str, int] = {}
        self.number = 0
        self.agent_command = [sys.executable, "-P", "-m", "perdure", "agent", self.job, "0"]
        self.env: dict[str, str] = {}
        self.agent: subprocess.Popen[bytes] | None = None
        self.nats: subprocess.Popen[bytes] | None = None
        self.bus: NatsBus | None = None
        self.changed = asyncio.Event()

    async def start(self) -> None:
        make_folders(self.paths)
        with open(self.folder / "nats.log", "ab") as log:
            self.nats = subprocess.Popen(self.server.command(), stdout=log, stderr=log)
        await asyncio.to_thread(self.server.wait_ready, timeout_s=PATIENCE_S)
        endpoint = Endpoint(self.server.url, token="t0ken", clock_offset_s=0.0, speaks=MINE)
        write_document(self.paths.spec, self.spec)
        write_document(self.paths.credential("agent-0"), endpoint)
        self.bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
        await self.bus.serve(subject_events(self.job, 0), self._take)
        await self.bus.subscribe(
            subject_beats(self.job, 0), lambda data: self.beats.append(decode(data, NodeBeat))
        )
        self.start_agent()

    def start_agent(self) -> None:
        env = os.environ | self.env
        env |= {"PERDURE_HOME": self.home, "PERDURE_RUN_PID": str(self.run_pid)}
        with open(self.paths.log("agent-0"), "ab") as log:
            self.agent = subprocess.Popen(
                self.agent_command, env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def kill_agent(self) -> None:
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def _take(self, data: bytes, reply: Reply) -> None:
        message: EventMessage = decode(data, EventMessage)
        for batch in message.batches:
            for number, event in enumerate(batch.events, batch.first_seq):
                if number == self.taken.get(batch.source, 0) + 1:
                    self.taken[batch.source] = number
                    self.events.append(event)
                    self.received_s.append(time.monotonic())
        self.changed.set()
        ack = encode(EventAck(dict(self.taken)))
        self._task = asyncio.ensure_future(reply(ack))  # type: ignore[arg-type]

    async def order(self, *orders: AnyOrder, **fields: Any) -> None:
        assert self.bus is not None
        message = NodeOrder(controller="c1", orders=orders, **fields)
        await self.bus.publish(subject_orders(self.job, 0), encode(message))

    async def assign(
        self, generation: int, phase: Any, store: StoreReady | None = None, **fields: Any
    ) -> None:
        self.number += 1
        await self.order(
            assignment=Assignment(
                number=self.number,
                generation=generation,
                phase=phase,
                master_addr=store.host if store else "",
                master_port=store.port if store else 0,
                agent_store=store.agent_store if store else False,
                restart_count=generation,
                **fields,
            )
        )

    async def wait(
        self, type_: type[T], test: Callable[[T], bool] = lambda _: True, after: int = 0
    ) -> T:
        """Return the first such event from number `after` on; fails with the logs."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    for event in self.events[after:]:
                        if isinstance(event, type_) and test(event):
                            return event
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            logs = [p.read_text()[-3000:] for p in Path(self.paths.logs).glob("*.log")]
            seen = [type(event).__name__ for event in self.events]
            raise AssertionError("\n".join([f"no {type_.__name__}: {seen}", *logs])) from None

    async def form(self, generation: int, **fields: Any) -> RanksStarted:
        await self.wait(NodeRegistered)
        after = len(self.events)
        await self.assign(generation, "store")
        store = await self.wait(StoreReady, lambda e: e.generation == generation, after)
        if generation:
            await self.wait(GenerationStopped, lambda e: e.generation == generation - 1, after)
        await self.assign(generation, "run", store, **fields)
        return await self.wait(RanksStarted, lambda e: e.generation == generation, after)

    async def end(self, generation: int) -> int:
        after = len(self.events)
        await self.assign(generation + 1, "end")
        await self.wait(GenerationStopped, lambda e: e.generation == generation, after)
        assert self.agent is not None
        return await asyncio.to_thread(self.agent.wait, PATIENCE_S)

    def leftovers(self) -> list[int]:
        return sorted(find_marked({"PERDURE_HOME": self.home}))

    async def close(self) -> None:
        if self.bus is not None:
            await self.bus.close()
        for process in (self.agent, self.nats):
            if process is not None:
                process.kill()
                process.wait()
        for pid in self.leftovers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.05)
