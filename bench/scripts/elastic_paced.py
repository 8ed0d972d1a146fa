"""An elastic training with real tensors and collectives whose micro-batches take 2 ms.

Arguments: the folder for what each member has committed, and MB of state (weights and moments of
AdamW). Weights beyond a small model take part in reduction and update, and hardly in computation.
"""

import json
import os
import sys
import time

import torch
from torch import Tensor, nn

import perdure.elastic

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
state_mb = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
more = []
rest = int(state_mb * 1e6 / 12) - sum(p.numel() for p in model.parameters())
while rest > 0:
    size = min(rest, 1 << 20)
    more.append(nn.Parameter(torch.randn(size)))
    model.register_parameter(f"more{rest}", more[-1])
    rest -= size
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)


def compute(step: int, micro_batch: int) -> Tensor:
    time.sleep(0.002)
    loss = model(torch.randn(4, 256)).square().mean()
    return loss + 0.0 * sum(parameter[0] for parameter in more)  # A gradient of full size.


trainer = perdure.elastic.open_trainer(model, optimizer, compute, micro_batches=12)
member = os.environ.get("PERDURE_MEMBER") or os.environ["RANK"]
with open(f"{folder}/rank-{member}.jsonl", "w", buffering=1) as out:
    for step in trainer.steps(1_000_000):
        row = {"step": step.step, "at": time.monotonic(), "world": step.world}
        out.write(json.dumps(row) + "\n")
