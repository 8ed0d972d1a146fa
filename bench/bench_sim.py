"""10,000 simulated ranks: heartbeats a second that detector and snapshot take, and decisions.

1,250 nodes of 8 ranks. Beats are made once and sent again with moved times, so that what is
measured is the controller's work and not the making. Prints one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import msgspec

from perdure.control.machine import Controller
from perdure.detect.detector import Detector
from perdure.model.codec import decode, encode
from perdure.model.events import (
    ControllerStarted,
    GenerationStopped,
    JobSubmitted,
    NodeRegistered,
    RankExited,
    RanksStarted,
    StoreReady,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)
from perdure.telemetry.live.snapshot import SnapshotFold


def make_beat(node: int, nproc: int, world: int, now: float, step: int) -> NodeBeat:
    """Return one node's heartbeat at step `step`."""
    account = RankAccount(
        step=step, step_s=0.9 * step, spawned_s=1.0, script_s=1.1, init_s=1.2, group_s=1.3,
        restored_s=1.4, first_step_s=1.5, last_step_s=now,
    )  # fmt: skip
    rows = tuple(
        RankProgress(
            rank=node * nproc + i,
            pid=1000 + i,
            phase="step",
            phase_since_s=now,
            heartbeat_s=now,
            account=account,
            comms=(CommProgress("0", world, 10 * step, 10 * step, "allreduce", now),),
            proc=ProcSample("R", 1.0 * step, 0, 1 << 28, 12),
        )
        for i in range(nproc)
    )
    return NodeBeat(node, f"a{node}", step + 1, now, 0, rows)


def time_decisions(do: Callable[[float, object], float], nodes: int, now: float) -> list[float]:
    """Return how long the machines take over the exit of a rank, five generations in a row."""
    delays = []
    for generation in range(5):
        record = ExitRecord(rank=77, generation=generation, pid=1, at_s=now, signal=9)
        account = RankAccount(step=100 + generation)
        delays.append(do(now, RankExited(node=9, record=record, account=account, detected_s=now)))
        for node in range(nodes):
            do(now, GenerationStopped(node=node, generation=generation, at_s=now))
        do(now, StoreReady(generation=generation + 1, host="h", port=1, agent_store=True))
        for node in range(nodes):
            started = RanksStarted(
                node=node, generation=generation + 1, pids={}, at_s=now, warm=True
            )
            do(now, started)
    return delays


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--seconds", type=int, default=10, help="virtual seconds at 1 Hz")
    args = parser.parse_args()
    nproc, nodes = 8, args.nodes
    spec = JobSpec(name="bench", script="x.py", nproc=nproc, nodes=nodes)
    controller, detector, fold = Controller(), Detector(spec), SnapshotFold(spec)
    start = 1_000_000.0

    def do(now: float, event: object) -> float:
        begun = time.perf_counter()
        controller.handle(now, event)  # type: ignore[arg-type]
        detector.note(now, event)  # type: ignore[arg-type]
        return time.perf_counter() - begun

    do(start, JobSubmitted(spec=spec, at_s=start))
    do(start, ControllerStarted(incarnation="c"))
    for node in range(nodes):
        do(start, NodeRegistered(node=node, incarnation=f"a{node}", host="h", boot_id="b", slots=8))
        do(start, GenerationStopped(node=node, generation=-1, at_s=start))
    do(start, StoreReady(generation=0, host="h", port=1, agent_store=True))
    for node in range(nodes):
        pids = {rank: rank for rank in spec.ranks_of(node)}
        do(start, RanksStarted(node=node, generation=0, pids=pids, at_s=start, warm=True))
    busy_s, decode_s, beats = 0.0, 0.0, 0
    for second in range(args.seconds):
        now = start + 2.0 + second
        wire = [
            encode(make_beat(node, nproc, nodes * nproc, now, second + 1)) for node in range(nodes)
        ]
        begun = time.perf_counter()
        parsed: list[NodeBeat] = [decode(data, NodeBeat) for data in wire]
        decode_s += time.perf_counter() - begun
        begun = time.perf_counter()
        for beat in parsed:
            fold.take_beat(now, beat)
            for event in detector.take_beat(now, beat):
                controller.handle(now, event)
        detector.tick(now)
        busy_s += time.perf_counter() - begun
        beats += nodes
    begun = time.perf_counter()
    snapshot = fold.snapshot(now)
    snapshot_s = time.perf_counter() - begun
    delays = time_decisions(do, nodes, now)
    rate = beats / (busy_s + decode_s)
    result = {
        "ranks": nodes * nproc,
        "node beats per s, one core": round(rate),
        "rank beats per s, one core": round(rate * nproc),
        "share of a core at 1 Hz": round(nodes / rate, 3),
        "of which decoding": round(decode_s / (busy_s + decode_s), 2),
        "snapshot_s": round(snapshot_s, 4),
        "snapshot bytes": len(msgspec.json.encode(snapshot)),
        "decision after an exit, median ms": round(statistics.median(delays) * 1e3, 2),
        "decision after an exit, max ms": round(max(delays) * 1e3, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
