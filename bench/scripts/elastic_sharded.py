"""A sharded elastic training with a given size of state; a line for each step of each rank."""

import argparse
import json
import os
import time

import torch
from torch import Tensor, nn

import perdure.elastic

WIDTH = 1024
BYTES = 12
"""A parameter and its two moments."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trail")
    parser.add_argument("--megabytes", type=int, default=100, help="of parameters and moments")
    parser.add_argument("--shard", default="full")
    parser.add_argument("--every", type=int, default=5, help="steps from snapshot to snapshot")
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    os.makedirs(args.trail, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = max(2, round(args.megabytes * 1e6 / (BYTES * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def compute(model: nn.Module, step: int, micro_batch: int) -> Tensor:
        output: Tensor = model(torch.randn(4, WIDTH))
        return output.square().mean()

    trainer = perdure.elastic.open_sharded_trainer(
        model,
        lambda params: torch.optim.AdamW(params, lr=1e-6),
        compute,
        shard=args.shard if args.shard == "full" else int(args.shard),
        micro_batches=4,
        snapshot_every=args.every,
    )
    me = os.environ.get("PERDURE_MEMBER", "") or os.environ.get("RANK", "0")
    with open(f"{args.trail}/rank-{me}.jsonl", "a", buffering=1) as out:
        for step in trainer.steps(args.steps):
            row = {"step": step.step, "at": time.monotonic(), "world": step.world}
            row["stall"] = trainer.state.snapshots.stall_s
            row["copied"] = trainer.state.snapshots.newest_s
            out.write(json.dumps(row) + "\n")


main()
