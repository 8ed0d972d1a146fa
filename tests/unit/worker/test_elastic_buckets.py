"""Buckets of gradients: what leaves, in which order, and what travels with the first."""

import torch
from torch import nn

from perdure.worker.elastic.gradients import Buckets

WIDTH = 512
"""A matrix of this width fills the first bucket."""


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
    assert [flat.numel() for flat in sent] == [WIDTH * WIDTH + 2, WIDTH * WIDTH]
    assert sent[0][-2:].tolist() == [3.0, 5.0]
    for flat, layer in zip(sent, (model[1], model[0]), strict=True):
        assert torch.equal(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH), 0.5 * layer.weight.grad)
    buckets.expose(1)
    assert model[1].weight.grad.shape == (WIDTH, WIDTH)


def test_a_bucket_of_short_numbers_takes_none_along() -> None:
    model = nn.Linear(4, 4).to(torch.bfloat16)
    buckets = Buckets(model.parameters(), bucket_bytes=1 << 20, rider=2)
    assert not buckets.riders
    assert buckets.flats(0)[0].numel() == 20
