"""torchft's Manager, one replica group a rank: the shape of its train_ddp.py.

Every rank is a replica group of its own, with a store of its own; the groups find each other
through the lighthouse that TORCHFT_LIGHTHOUSE names.
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    replica, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=replicas,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    try:
        wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
        while manager.current_step() < args.steps:
            optimizer.zero_grad()
            loss = wrapped(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            print(f"step {manager.current_step()}", flush=True)
        print(f"finished at step {manager.current_step()}", flush=True)
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
