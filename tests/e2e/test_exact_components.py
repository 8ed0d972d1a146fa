"""Checkpointer and DDP or FSDP2 over real gloo ranks: what is resumed goes on bitwise equal.

Each rank trains to the end, then builds everything anew from another seed (a new reducer has the
first bucket layout again, as in a new process), restores, and trains the rest again.
"""

import errno
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from perdure.model.events import (  # noqa: E402
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
)
from perdure.model.job import CheckpointConfig  # noqa: E402
from perdure.worker.checkpoint import Checkpointer, checkpointer  # noqa: E402
from perdure.worker.checkpoint.registry import Registry, read_bucket_order  # noqa: E402
from tests.waiting import PATIENCE_S  # noqa: E402

pytestmark = pytest.mark.torch
STEPS = 6
WIDTH = 24


class Net(nn.Module):
    """Uses its layers in another order than it declares them; one of them never."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)
        return self.last(self.middle(x).relu() + x)


class Sparing(Net):
    """Has a head without a gradient so far: its optimizer state does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (model.first, model.middle, model.last):
            fully_shard(layer)
        return fully_shard(model)
    options: dict[str, Any] = {
        "static": {"static_graph": True},
        "sparing": {"find_unused_parameters": True},
        "view": {"gradient_as_bucket_view": True},
    }.get(kind, {})
    return DistributedDataParallel(model, bucket_cap_mb=0.003, **options)


class Training:
    """Everything one rank holds."""

    def __init__(self, folder: str, kind: str, seed: int, generation: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = wrap(Sparing() if kind == "sparing" else Net(), kind)
        torch.manual_seed(seed + 50 * (1 + dist.get_rank()))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.events: list[Any] = []
        self.saver = Checkpointer(
            url=folder,
            config=CheckpointConfig(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            generation=generation,
            emit=self.events.append,
            now=lambda: 0.0,
        )
        self.saver.register("model", self.model)
        self.saver.register("optimizer", self.optimizer)
        self.saver.register("scheduler", self.scheduler)

    def train(self, start: int, stop: int, save_at: int = -1) -> list[str]:
        losses = []
        for step in range(start, stop):
            total = 0.0
            for micro_batch in range(2):
                last = micro_batch == 1 or self.kind in ("fsdp", "static")
                data = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank())
                x = torch.randn(5, WIDTH, generator=data) * (1 + micro_batch)
                with nullcontext() if last else self.model.no_sync():
                    loss = (self.model(x) - x).square().mean()
                    loss.backward()
                total += loss.item()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(total.hex())
            if step + 1 == save_at:
                self.saver.save(save_at, reason="test", extra={})
        self.saver.close()
        return losses

    def values(self) -> list[bytes]:
        """Return the bits of every parameter (or this rank's shard) and buffer."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return [t.detach().numpy().tobytes() for t in local]


def compare(folder: str, kind: str, save_at: int) -> str:
    one = Training(folder, kind, seed=1, generation=0)
    whole = one.train(0, STEPS, save_at)
    failed = [e.error for e in one.events if isinstance(e, CheckpointFailed)]
    if failed:
        return f"save: {failed}"
    dist.barrier()
    two = Training(folder, kind, seed=2, generation=1)
    step = two.saver.restore({})
    (restored,) = [e for e in two.events if isinstance(e, CheckpointRestored)]
    if step != save_at:
        return f"restored {step}"
    if kind == "static":
        return "" if "static_graph" in restored.why_not_exact else "static graph called exact"
    if restored.why_not_exact:
        return restored.why_not_exact
    rest = two.train(step, STEPS)
    if rest != whole[step:]:
        return f"losses: {rest} != {whole[step:]}"
    if one.values() != two.values():
        return "parameters or buffers differ"
    if kind != "fsdp" and read_bucket_order(one.model) != read_bucket_order(two.model):
        return "buckets differ"
    return ""


def compare_without_replay(folder: str) -> str:
    """Return nothing if the test above can fail: DDP's own order gives other sums."""
    Registry.replay = lambda self, own: []
    found = compare(folder, "ddp", 3)
    return "" if "differ" in found or "losses" in found else f"expected a difference: {found}"


def fail_on_one_rank(folder: str) -> str:
    """One rank's disk is full at the first save; training and the second save go on."""
    one = Training(folder, "ddp", seed=1, generation=0)
    rank, write = dist.get_rank(), checkpointer.write_tensors
    if rank == 1:
        checkpointer.write_tensors = write_to_full_disk
    one.train(0, 2, save_at=1)
    checkpointer.write_tensors = write
    failed = [e.error for e in one.events if isinstance(e, CheckpointFailed)]
    if list(Path(folder).glob("step-*[0-9]")):
        return f"published: {failed}"
    if failed != (["rank 1: No space left on device: somewhere"] if rank == 0 else []):
        return f"said {failed}"
    one.train(2, 4, save_at=3)
    saved = [e.step for e in one.events if isinstance(e, CheckpointSaved)]
    return "" if saved == ([3] if rank == 0 else []) else f"saved {saved}"


def write_to_full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def run_rank(rank: int, world: int, meet: str, case: Callable[..., str], args: Any) -> None:
    torch.set_num_threads(1)
    checkpointer.TIMEOUT_S = 3_600.0  # So that another rank's failure alone ends a wait.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=world)
    folder, queue, *rest = args
    try:
        found = case(folder, *rest)
    except BaseException as error:
        import traceback

        found = f"{error!r} {traceback.format_exc()}"
    queue.put((rank, found))
    queue.close()
    queue.join_thread()
    os._exit(0)


def run_ranks(world: int, case: Callable[..., str], *args: Any) -> None:
    """Run `case` on `world` ranks; fail with the first thing that any of them found wrong."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "tests.e2e.test_exact_components"])
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory() as meeting,
    ):
        meet = f"{meeting}/store"
        queue = context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(r, world, meet, case, (folder, queue, *args)))
            for r in range(world)
        ]
        try:
            for rank in ranks:
                rank.start()
            found = dict(queue.get(timeout=PATIENCE_S) for _ in ranks)
            assert list(Path(folder).glob("*.tmp")) == []
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("world", "kind", "save_at"),
    [
        (2, "ddp", 3),
        pytest.param(3, "ddp", 3, marks=pytest.mark.long),
        pytest.param(3, "ddp", 1, marks=pytest.mark.long),
        pytest.param(4, "ddp", 2, marks=pytest.mark.long),
        pytest.param(3, "view", 2, marks=pytest.mark.long),
        pytest.param(3, "static", 2, marks=pytest.mark.long),
        pytest.param(3, "sparing", 2, marks=pytest.mark.long),
        (2, "fsdp", 3),
    ],
)
def test_rest_is_bitwise_equal(world: int, kind: str, save_at: int) -> None:
    run_ranks(world, compare, kind, save_at)


def test_without_the_recorded_order_three_ranks_differ() -> None:
    run_ranks(3, compare_without_replay)


def test_full_disk_of_one_rank_is_said_once_and_training_goes_on() -> None:
    run_ranks(3, fail_on_one_rank)
