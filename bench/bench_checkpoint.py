"""A checkpoint of at least 500 MB of state: stall and added wall time against synchronous saves.

One rank; forward and backward are a paced virtual device (a sleep), the optimizer's step is real.
Beside it in the same run: torch.save to the same disk with fsync, and torch's own
distributed-checkpoint save, both on the training thread. Prints one JSON document.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from perdure.model.events import CheckpointFailed, CheckpointSaved
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer

Rows = dict[str, list[tuple[list[float], float]]]
"""By kind of save: blocks of (wall seconds of each step, seconds training stood still)."""


def sum_up(events: list[object], rows: Rows) -> dict[str, object]:
    """Return the figures from (wall, stall) of every block."""
    failed = [event for event in events if isinstance(event, CheckpointFailed)]
    assert not failed, failed
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    # Medians of each step of a block, then their sum: one disturbed step spoils nothing.
    wall = {
        name: sum(statistics.median(at) for at in zip(*(walls for walls, _ in block), strict=True))
        for name, block in rows.items()
    }
    sync = statistics.median(stall for _, stall in rows["torch.save"])
    stall = statistics.median(stall for _, stall in rows["perdure"])
    base = (wall["none"] + wall["none again"]) / 2
    added = wall["perdure"] - base
    sync_added = wall["torch.save"] - base
    spread = abs(wall["none"] - wall["none again"])
    return {
        "state_mb": round(saved[-1].bytes / 1e6),
        "saves": len(rows["perdure"]),
        "torch.save + fsync, s": round(sync, 3),
        "dcp.save, s": round(statistics.median(stall for _, stall in rows["dcp.save"]), 3),
        "perdure stall, s": round(stall, 4),
        "perdure stall / torch.save": round(stall / sync, 4),
        "perdure added wall, s": round(added, 3),
        "perdure added wall / torch.save stall": round(added / sync, 3),
        "torch.save added wall, s": round(sync_added, 3),
        "perdure added wall / torch.save added wall": round(added / sync_added, 3),
        "A/A difference of a block, s": round(spread, 3),
        "added wall resolved": abs(added) > spread,
        "perdure snapshot to tag, s": round(statistics.median(e.save_s for e in saved[1:]), 2),
    }


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=44_000_000)
    parser.add_argument("--pace-s", type=float, default=0.4)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--steps-between", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    """Measure."""
    args = parse_args()
    width = 1024
    layers = args.parameters // (width * width)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        time.sleep(args.pace_s)  # the virtual device's forward and backward
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
        optimizer.step()

    events: list[object] = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Checkpointer(
            url=os.path.join(folder, "perdure"),
            config=CheckpointConfig(keep_last=1),
            rank=0, world_size=1, generation=0,
            emit=events.append, now=time.monotonic,
        )  # fmt: skip
        saver.register("model", model)
        saver.register("optimizer", optimizer)
        counter = iter(range(1, 1000))

        def perdure() -> float:
            return saver.save(next(counter), reason="bench", extra={})

        def torch_save() -> float:
            begun = time.perf_counter()
            path = Path(folder) / "plain.pt"
            with open(path, "wb") as file:
                torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
            return time.perf_counter() - begun

        def dcp_save() -> float:
            begun = time.perf_counter()
            state = {"m": model.state_dict(), "o": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=os.path.join(folder, "dcp"), no_dist=True)
            return time.perf_counter() - begun

        def block(save: Callable[[], float] | None) -> tuple[list[float], float]:
            """Return (wall seconds of each step, seconds training stood still for the save)."""
            gate, stall, walls = saver.gate_s, 0.0, []
            for number in range(args.steps_between):
                begun = time.perf_counter()
                if number == 0 and save is not None:
                    stall = save()
                step()
                walls.append(time.perf_counter() - begun)
            saver.close()
            return walls, stall + saver.gate_s - gate

        for _ in range(3):
            step()
        perdure()  # the first one allocates its buffers
        saver.close()
        kinds: dict[str, Callable[[], float] | None] = {
            "none": None, "none again": None,
            "perdure": perdure, "torch.save": torch_save, "dcp.save": dcp_save,
        }  # fmt: skip
        rows: Rows = {name: [] for name in kinds}
        for _ in range(args.saves):
            for name, save in kinds.items():
                rows[name].append(block(save))
    print(json.dumps(sum_up(events, rows)))


if __name__ == "__main__":
    main()
