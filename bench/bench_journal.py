"""How long a controller takes to know again what its journal knows, with a snapshot and without.

A real nats-server holds a journal like that of weeks: generations of `--ranks` ranks that note
their progress every five seconds, checkpoint by agreement every minute, log metrics, crash now
and then, and see parts of perdure die. The journal ends just before the next snapshot would be
due, which is the worst case. Prints one JSON document.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from sweep import sweep_after_me

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.control.memory import Memory, encode_memory
from perdure.model.bus.wire import Endpoint
from perdure.model.chain import FIRST, EntryReader, seal
from perdure.model.codec import decode, encode
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointSaved,
    ControllerLost,
    ControllerStarted,
    Decision,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    JournalEntry,
    MetricsLogged,
    NodeRegistered,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksStarted,
    StoreReady,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, RestartConfig
from perdure.model.signals.progress import RankAccount
from perdure.service.controller.journal import Journal, Mirror
from perdure.service.controller.loop import ControllerService
from perdure.service.controller.snapshots import EVERY, SnapshotFiles
from perdure.service.jobfiles import parse_journal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes import FakeBus, FakeStream
from tests.simulator.network import VirtualClock

GROUP = 3
"""Entries a group: what one turn of the controller's loop brings about, on the average."""
STEP_S = 0.1


