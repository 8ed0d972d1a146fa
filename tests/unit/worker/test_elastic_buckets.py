"""Buckets of gradients: what leaves, in which order, and what travels with the first."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from perdure.worker.elastic import open_trainer
from perdure.worker.elastic.gradients import Buckets, Tally

WIDTH = 512
"""A matrix of this width fills the first bucket."""


class Lone:
    def all_reduce(self, tensor: torch.Tensor) -> None: ...


def backward(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()


def test_numbers_travel_with_the_first_bucket_and_are_not_scaled() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
    buckets = Buckets(model.parameters(), bucket_bytes=1, rider=2)
    buckets.riders[1].copy_(torch.tensor([3.0, 5.0]))
    sent: list[torch.Tensor] = []
    buckets.arm(1, 0.5, sent.append)
    backward(model)
    buckets.flush()
    assert [flat.numel() for flat in sent] == [WIDTH * WIDTH + 3, WIDTH * WIDTH + 1]
    assert sent[0][-2:].tolist() == [3.0, 5.0]
    for flat, layer in zip(sent, (model[1], model[0]), strict=True):
        assert torch.equal(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH), 0.5 * layer.weight.grad)
    buckets.expose(1)
    assert model[1].weight.grad.shape == (WIDTH, WIDTH)


def test_a_bucket_of_short_numbers_takes_none_along() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    buckets = Buckets(model.parameters(), bucket_bytes=1 << 20, rider=2)
    assert not buckets.riders
    assert buckets.flats(0)[0].numel() == 22  # Two say whether a parameter is used.


def test_a_loss_that_is_read_at_the_step_s_end_is_what_it_was() -> None:
    tally, loss = Tally(1, 4), torch.zeros(1)  # A graph's output, which every replay overwrites.
    for micro_batch in range(4):
        loss.fill_(micro_batch + 0.5)
        tally.note(micro_batch, loss)
    tally.forget(2)
    for step in range(2):  # What a broken step has read is kept for its next attempt.
        tally.send(step, Lone())  # type: ignore[arg-type]
        assert tally.read(step).losses.tolist() == [0.5, 1.5, 0.0, 3.5]
        assert tally.read(step).counts.tolist() == [[1.0, 1.0, 0.0, 1.0]]
    tally.note(2, loss)
    tally.clear()
    tally.send(2, Lone())  # type: ignore[arg-type]
    assert not tally.sums(2).any()


def test_nothing_is_read_from_the_device_between_two_micro_batches() -> None:
    reads, seen = [0], []

    class Reads(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            reads[0] += name in ("item", "tolist", "cpu", "__float__", "__bool__", "numpy")
            return func(*args, **(kwargs or {}))

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compute(step: int, micro_batch: int) -> torch.Tensor:
        seen.append((step, reads[0]))
        return model(torch.ones(1, 2)).sum()

    trainer = open_trainer(model, optimizer, compute, micro_batches=4)
    with Reads():
        losses = [step.losses for step in trainer.steps(3)]
    assert [len(row) for row in losses] == [4, 4, 4]
    assert all(row[0] != 0.0 for row in losses)
    assert [step for step, _ in seen] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(seen)) == 3  # Reads between steps, and none within one.
    assert reads[0] > 0


class Recurrent(nn.Module):
    """Uses its middle layer twice; with `twice`, each use adds to its gradient by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.twice = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last, head = self.layers
        x = first(x)
        for _ in range(2):
            x = checkpoint(middle, x, use_reentrant=True) if self.twice else middle(x)
        return head(last(x).tanh())


def pass_armed(model: nn.Module, buckets: Buckets, step: int) -> int:
    """Make an armed pass, and check what is sent; return how many buckets left before its end."""
    sent: list[torch.Tensor] = []
    buckets.drop()
    buckets.arm(step, 1.0, sent.append)
    model(torch.ones(2, WIDTH)).sum().backward()
    early = len(sent)
    buckets.flush()
    for bucket, flat in zip(buckets.buckets, sent, strict=True):
        used = torch.ones(len(bucket.params))
        assert torch.equal(flat, torch.cat([*(p.grad.flatten() for p in bucket.params), used]))
    return early


def test_a_gradient_that_comes_in_two_parts_is_sent_whole() -> None:
    """A layer is used twice under reentrant checkpoints: its hook fires twice in a pass."""
    model = Recurrent()
    buckets = Buckets(model.parameters(), bucket_bytes=1)
    early = [pass_armed(model, buckets, step) for step in range(3)]
    assert early[0] == 0, "nothing is known before the first pass"
    assert early[1] == early[2] > 0, "what is over early leaves early"
    buckets.close()


def test_a_gradient_that_comes_again_after_it_was_sent_is_an_error() -> None:
    model = Recurrent()
    model.twice = False
    buckets = Buckets(model.parameters(), bucket_bytes=1)
    for step in range(2):
        pass_armed(model, buckets, step)
    model.twice = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        pass_armed(model, buckets, 2)
