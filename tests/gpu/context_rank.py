"""The script of G2's ranks: makes a context by a product of matrices, and prints its seconds."""

import sys
import time

import torch

began_s = time.monotonic()
if sys.argv[1] != "cpu":
    torch.cuda.set_device(sys.argv[1])
ones = torch.ones(256, 256, device=sys.argv[1])
assert (ones @ ones).sum().item() == 256.0**3
print(time.monotonic() - began_s)
