"""Train a small GPT with data parallelism. Five lines of it are perdure's, marked with `# <-`.

Under `perdure run -n 2 examples/gpt/train.py` it survives what befalls its processes; under
torchrun, or alone as `python examples/gpt/train.py`, the same file simply trains.
"""

import argparse
import os

import torch
import torch.distributed as dist
from data import Windows, read_text
from model import GPT
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import perdure


def parse_args() -> argparse.Namespace:
    """Return the options; the defaults train in minutes on two CPU cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Train to the planned step."""
    args = parse_args()
    run = perdure.init()  # <-
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(args.seed)
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
    )
    gpt = GPT(layers=args.layers, width=args.width, heads=4, context=args.context).to(device)
    model = DistributedDataParallel(gpt) if dist.is_initialized() else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    run.register(model=model, optimizer=optimizer, scheduler=schedule)  # <-

    windows = Windows(read_text(), args.context)
    for step, (inputs, targets) in run.batches(  # <-
        windows, batch_size=args.batch_size, steps=args.steps, seed=args.seed
    ):
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.log(loss=loss.item(), lr=schedule.get_last_lr()[0])  # <-
        if step % 50 == 0 and int(os.environ.get("RANK", 0)) == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
