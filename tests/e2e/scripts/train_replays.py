"""A script whose updates pass its optimizer by, uncounted, as replays of a CUDA graph do.

All elements of its weight are alike after each step: a checkpoint in which they are not is torn.
"""

import argparse
from unittest import mock

import torch
from torch import nn

import perdure
from perdure.worker.checkpoint import staging

parser = argparse.ArgumentParser()
parser.add_argument("--gated", action="store_true")
args = parser.parse_args()
run = perdure.init()
model = nn.Linear(2048, 2048, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.register(model=model, optimizer=optimizer)
weight = model.weight.detach()
weight.zero_()
model.weight.grad = torch.zeros_like(weight)
for step in run.steps(12):
    if step == 0:
        optimizer.step()
    if step == 1:
        with mock.patch.object(
            staging, "is_capturing", return_value=True
        ):  # There is no CUDA here.
            optimizer.step()
    if args.gated:
        run.before_replay()
    with torch.autograd._unsafe_preserve_version_counter((weight,)):
        for row in weight:
            row += 1
