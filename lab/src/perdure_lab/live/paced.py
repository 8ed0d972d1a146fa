"""What `perdure trace replay` trains: one model and one global batch, under each of the systems.

usage: paced elastic|ddp|torchft|pipeline FOLDER MICRO_BATCHES PACE_S PLACES [STAGES|TIMEOUT_S]

Devices are virtual: tensors, gradients and collectives are real, and a micro-batch takes PACE_S at
least, so that several ranks of one machine are several times as fast. PLACES is how many there are
at most; under ddp and pipeline, those of the ranks (0,1,3). TIMEOUT_S is that of torchft's
collectives. Each process appends to FOLDER/made-PLACE.jsonl what it answers for: time
(CLOCK_MONOTONIC), step, samples, who made it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

SAMPLES = 4
"""The samples of a micro-batch."""
BLOCKS = 8
"""The blocks of a pipeline."""
SAVE_EVERY_S = 10.0
"""Under `ddp`."""
_STEPS = 100_000_000


class Device:
    """Takes `pace_s` for each micro-batch; what the machine itself computes is hidden in it."""

    def __init__(self, pace_s: float, count: int) -> None:
        """Be free from now on."""
        self._pace_s, self._count, self._free_s = pace_s, count, 0.0

    def compute(self, model: nn.Module, step: int, micro_batch: int) -> Tensor:
        """Return the loss of a micro-batch, which depends on the arguments alone."""
        self.begin(1.0)
        loss: Tensor = model(self.load(step, micro_batch)).square().mean()
        self.finish()
        return loss

    def load(self, step: int, micro_batch: int) -> Tensor:
        """Return the samples of a micro-batch."""
        random = torch.Generator().manual_seed(step * self._count + micro_batch)
        return torch.randn(SAMPLES, 256, generator=random)

    def begin(self, share: float) -> None:
        """Be busy for that share of a micro-batch's time; what came just before belongs to it."""
        now = time.monotonic()
        busy = now - self._free_s < share * self._pace_s
        self._free_s = (self._free_s if busy else now) + share * self._pace_s

    def finish(self) -> None:
        """Wait until it is free."""
        time.sleep(max(0.0, self._free_s - time.monotonic()))


