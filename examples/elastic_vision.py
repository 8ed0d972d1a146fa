"""Train a small residual network on shapes it has never seen twice, through the loss of ranks.

    perdure run -n 4 examples/elastic_vision.py

The data is an endless stream: image number n is drawn from n alone, so whoever redoes a lost
micro-batch draws the same images. Normalisation is by groups: the running averages of BatchNorm
would depend on which rank computed which micro-batch, and are refused.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import perdure.elastic

CLASSES = ("disc", "ring", "square", "triangle", "cross")
SIZE = 32


class Shapes:
    """Noisy grey images of one shape each, without end."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        axis = torch.linspace(-1, 1, SIZE)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Return (image, class) of shapes (1, 32, 32) and ()."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + position)
        kind = int(torch.randint(len(CLASSES), (), generator=random))
        dx, dy, turn, grow = torch.rand(4, generator=random).tolist()
        image = self.draw(
            kind, 0.6 * (dx - 0.5), 0.6 * (dy - 0.5), math.pi * turn, 0.4 + 0.2 * grow
        )
        image = image + 0.3 * torch.randn(SIZE, SIZE, generator=random)
        return image[None], torch.tensor(kind)

    def draw(self, kind: int, dx: float, dy: float, turn: float, size: float) -> Tensor:
        """Return the shape, 1 where it is and 0 elsewhere."""
        x, y = self.x - dx, self.y - dy
        u = (x * math.cos(turn) + y * math.sin(turn)) / size
        v = (y * math.cos(turn) - x * math.sin(turn)) / size
        radius = torch.hypot(u, v)
        match CLASSES[kind]:
            case "disc":
                inside = radius < 1
            case "ring":
                inside = (radius < 1) & (radius > 0.6)
            case "square":
                inside = torch.maximum(u.abs(), v.abs()) < 0.8
            case "triangle":
                inside = (v > -0.5) & (v + 1.7 * u.abs() < 1)
            case _:
                inside = (torch.minimum(u.abs(), v.abs()) < 0.25) & (radius < 1)
        return inside.float()


class Residual(nn.Module):
    """Two convolutions beside an identity; `stride` 2 halves the image."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, before),
            nn.ReLU(),
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
        )
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        """Map (batch, before, height, width) to (batch, after, height/stride, width/stride)."""
        out: Tensor = self.body(image) + self.around(image)
        return out


def make_blocks(width: int) -> list[nn.Module]:
    """Return the network as blocks, each fed with what the one before returns."""
    return [
        nn.Conv2d(1, width, 3, padding=1),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, len(CLASSES))),
    ]


def show(step: perdure.elastic.Step) -> None:
    """Print every tenth step, on the first rank that lives."""
    if step.first and step.step % 10 == 0:
        print(f"step {step.step:5d}  loss {step.loss:.4f}  world {list(step.world)}", flush=True)


def main() -> None:
    """Train to the planned step, then say how often images not seen before are recognised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=64, help="images a step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that draw images")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = perdure.elastic.train(
        blocks=make_blocks(args.width),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01),
        scheduler=lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps),
        dataset=Shapes(args.seed),
        loss=F.cross_entropy,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        steps=args.steps,
        seed=args.seed,
        num_workers=args.num_workers,
        on_step=show,
    )
    unseen = Shapes(args.seed + 1)  # Every rank has the whole model; each says the same.
    images, kinds = zip(*(unseen[i] for i in range(500)), strict=True)
    with torch.no_grad():
        right = (model(torch.stack(images)).argmax(1) == torch.stack(kinds)).float().mean()
    print(f"recognised: {100 * right:.1f} % of 500 images not seen before")


if __name__ == "__main__":
    main()
