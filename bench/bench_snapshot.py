"""What a picture of a large job costs its controller: CPU of the fold, and of writing it as JSON.

usage: bench_snapshot.py [RANKS] [LOOKS]

A job of RANKS ranks (10,000) on nodes of 8, all training, whose nodes send heartbeats; a picture
is made LOOKS times (20) after all, half, and none of the nodes have sent another one (a controller
makes two a second: half is what heartbeats at 1 Hz make of it). `scratch` is a fold that has kept
nothing. CPU time, median of the looks.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

from perdure.model.codec import encode
from perdure.model.events import (
    GenerationStepping,
    JobSubmitted,
    JournalEntry,
    NodeRegistered,
    RanksStarted,
)
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)
from perdure.telemetry.live.snapshot import SnapshotFold

NPROC = 8


def make_beat(node: int, step: int, now: float) -> NodeBeat:
    account = RankAccount(step=step, init_s=1.0, first_step_s=1.0, last_step_s=now - 0.05)
    comms = (CommProgress("dp", 10_000, step, step, "allreduce", now - 0.02),)
    ranks = tuple(
        RankProgress(
            rank, 1000 + rank, "step", 1.0, now, account, comms,
            ProcSample("R", step * 0.1, 0, 1 << 30),
        )
        for rank in range(node * NPROC, node * NPROC + NPROC)
    )  # fmt: skip
    return NodeBeat(node, "a", step, now, 0, ranks)


def make_fold(spec: JobSpec) -> SnapshotFold:
    fold = SnapshotFold(spec)
    bodies = [
        JobSubmitted(spec=spec, at_s=0.0),
        *(
            NodeRegistered(
                node=node, incarnation="a", host="h", boot_id="b", slots=NPROC,
                device_ids=tuple(f"cpu-{node}-{slot}" for slot in range(NPROC)),
            )
            for node in range(spec.nodes)
        ),
        *(
            RanksStarted(
                node=node, generation=0, at_s=1.0, warm=True,
                pids={r: 1000 + r for r in range(node * NPROC, node * NPROC + NPROC)},
            )
            for node in range(spec.nodes)
        ),
        GenerationStepping(generation=0, at_s=2.0),
    ]  # fmt: skip
    for seq, body in enumerate(bodies, start=1):
        fold.add(JournalEntry(seq=seq, at_s=2.0, body=body))
    return fold


def cost_ms(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    looks = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    spec = JobSpec(name="big", script="x.py", nproc=NPROC, nodes=max(1, ranks // NPROC))
    fold, step = make_fold(spec), 1
    pictures: list[Snapshot] = []
    costs: dict[str, list[float]] = {}

    def look() -> None:
        pictures[:] = [fold.snapshot(100.0 + step)]

    for name, part in (("all", 1), ("half", 2), ("none", 0)):
        for _ in range(looks + 1):
            step += 1
            nodes = range(step % part, spec.nodes, part) if part else range(0)
            beats = [make_beat(node, step, 100.0 + step) for node in nodes]
            observe = cost_ms(lambda beats=beats: [fold.take_beat(0.0, beat) for beat in beats])
            if part == 1:
                costs.setdefault("heartbeats_all", []).append(observe)
            costs.setdefault(f"picture_{name}", []).append(cost_ms(look))
    costs["json"] = [cost_ms(lambda: encode(pictures[0])) for _ in range(looks)]
    costs["scratch"] = []
    for _ in range(3):
        fresh = make_fold(spec)
        for node in range(spec.nodes):
            fresh.take_beat(0.0, make_beat(node, step, 100.0 + step))
        costs["scratch"].append(cost_ms(lambda fresh=fresh: fresh.snapshot(100.0 + step)))
    result: dict[str, object] = {
        f"{name}_ms": round(statistics.median(values[1:]), 1) for name, values in costs.items()
    }
    result |= {"ranks": spec.world_size, "bytes": len(encode(pictures[0]))}
    print(json.dumps(result | {"load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
