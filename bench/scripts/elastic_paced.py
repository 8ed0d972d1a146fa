"""An elastic training with real tensors and collectives whose micro-batches take 2 ms."""

import json
import os
import sys
import time

import torch
from torch import Tensor, nn

import perdure.elastic

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)


def compute(step: int, micro_batch: int) -> Tensor:
    time.sleep(0.002)
    return model(torch.randn(4, 256)).square().mean()


trainer = perdure.elastic.open_trainer(model, optimizer, compute, micro_batches=12)
with open(f"{folder}/rank-{os.environ['RANK']}.jsonl", "w", buffering=1) as out:
    for step in trainer.steps(1_000_000):
        row = {"step": step.step, "at": time.monotonic(), "world": step.world}
        out.write(json.dumps(row) + "\n")
