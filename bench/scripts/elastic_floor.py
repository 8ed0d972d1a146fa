"""What bare gloo needs to lose a rank: no controller, no journal, no check of anything.

usage: elastic_floor.py RANKS KILLS STATE_MB

Forked ranks train the model of `elastic_paced.py`: their micro-batches, one all-reduce of the
gradients, the update. One is killed at a random instant. Their parent, who reaps it, writes to a
pipe of each survivor's that it is dead; they make a new group, redo the step with the dead one's
micro-batches shared out, and go on. Prints a JSON document: from the kill to the last survivor's
next update, and the phases of it.

gloo does not tell every survivor of the death: who waits for another survivor goes on waiting, up
to its time-out of 20 s, and the others time out in connecting to it. So a thread shuts a survivor's
connections as soon as it is told, and waits are the engine's own (`Group`), which can be ended.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perdure.worker.elastic.communicators.gloo import connect
from perdure.worker.elastic.group import Broken, Group

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


class Orders:
    """What the parent writes to a rank: who is dead."""

    def __init__(self, pipe: int, group: Group) -> None:
        self.dead, self.come = -1, threading.Event()
        threading.Thread(target=self._listen, args=(pipe, group), daemon=True).start()

    def _listen(self, pipe: int, group: Group) -> None:
        self.dead = int(os.read(pipe, 16))
        group.break_()
        self.come.set()


def train(rank: int, size: int, port: int, pipe: int, reports: int, state_mb: float) -> None:
    model, optimizer = make_model(state_mb)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    store = _TCPStore("127.0.0.1", port, is_master=False)
    members = tuple(range(size))
    group = Group(members, rank, _PrefixStore("0", store), connect)
    orders = Orders(pipe, group)

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
            group.all_reduce(flat)
            group.wait()
        except Broken:
            if len(members) < size:
                return  # All is over, and the others are being ended.
            group.give_up()
            orders.come.wait()
            told = time.monotonic()
            members = tuple(m for m in members if m != orders.dead)
            group = Group(members, rank, _PrefixStore("1", store), connect)
            report(told=told, connected=time.monotonic())
            optimizer.zero_grad()
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
    try:
        for rank in range(size):
            order_out, order_in = os.pipe()
            report_out, report_in = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    train(rank, size, served.port, order_out, report_in, state_mb)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)  # Whatever happened: what follows is the parent's.
            os.close(order_out)
            os.close(report_in)
            pids.append(pid)
            orders.append(order_in)
            reports.append(os.fdopen(report_out, "rb", buffering=0))
        return watch(pids, orders, reports, chance)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in orders:
            os.close(fd)


def watch(
    pids: list[int], orders: list[int], reports: list[Any], chance: random.Random
) -> dict[str, float]:
    """Kill one of `pids`, which is taken out of them; return when what happened."""
    rows: list[list[dict[str, Any]]] = [[] for _ in pids]
    rest = [b""] * len(pids)

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
    victim = chance.randrange(len(pids))
    left, pid = [r for r in range(len(pids)) if r != victim], pids[victim]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    died = time.monotonic()
    pids.remove(pid)
    for rank in left:
        os.write(orders[rank], str(victim).encode())
    reports, rows, rest = ([one[r] for r in left] for one in (reports, rows, rest))

    def first(mine: list[dict[str, Any]]) -> float:
        return next((r["at"] for r in mine if r.get("world") == len(left)), 0.0)

    read_until(lambda: all(first(mine) for mine in rows))
    new = [next(r for r in mine if "told" in r) for mine in rows]
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
