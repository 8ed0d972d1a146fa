"""torchft's LocalSGD: each group trains by itself and averages parameters every few steps.

usage: torchft_local_sgd.py SYNCS LOG_DIR
Each line of LOG_DIR/group-G.jsonl is a synchronization: time, step (of the manager), members, inner
steps since the last one, and the hash of the parameters, which has to be the same in all groups.
"""

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import LocalSGD

from perdure.torchft import steer_sync_every

SYNCS, LOG_DIR = int(sys.argv[1]), Path(sys.argv[2])
GROUP = int(os.environ["REPLICA_GROUP_ID"])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(GROUP)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(state: dict) -> None:  # type: ignore[type-arg]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"local_{GROUP}",
        hostname="127.0.0.1",
    )
    log = open(LOG_DIR / f"group-{GROUP}.jsonl", "a", buffering=1)  # noqa: SIM115
    inner, synced = 0, 0
    with LocalSGD(manager, model, optimizer, sync_every=4) as local:
        steer_sync_every(local)
        while manager.current_step() < SYNCS:
            time.sleep(0.02)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(8, 16)), torch.randn(8, 4)).backward()
            optimizer.step()
            inner += 1
            if manager.current_step() == synced:
                continue
            digest = hashlib.sha256()
            for parameter in model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            synced = manager.current_step()
            row = {"t": time.time(), "step": synced, "n": manager.num_participants()}
            row |= {"pid": os.getpid(), "inner": inner, "hash": digest.hexdigest()[:16]}
            log.write(json.dumps(row) + "\n")
            inner = 0
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main()