class Block(nn.Module):
    """One of `BLOCKS` blocks of a pipeline, which takes its share of a micro-batch's time."""

    def __init__(self, device: Device) -> None:
        """Compute on `device`."""
        super().__init__()
        # Members would compare the times of a device that is an attribute.
        self._begin, self._finish, self.inner = (
            device.begin,
            device.finish,
            nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute, and take the time."""
        self._begin(1.0 / BLOCKS)
        outputs: Tensor = self.inner(inputs)
        self._finish()
        return outputs


class Made:
    """The steps that this process answers for."""

    def __init__(self, folder: Path, place: str) -> None:
        """Append to what earlier processes in this place have made."""
        self._out = open(folder / f"made-{place}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(self, step: int, micro_batches: int, places: Sequence[int]) -> None:
        """Say that a step is committed."""
        row = {
            "at_s": time.monotonic(),
            "step": step,
            "samples": micro_batches * SAMPLES,
            "places": sorted(places),
        }
        self._out.write(json.dumps(row) + "\n")


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model and its optimizer, the same in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_elastic(folder: Path, count: int, pace_s: float, places: str, more: str = "0") -> None:
    """Train under `perdure run --nodes PLACES`; with STAGES, the model is cut into so many."""
    stages = int(more)
    from perdure.worker.elastic import open_pipeline_trainer, open_trainer

    made = Made(folder, os.environ.get("PERDURE_NODE", "0"))
    device = Device(pace_s, count)
    model, optimizer = make_model()
    if stages:
        trainer = open_pipeline_trainer(
            [Block(device) for _ in range(BLOCKS)],
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
            lambda step, m: (device.load(step, m), None),
            lambda outputs, _: outputs.square().mean(),
            stages=stages,
            micro_batches=count,
            snapshot_every=1,  # A step takes long here, and a snapshot does not.
        )
    else:
        trainer = open_trainer(
            model, optimizer, lambda step, m: device.compute(model, step, m), micro_batches=count
        )
    for step in trainer.steps(_STEPS):
        if step.first:
            made.note(step.step, count, [member % int(places) for member in step.world])


def train_ddp(folder: Path, count: int, pace_s: float, places: str) -> None:
    """Train under torchrun, a rank in each of `places`."""
    dist.init_process_group("gloo")
    inner, optimizer = make_model()
    model = nn.parallel.DistributedDataParallel(inner)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = list(range(count))[rank::world]
    made = Made(folder, "0") if rank == 0 else None
    path, start = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        inner.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        start = state["step"]
    device, saved_s = Device(pace_s, count), time.monotonic()
    here = [int(place) for place in places.split(",")]
    for step in range(start, _STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            for micro_batch in mine[:-1]:
                torch.autograd.backward(device.compute(model, step, micro_batch) * world / count)
        torch.autograd.backward(device.compute(model, step, mine[-1]) * world / count)
        optimizer.step()
        if made is None:
            continue
        made.note(step, count, here)
        if time.monotonic() - saved_s >= SAVE_EVERY_S:
            saved_s = time.monotonic()
            state = {"model": inner.state_dict(), "optim": optimizer.state_dict()}
            torch.save(state | {"step": step + 1}, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)


class Cut(NamedTuple):
    """A model that is cut into stages, and what it is trained with."""

    blocks: Sequence[nn.Module]
    """Called in their order; alike in all ranks."""
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    load: Callable[[int, Sequence[int]], tuple[Tensor, Tensor]]
    """Inputs and targets of some micro-batches of a step, one behind the other."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The mean loss of a micro-batch."""
    micro_batches: int
    """Of a step."""


def train_pipeline(folder: Path, count: int, pace_s: float, places: str, more: str) -> None:
    """Train under torchrun, D copies of a model in STAGES stages, a rank in each of `places`."""
    torch.manual_seed(0)
    device = Device(pace_s, count)

    def load(step: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        data = torch.cat([device.load(step, number) for number in numbers])
        return data, data

    cut = Cut(
        [Block(device) for _ in range(BLOCKS)],
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        load,
        lambda outputs, _: outputs.square().mean(),
        count,
    )
    train_cut(folder, cut, int(more), [int(place) for place in places.split(",")])


def train_cut(folder: Path, cut: Cut, stages: int, places: Sequence[int]) -> None:
    """Train under torchrun, copies of `cut` in so many stages, a rank in each of `places`.

    Torch's own pipelining (1F1B). The first copy saves its blocks each by itself, so that they can
    be cut otherwise: every `SAVE_EVERY_S`, and where the file `notice` is there.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    blocks, count, rank = cut.blocks, cut.micro_batches, dist.get_rank()
    copies, (copy, stage) = dist.get_world_size() // stages, divmod(rank, stages)
    rows = [[c * stages + s for s in range(stages)] for c in range(copies)]
    line = [dist.new_group(row) for row in rows][copy]
    peers = [dist.new_group([row[s] for row in rows]) for s in range(stages)][stage]
    mine = range(len(blocks) * stage // stages, len(blocks) * (stage + 1) // stages)
    model = nn.Sequential(*(blocks[number] for number in mine))
    optimizers = {n: cut.make_optimizer(blocks[n].parameters()) for n in mine}
    latest, start = folder / "latest", 0
    if latest.exists():
        start = int(latest.read_text())
        for number in mine:
            state = torch.load(folder / f"step-{start}" / f"block-{number}.pt", weights_only=True)
            blocks[number].load_state_dict(state["model"])
            optimizers[number].load_state_dict(state["optim"])
    part = PipelineStage(model, stage, stages, torch.device("cpu"), group=line)
    numbers = list(range(count))[copy::copies]
    schedule = Schedule1F1B(part, len(numbers), cut.loss, scale_grads=False)
    made, saved_s = Made(folder, "0") if rank == 0 else None, time.monotonic()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for step in range(start, _STEPS):
        inputs, targets = cut.load(step, numbers)
        first = (inputs,) if stage == 0 else ()
        schedule.step(*first, target=targets if stage == stages - 1 else None)
        _add_up(model, flat, peers, count)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if made is not None:
            made.note(step, count, places)
        due = time.monotonic() - saved_s >= SAVE_EVERY_S or (folder / "notice").exists()
        flag = torch.tensor([float(due)])
        dist.broadcast(flag, 0)
        if not flag.item():
            continue
        saved_s = time.monotonic()
        where = folder / f"step-{step + 1}"
        where.mkdir(exist_ok=True)
        for number in mine if copy == 0 else ():
            state = {"model": blocks[number].state_dict(), "optim": optimizers[number].state_dict()}
            torch.save(state, where / f"block-{number}.pt")
        dist.barrier()
        if rank == 0:
            (folder / "notice").unlink(missing_ok=True)
            latest.with_suffix(".tmp").write_text(str(step + 1))
            latest.with_suffix(".tmp").rename(latest)


def _add_up(model: nn.Module, flat: Tensor, peers: Any, count: int) -> None:
    """Sum the gradients over the copies of a stage, through `flat`; make them means."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.cat([grad.view(-1) for grad in grads], out=flat)
    dist.all_reduce(flat, group=peers)
    flat.div_(count)
    for grad, summed in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def train_torchft(folder: Path, count: int, pace_s: float, places: str, more: str) -> None:
    """Train as one replica group of torchft, which has its share of every step or none."""
    import torchft

    from perdure.worker.torchft.manager import mend_hook

    mend_hook(torchft)
    model, inner = make_model()
    group, each = int(os.environ["REPLICA_GROUP_ID"]), count // int(places)
    made, device = Made(folder, str(group)), Device(pace_s, count)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    timeout = timedelta(seconds=float(more))
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replay_{group}",
        timeout=timeout,
        hostname="127.0.0.1",
    )
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    while (step := manager.current_step()) < _STEPS:
        optimizer.zero_grad()
        losses = [device.compute(ddp, step, group * each + m) for m in range(each)]
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
        if manager.current_step() > step:
            made.note(step, each, [group])


def main(words: Sequence[str]) -> None:
    """Train as the arguments say."""
    mode, folder, count, pace_s, places, *more = words
    trains: dict[str, Callable[..., None]]
    trains = {"elastic": train_elastic, "ddp": train_ddp, "torchft": train_torchft}
    trains["pipeline"] = train_pipeline
    trains[mode](Path(folder), int(count), float(pace_s), places, *more)


if __name__ == "__main__":
    main(sys.argv[1:])
