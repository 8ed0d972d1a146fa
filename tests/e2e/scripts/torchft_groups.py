"""torchft's public interface and nothing of perdure: a small model, a hash of it at some steps.

usage: torchft_groups.py STEPS LOG_DIR
Each line of LOG_DIR/group-G.jsonl is a step: time, step, quorum, members, and at every tenth step
the hash of parameters and moments, which has to be the same in all groups. A file LOG_DIR/hang-G
makes the training thread of group G hang, once, in the middle of a step. PAUSES, such as
`1:20:3,2:30:10`, has group 1 do nothing for 3 s after every 20 steps, as in a validation, and group
2 for 10 s after every 30; PAUSES_INSIDE is the same in the middle of a step. The pause of group 1
after step 40 goes on while there is a file LOG_DIR/hold-1-40. With BUSY pauses are declared.
MEND_HOOK mends the fault of torchft 0.2.0 with gloo and nothing else, to measure torchft by itself.
LIVE_LR makes the learning rate a live setting, the one thing of perdure.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS, LOG_DIR = int(sys.argv[1]), Path(sys.argv[2])
GROUP = int(os.environ["REPLICA_GROUP_ID"])
PAUSE_S = float(os.environ.get("STEP_PAUSE_S", "0.05"))
WIDTH = int(os.environ.get("WIDTH", "64"))
BUSY = bool(os.environ.get("BUSY"))
if BUSY:
    import perdure.torchft


def pause(name: str, step: int) -> None:
    for word in filter(None, os.environ.get(name, "").split(",")):
        group, every, seconds = word.split(":")
        if int(group) == GROUP and step % int(every) == 0 and step:
            (LOG_DIR / f"pause-{GROUP}-{step}").touch()
            with (
                contextlib.nullcontext()
                if not BUSY
                else perdure.torchft.busy("evaluate", at_most_s=60)
            ):
                time.sleep(float(seconds))
                while (LOG_DIR / f"hold-{GROUP}-{step}").exists():
                    time.sleep(0.02)


def find_hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        for name in ("exp_avg", "exp_avg_sq"):
            digest.update(optimizer.state[parameter][name].numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    torch.set_num_threads(1)
    if os.environ.get("MEND_HOOK"):
        import torchft

        from perdure.worker.torchft.manager import mend_hook

        mend_hook(torchft)
    torch.manual_seed(GROUP)  # Unlike parameters: the first quorum makes them alike.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict) -> None:  # type: ignore[type-arg]
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    def save() -> dict:  # type: ignore[type-arg]
        return {"model": model.state_dict(), "optim": inner.state_dict()}

    def set_lr(lr: float) -> None:
        for group in inner.param_groups:
            group["lr"] = lr

    if os.environ.get("LIVE_LR"):
        from perdure.torchft import config

        config.declare("lr", float, default=1e-3, min=0, max=1, on_change=set_lr)

    timeout = timedelta(seconds=float(os.environ.get("PG_TIMEOUT_S", "60")))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=f"train_{GROUP}",
        timeout=timeout,
        hostname=os.environ.get("MANAGER_HOST", "127.0.0.1"),
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    log = open(LOG_DIR / f"group-{GROUP}.jsonl", "a", buffering=1)  # noqa: SIM115
    data = torch.Generator().manual_seed(100 + GROUP)
    while manager.current_step() < STEPS:
        x = torch.randn(16, WIDTH, generator=data)
        y = torch.randint(0, 10, (16,), generator=data)
        optimizer.zero_grad()
        time.sleep(PAUSE_S)
        pause("PAUSES_INSIDE", manager.current_step())
        if (hang := LOG_DIR / f"hang-{GROUP}").exists():
            hang.rename(LOG_DIR / f"hung-{GROUP}")
            time.sleep(3600)
        nn.functional.cross_entropy(ddp(x), y).backward()
        before = manager.current_step()
        optimizer.step()
        step = manager.current_step()
        row = {"t": time.time(), "step": step, "n": manager.num_participants(), "pid": os.getpid()}
        row["q"], row["lr"] = manager._quorum_id, inner.param_groups[0]["lr"]
        if step == before:
            row["failed"] = str(manager.errored())[:200]
        elif step % 10 == 0:
            row["hash"] = find_hash(model, inner)
        log.write(json.dumps(row) + "\n")
        if step != before:
            pause("PAUSES", step)
    print(f"group {GROUP}: {manager.current_step()} steps", flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


if __name__ == "__main__":
    main()
