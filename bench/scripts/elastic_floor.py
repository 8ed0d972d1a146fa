"""What bare gloo needs to lose a rank: no controller, no journal, no check of anything.

usage: elastic_floor.py RANKS KILLS STATE_MB

Forked ranks train the model of `elastic_paced.py`: their micro-batches, one all-reduce of the
gradients, the update. One is killed at a random instant. Their parent, who reaps it, writes to a
pipe of each survivor's that it is dead; they make a new group, redo the step with the dead one's
micro-batches shared out, and go on. Prints a JSON document: from the kill to the last survivor's
next update, and the phases of it.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perdure.worker.elastic.group import make_device

COUNT, PACE_S = 12, 0.002
_PrefixStore: Any = vars(dist)["PrefixStore"]
_TCPStore: Any = vars(dist)["TCPStore"]


def make_model(state_mb: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
    rest = int(state_mb * 1e6 / 12) - sum(p.numel() for p in model.parameters())
    while rest > 0:
        size = min(rest, 1 << 20)
        model.register_parameter(f"more{rest}", nn.Parameter(torch.randn(size)))
        rest -= size
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_group(store: Any, index: int, size: int, device: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout, options._threads = [device], timedelta(seconds=20), 2
    return dist.ProcessGroupGloo(store, index, size, options)


def train(rank: int, size: int, port: int, orders: int, reports: int, state_mb: float) -> None:
    model, optimizer = make_model(state_mb)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    store = _TCPStore("127.0.0.1", port, is_master=False)
    device, members = make_device(), list(range(size))
    group = make_group(_PrefixStore("0", store), rank, size, device)

    def report(**row: Any) -> None:
        os.write(reports, (json.dumps(row) + "\n").encode())

    while True:
        share = [m for m in range(COUNT) if m % len(members) == members.index(rank)]
        try:
            for _ in share:
                time.sleep(PACE_S)
                model(torch.randn(4, 256)).square().mean().backward()
            at = 0
            for p in model.parameters():
                if p.grad is not None:
                    flat[at : at + p.numel()] = p.grad.view(-1)
                at += p.numel()
            group.allreduce([flat]).wait()
        except RuntimeError:
            del group  # Whoever waits for this one learns of it.
            dead = int(os.read(orders, 16))
            told = time.monotonic()
            members.remove(dead)
            prefix = _PrefixStore(str(dead), store)
            group = make_group(prefix, members.index(rank), len(members), device)
            report(told=told, connected=time.monotonic())
            continue
        at = 0
        for p in model.parameters():
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        optimizer.step()
        optimizer.zero_grad()
        report(at=time.monotonic(), world=len(members))


def kill_one(size: int, state_mb: float, chance: random.Random) -> dict[str, float]:
    """Train, kill, wait for the survivors' next update; return when what happened."""
    served = _TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids, orders, reports = [], [], []
    for rank in range(size):
        order_out, order_in = os.pipe()
        report_out, report_in = os.pipe()
        pid = os.fork()
        if pid == 0:
            train(rank, size, served.port, order_out, report_in, state_mb)
            os._exit(0)
        os.close(report_in)
        pids.append(pid)
        orders.append(order_in)
        reports.append(os.fdopen(report_out, "rb", buffering=0))
    rows: list[list[dict[str, Any]]] = [[] for _ in pids]
    rest = [b""] * size

    def read_until(done: Any) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline, "bare gloo hangs"
            for file in select.select(reports, [], [], 0.05)[0]:
                rank = reports.index(file)
                *lines, rest[rank] = (rest[rank] + file.read(65536)).split(b"\n")
                rows[rank] += [json.loads(line) for line in lines]

    read_until(lambda: all(len(r) > 10 for r in rows))
    end = time.monotonic() + 0.2 + 0.1 * chance.random()
    read_until(lambda: time.monotonic() > end)
    victim = chance.randrange(size)
    killed = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    os.waitpid(pids[victim], 0)
    died = time.monotonic()
    left = [r for r in range(size) if r != victim]
    for rank in left:
        os.write(orders[rank], str(victim).encode())
    reports, rows, rest = ([one[r] for r in left] for one in (reports, rows, rest))

    def first(mine: list[dict[str, Any]]) -> float:
        return next((r["at"] for r in mine if r.get("world") == len(left)), 0.0)

    read_until(lambda: all(first(mine) for mine in rows))
    new = [next(r for r in mine if "told" in r) for mine in rows]
    for rank in left:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    for fd in orders:
        os.close(fd)
    told, connected = (max(r[key] for r in new) for key in ("told", "connected"))
    done = max(first(mine) for mine in rows)
    return {
        "total_s": done - killed, "die_s": died - killed, "abort_s": told - died,
        "communicator_s": connected - told, "commit_s": done - connected,
    }  # fmt: skip


def main() -> None:
    size, kills, state_mb = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    chance = random.Random(1)
    with contextlib.redirect_stdout(sys.stderr):
        found = [kill_one(size, state_mb, chance) for _ in range(kills)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
