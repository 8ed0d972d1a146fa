"""What a replay trains is trained by an elastic world in stages."""

import torch
from torch import nn

from perdure.worker.elastic.state.replicated import BufferGuard
from perdure_lab.live.paced import Block, Device


def test_a_pass_alters_nothing_that_members_compare() -> None:
    device = Device(0.001, 2)
    model = nn.Sequential(*(Block(device) for _ in range(2)))
    guard = BufferGuard(model)
    for _ in range(3):
        guard.note()
        model(torch.ones(1, 256))
        guard.check()