def tell(spec: JobSpec, clock: VirtualClock) -> Iterator[list[AnyEvent | Decision]]:
    """Yield what happens, for ever, at most a few events at a time."""
    ranks = range(spec.world_size)
    yield [JobSubmitted(spec=spec, at_s=clock.now), ControllerStarted(incarnation="c1")]
    yield [NodeRegistered(node=0, incarnation="a1", host="h", boot_id="b", slots=spec.nproc)]
    generation, step = 0, 0
    while True:
        yield [
            GenerationStopped(node=0, generation=generation - 1, at_s=clock.now),
            StoreReady(generation=generation, host="127.0.0.1", port=1, agent_store=True),
        ]
        began_s, start = clock.now, step
        pids = {rank: 1000 + rank for rank in ranks}
        yield [RanksStarted(node=0, generation=generation, pids=pids, at_s=began_s, warm=True)]
        yield [RankJoined(generation=generation, rank=rank, start_step=step) for rank in ranks]
        yield [GenerationStepping(generation=generation, at_s=clock.now, step=step)]
        for number in range(4 * 3600 // 5):  # A failure every four hours.
            clock.now += 5.0
            step += int(5.0 / STEP_S)
            account = RankAccount(
                start_step=start, step=step, step_s=STEP_S * (step - start), spawned_s=began_s,
                script_s=began_s, init_s=began_s, group_s=began_s, restored_s=began_s,
                first_step_s=began_s, last_step_s=clock.now,
            )  # fmt: skip
            accounts = dict.fromkeys(ranks, account)
            yield [
                ProgressNoted(generation=generation, at_s=clock.now, step=step, accounts=accounts)
            ]
            rows = ((step, {"loss": 1.0 / step, "lr": 0.1}),)
            yield [MetricsLogged(generation=generation, rows=rows)]
            if number % 12 == 11:
                yield from checkpoint(ranks, generation, number, step, clock.now)
            if number % 720 == 719:
                lost = ControllerLost(
                    part="agent 0", at_s=clock.now, pid=9, cause="signal 9", restarted_s=clock.now
                )
                yield [lost]
        record = ExitRecord(rank=0, generation=generation, pid=1000, at_s=clock.now, signal=9)
        yield [RankExited(node=0, record=record, account=account, detected_s=clock.now)]
        yield [Decision(action="AssignNodes", summary="store", reason="rank 0: signal 9")]
        generation += 1


def checkpoint(
    ranks: range, generation: int, number: int, step: int, now: float
) -> Iterator[list[AnyEvent | Decision]]:
    """Yield one agreement and what it saved."""
    id_ = f"b{number}.1"
    yield [Decision(action="SendBoundary", summary="prepare", reason="the interval has passed")]
    yield [BoundaryAnswered(id=id_, rank=rank, ok=True, step=step) for rank in ranks]
    yield [Decision(action="SendBoundary", summary="commit", reason="all ranks agreed")]
    yield [BoundaryReached(id=id_, rank=rank, step=step, at_s=now) for rank in ranks]
    saved = CheckpointSaved(
        generation=generation, step=step, path=f"checkpoints/step-{step:08d}", bytes=500_000_000,
        stall_s=0.01, save_s=1.0, at_s=now,
    )  # fmt: skip
    yield [saved]


async def fill(stream: NatsStream, spec: JobSpec, events: int) -> tuple[int, int, float]:
    """Write the journal; return entries, bytes, and the seconds that it tells of."""
    clock = VirtualClock()
    began_s, entries, size, groups = clock.now, 0, 0, 0
    waiting: list[bytes] = []
    hash_ = FIRST
    for bodies in tell(spec, clock):
        for body in bodies:
            entries += 1
            source = "" if isinstance(body, Decision) else "a1"
            entry = JournalEntry(entries, clock.now, body, source, entries if source else 0)
            line, hash_ = seal(encode(entry), hash_)
            waiting.append(line)
        if len(waiting) >= GROUP or entries >= events:
            data = b"".join(waiting)
            groups += 1
            await stream.append(data, expected_last=groups - 1, message_id=f"g{groups}")
            size += len(data)
            waiting.clear()
        if entries >= events:
            break
    return entries, size, clock.now - began_s


def make_service(
    spec: JobSpec, stream: NatsStream, folder: Path, *, snapshots: bool = True
) -> ControllerService:
    """Return a controller as a new process makes it."""
    return ControllerService(
        spec,
        FakeBus(),
        Journal(stream, writer="bench", mirror=Mirror(str(folder / "copy.jsonl"))),
        clock=time.monotonic,
        incarnation="bench",
        submitted_s=0.0,
        show=lambda snapshot: None,
        snapshots=SnapshotFiles(str(folder / "snapshots")) if snapshots else None,
    )


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[NatsServer]:
    """Give a nats-server of its own, which keeps its store below `folder`."""
    server = NatsServer(folder=str(folder / "nats"), token="bench", name="bench")
    (folder / "nats").mkdir()
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(server.command(), stdout=nowhere, stderr=nowhere)
    try:
        server.wait_ready()
        yield server
    finally:
        process.kill()
        process.wait()


def measure_sealing(spec: JobSpec, count: int = 50_000) -> dict[str, float]:
    """Return what the chain adds to an entry that is written and to one that is read."""
    clock, bodies = VirtualClock(), list[AnyEvent | Decision]()
    for told in tell(spec, clock):
        bodies += told
        if len(bodies) >= count:
            break
    entries = [JournalEntry(n, 1.0, body) for n, body in enumerate(bodies, 1)]
    best: dict[str, float] = {}
    for _ in range(5):
        hash_, lines = FIRST, list[bytes]()
        begun = time.perf_counter()
        plain = [encode(entry) for entry in entries]
        encoded = time.perf_counter()
        for data in plain:
            line, hash_ = seal(data, hash_)
            lines.append(line)
        sealed = time.perf_counter()
        for line in lines:
            decode(line, JournalEntry)
        decoded = time.perf_counter()
        assert sum(1 for _ in EntryReader(lines)) == len(lines)
        read = time.perf_counter()
        took = {
            "encode": encoded - begun,
            "seal": sealed - encoded,
            "decode": decoded - sealed,
            "read and check": read - decoded,
        }
        best = {name: min(s, best.get(name, s)) for name, s in took.items()}
    size = sum(map(len, lines)) / sum(len(data) + 1 for data in plain)
    us = {f"{name}, us an entry": round(1e6 * s / len(entries), 2) for name, s in best.items()}
    return us | {"bytes by the chain, %": round(100 * (size - 1), 1)}


async def measure(server: NatsServer, folder: Path, events: int, ranks: int) -> dict[str, Any]:
    """Fill a journal, then replay it both ways."""
    spec = JobSpec(
        name="bench", script="x.py", nproc=ranks,
        restart=RestartConfig(max_restarts=10**6, window_max=10**6, same_fault_max=10**6),
    )  # fmt: skip
    bus = await NatsBus.connect(Endpoint(server.url, server.token, 0.0), timeout_s=10)
    stream = await NatsStream.open(bus, spec.name)
    before = events - EVERY + 1
    entries, size, told_s = await fill(stream, spec, events)

    full = make_service(spec, stream, folder)
    full_s, full_cpu_s = await timed(full._remember())

    files = SnapshotFiles(str(folder / "snapshots"))
    memory, journal = await replay_until(spec, stream, folder, before)
    begun = time.perf_counter()
    seq, data = files.render(memory, journal.position())
    render_s = time.perf_counter() - begun
    files.write(seq, data)

    quick = make_service(spec, stream, folder)
    quick_s, quick_cpu_s = await timed(quick._remember())
    mirror_s, _ = await timed(quick._journal.settle())
    assert encode_memory(quick._memory) == encode_memory(full._memory)
    assert (folder / "copy.jsonl").stat().st_size == size
    await bus.close()
    days = told_s / 86400
    return {
        **measure_sealing(spec),
        "events": entries,
        "ranks": ranks,
        "days that they tell of": round(days, 1),
        "events a day": round(entries / days),
        "bytes an event": round(size / entries),
        "journal MB a day": round(size / days / 1e6, 1),
        "replay without a snapshot, s": round(full_s, 2),
        "of this process, CPU s": round(full_cpu_s, 2),
        "replay with one, s": round(quick_s, 3),
        "of this process with one, CPU s": round(quick_cpu_s, 3),
        "events after the snapshot": entries - seq,
        "mirror verified beside it, s": round(mirror_s, 2),
        "snapshot kB": round(len(data) / 1e3, 1),
        "snapshot rendered in ms": round(1e3 * render_s, 1),
    }


async def timed(work: Awaitable[None]) -> tuple[float, float]:
    """Return the seconds that `work` takes, by the clock and of this process's CPU."""
    begun, cpu_s = time.perf_counter(), time.process_time()
    await work
    return time.perf_counter() - begun, time.process_time() - cpu_s


async def replay_until(
    spec: JobSpec, stream: NatsStream, folder: Path, entries: int
) -> tuple[Memory, Journal]:
    """Return what a controller knew at about entry `entries`, and its journal there."""
    memory, groups = Memory(spec), FakeStream()
    for data in await stream.read_all():
        groups.messages.append(data)
        for entry in parse_journal(data.splitlines(keepends=True)):
            memory.replay(entry)
        if memory.seq >= entries:
            break
    journal = Journal(groups, writer="bench", mirror=Mirror(str(folder / "part.jsonl")))
    await journal.open()
    return memory, journal


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=240_000)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="perdure-journal-"))
    try:
        with serve(folder) as server:
            result = asyncio.run(measure(server, folder, args.events, args.ranks))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    sweep_after_me()
    main()
