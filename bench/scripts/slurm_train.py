"""What a careful person writes without perdure: DDP with checkpoints of its own, under Slurm.

    srun python slurm_train.py FOLDER STEPS EVERY PACE_S

USR1 sets a flag; the ranks agree on it at the end of a step, save, and leave with 85, which has the
sbatch script put the job back. The same model as tests/e2e/scripts/train_exact.py.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.e2e.scripts.train_exact import Noisy, make_model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

AGAIN = 85
BATCH = 4


def load(folder: Path, rank: int) -> dict[str, Any]:
    """Return the newest checkpoint; empty where there is none."""
    path = folder / f"checkpoint-{rank}.pt"
    return torch.load(path, weights_only=True) if path.exists() else {}


def save(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Replace the checkpoint."""
    temporary = folder / f"checkpoint-{rank}.tmp"
    torch.save(state, temporary)
    os.replace(temporary, folder / f"checkpoint-{rank}.pt")


def train(folder: Path, rank: int, world: int, steps: int, every: int, pace_s: float) -> None:
    """Train from the newest checkpoint to the last step, or until USR1 was sent."""
    torch.set_num_threads(1)  # As `perdure run` and torchrun have it.
    told: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    address = f"tcp://127.0.0.1:{20000 + int(os.environ['SLURM_JOB_ID']) % 10000}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    torch.manual_seed(7)
    model = DistributedDataParallel(make_model(64), bucket_cap_mb=0.01)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state = load(folder, rank)
    step = int(state.get("step", 0))
    for name, part in parts.items():
        if state:
            part.load_state_dict(state[name])
    if state:
        torch.set_rng_state(state["rng"])
    trail = open(folder / f"rank-{rank}.jsonl", "a", buffering=1)  # noqa: SIM115
    while step < steps:
        for x in list_batches(step, rank, world):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            time.sleep(pace_s)
            optimizer.step()
            schedule.step()
            trail.write(json.dumps({"rank": rank, "step": step, "loss": loss.item().hex()}) + "\n")
            step += 1
            flag = torch.tensor([float(bool(told))])
            dist.all_reduce(flag)
            if flag or step % every == 0:
                states = {name: part.state_dict() for name, part in parts.items()}
                save(folder, rank, {"step": step, "rng": torch.get_rng_state(), **states})
            if flag:
                dist.destroy_process_group()
                sys.exit(AGAIN)
            if step == steps:
                break
    dist.destroy_process_group()


def list_batches(step: int, rank: int, world: int) -> Any:
    """Yield the rest of the pass over the data that `step` lies in."""
    data = Noisy()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=3)
    each = len(sampler) // BATCH
    sampler.set_epoch(step // each)
    rest = list(sampler)[step % each * BATCH :]
    for _, x in DataLoader(Subset(data, rest), batch_size=BATCH, drop_last=True):
        yield x


class Submitted:
    """The same under submitit, whose handler puts the job back as it was at its last save."""

    def __init__(self, *args: Any) -> None:
        """Keep what `train` wants after rank and world."""
        self.args = args

    def __call__(self) -> None:
        """Be one rank."""
        import submitit

        env = submitit.JobEnvironment()
        folder, *rest = self.args
        train(Path(folder), env.global_rank, env.num_tasks, *rest)

    def checkpoint(self) -> Any:
        """Return what is to run after the requeue: the same, which finds its checkpoint."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


if __name__ == "__main__":
    train(
        Path(sys.argv[1]), int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"]),
        int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]),
    )  # fmt: skip
