"""A small elastic training; writes each committed step of each rank to a file of its own.

Once the trail's folder has a file `hurry`, the steps wait no more for `--pace-s`. Before that, each
step from `--hold-at` on takes as long as all of these before it: they outlast a test that is late.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import perdure.elastic


class Numbers:
    """200 samples of which the target is a function of the input."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().view(1)


parser = argparse.ArgumentParser()
parser.add_argument("--trail", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--hold-at", type=int)
parser.add_argument("--exact", action="store_true")
parser.add_argument("--shard", type=lambda text: text if text == "full" else int(text))
parser.add_argument("--pipeline", type=int)
parser.add_argument("--quit-at", type=int, default=-1)
"""Rank 1 ends with exit code 0 once it has committed this step."""
parser.add_argument("--busy-s", type=float, default=0.0)
"""Rank 2 is busy for so long, and says so, once it has committed step 20."""
parser.add_argument("--compiled", action="store_true")
"""The loss is compiled, and each step says what Inductor's cache had of it."""
parser.add_argument("--width", type=int, default=32)
"""Width of the hidden layer. With 300,000 a rank that joins follows the others first."""
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--device", default="cpu")
"""A GPU may be several ranks': NCCL takes them where each seems to be on a host of its own."""
args = parser.parse_args()
if args.device != "cpu":
    os.environ["NCCL_HOSTID"] = f"p{os.getpid()}"
    torch.use_deterministic_algorithms(True)
os.makedirs(args.trail, exist_ok=True)
hurry = Path(args.trail) / "hurry"
rank = os.environ.get("RANK", "0")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, args.width), nn.ReLU(), nn.Linear(args.width, 1))
out = open(f"{args.trail}/rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
made: list[torch.optim.Optimizer] = []
"""The last one is the newest world's, where each has one of its own."""


def make_optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    made.append(torch.optim.AdamW(params, lr=1e-2))
    return made[-1]


held: list[float] = []


def hold() -> None:
    """Wait for `hurry`, at most as long as since the first call."""
    held.append(time.monotonic())
    end = held[-1] + max(1.0, held[-1] - held[0])
    while time.monotonic() < end and not hurry.exists():
        time.sleep(0.01)


def note(step: perdure.elastic.Step) -> None:
    row = {
        "step": step.step,
        "losses": [loss.hex() for loss in step.losses],
        "world": step.world,
        "epoch": step.epoch,
        "pid": os.getpid(),
        "at": time.monotonic(),
        "hash": perdure.elastic.hash_tensors([t.cpu() for t in model.state_dict().values()]),
        "rate": made[-1].param_groups[0]["lr"],
    }
    if args.compiled:
        had = torch._dynamo.utils.counters["inductor"]  # It is imported by what has compiled.
        row["hit"], row["miss"] = (had[f"fxgraph_cache_{name}"] for name in ("hit", "miss"))
    out.write(json.dumps(row) + "\n")
    if args.pace_s and not hurry.exists():
        time.sleep(args.pace_s)
    if args.hold_at is not None and step.step >= args.hold_at:
        hold()
    if step.step == args.quit_at and rank == "1":
        sys.exit(0)
    if args.busy_s and step.step == 20 and rank == "2":
        with perdure.elastic.busy("evaluate", at_most_s=2 * args.busy_s):
            time.sleep(args.busy_s)


perdure.elastic.train(
    blocks=model,
    optimizer=make_optimizer,
    dataset=Numbers(),
    loss=torch.compile(nn.functional.mse_loss) if args.compiled else nn.functional.mse_loss,
    global_batch=24,
    micro_batch=2,
    steps=args.steps,
    exact=args.exact,
    shard=args.shard,
    pipeline=args.pipeline,
    snapshot_every=5,
    num_workers=args.num_workers,
    device=args.device,
    on_step=note,
)
out.close()
