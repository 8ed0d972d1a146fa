"""Train the small GPT of `examples/gpt` so that a rank may die without the others stopping.

    perdure run -n 4 examples/elastic_gpt.py [--shard N | --pipeline N]

Kill any rank while it trains: the others go on with the same step, the same global batch and the
same samples. Under torchrun, or alone, the same file simply trains.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import perdure.elastic

sys.path.insert(0, str(Path(__file__).parent / "gpt"))
from data import Windows, read_text
from model import GPT


def parse_args() -> argparse.Namespace:
    """Return the options; the defaults train in minutes on two CPU cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shard", type=int, help="spread each copy of the state over N ranks")
    parser.add_argument("--pipeline", type=int, help="cut each copy of the model into N stages")
    parser.add_argument("--tied", action="store_true", help="one matrix for embedding and head")
    parser.add_argument("--exact", action="store_true", help="the same losses in every world")
    return parser.parse_args()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def show(step: perdure.elastic.Step) -> None:
    """Print every step, on the first rank that lives."""
    if step.first:
        print(f"step {step.step:5d}  loss {step.loss:.4f}  world {list(step.world)}", flush=True)


def main() -> None:
    """Train to the planned step."""
    args = parse_args()
    torch.manual_seed(args.seed)
    perdure.elastic.train(
        blocks=GPT(
            layers=args.layers, width=args.width, heads=4, context=args.context, tied=args.tied
        ),
        optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr, weight_decay=0.01),
        scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps),
        dataset=Windows(read_text(), args.context),
        loss=loss_of,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        steps=args.steps,
        seed=args.seed,
        exact=args.exact,
        shard=args.shard,
        pipeline=args.pipeline,
        on_step=show,
    )


if __name__ == "__main__":
    main()
