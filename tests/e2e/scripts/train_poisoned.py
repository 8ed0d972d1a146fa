"""A script that logs whatever can be logged, and on one rank ends by what cannot be told."""

import math
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import perdure

run = perdure.init()
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.register(model=model, optimizer=optimizer)
gate = Path(sys.argv[1])

for step in run.steps(100_000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    run.log(
        **{
            "loss": (math.nan, math.inf, -math.inf, float(step))[step % 4],
            "lo\udcffss": step, "": 1, "words": "x" * 10_000_000 if step == 3 else "y",
            "none": None, "vector": torch.ones(3), "huge": 10**400, "big": 2**63,
            "\x1b]52;c;aGk=\x07": torch.tensor(1.0), "n" * 100_000: 2,
        }
    )  # fmt: skip
    if step < 8:
        os.write(2, b"\xff\xfe\x00 not UTF-8 \xed\xa0\x80\n" + b"z" * 1_000_000 + b"\n")
    if step == 9:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)  # From here on its disk is full.
    print(step, "x" * 10_000)
    for _ in range(5 if step == 5 and run.rank == 1 else 0):  # Five strangers at the agent's door.
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(os.environ["PERDURE_SOCKET"])
            line.sendall(b"let me in\n")
    if gate.exists() and run.rank == 1 and os.environ["PERDURE_GENERATION"] == "0":
        raise ValueError("cannot open \udcff\ud800\x1b]0;x\x07 " + "w" * 10_000_000)
    time.sleep(0.02)
