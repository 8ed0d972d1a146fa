"""The elastic depth: a rank dies, and the others do not even leave their training loop.

    perdure.elastic.train(
        blocks=[...], optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        dataset=dataset, loss=cross_entropy, global_batch=64, micro_batch=8, steps=1000,
    )

Under `perdure run` the survivors of a death form a new world in place. Alone, or under torchrun,
the same script trains. What a step computes depends on (seed, step, micro-batch) and never on
how many ranks there are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perdure.plan.microbatches import plan_batches
from perdure.worker.attach import attach_rank
from perdure.worker.elastic.data import MicroBatches
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.replica import Replica, make_model
from perdure.worker.elastic.state import hash_tensors as hash_tensors
from perdure.worker.elastic.trainer import BUCKET_BYTES, Step, Trainer

__all__ = ["Step", "Trainer", "hash_tensors", "open_trainer", "train"]


def train(
    *,
    blocks: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    dataset: Any,
    loss: Callable[[Any, Any], Tensor],
    global_batch: int,
    micro_batch: int,
    steps: int,
    seed: int = 0,
    shuffle: bool = True,
    exact: bool = False,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float = 0.0,
    device: str | torch.device = "cpu",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    on_step: Callable[[Step], object] | None = None,
) -> torch.nn.Module:
    """Train `blocks`, a module or a list of modules called in order, and return the model.

    `dataset` is map-style and yields (input, target); one without a length is an endless stream
    that gives the same sample for the same position on every rank. `loss(output, target)` is a
    mean over its micro-batch. `optimizer` makes an optimizer of the parameters, `scheduler` a
    schedule of the optimizer, stepped once a step. `on_step` is called on every rank after each
    committed step.
    With `exact`, losses are bitwise the same whatever the world was (see docs/elastic.md).

    Raises:
        ConfigError: the global batch is not whole micro-batches, the data cannot be positioned,
            or the model's forward pass alters its buffers.
    """
    model = make_model(blocks).to(device)
    plan = plan_batches(global_batch, micro_batch)
    data = MicroBatches(dataset, plan, seed=seed, shuffle=shuffle, collate_fn=collate_fn)
    made = optimizer(model.parameters())

    def compute(step: int, number: int) -> Tensor:
        inputs, targets = data.load(step, number)
        return loss(model(move_to(inputs, device)), move_to(targets, device))

    trainer = open_trainer(
        model,
        made,
        compute,
        micro_batches=plan.count,
        seed=seed,
        exact=exact,
        scheduler=scheduler(made) if scheduler is not None else None,
        clip_norm=clip_norm,
    )
    for step in trainer.steps(steps):
        if on_step is not None:
            on_step(step)
    return model


def open_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compute: Callable[[int, int], Tensor],
    *,
    micro_batches: int,
    seed: int = 0,
    exact: bool = False,
    scheduler: Any = None,
    clip_norm: float = 0.0,
    bucket_bytes: int = BUCKET_BYTES,
) -> Trainer:
    """Return a loop for those who write their own: `for step in trainer.steps(total): ...`.

    `compute(step, micro_batch)` returns the mean loss of a micro-batch; it is called for each
    micro-batch once by some rank, and has to depend on its arguments alone. Generators are
    seeded for it.
    """
    attachment = attach_rank()
    if attachment is not None:
        attachment.enter("init")
    return Trainer(
        Replica(model, optimizer, scheduler=scheduler, clip_norm=clip_norm),
        compute,
        count=micro_batches,
        seed=seed,
        exact=exact,
        membership=Membership(attachment),
        bucket_bytes=bucket_bytes,
    )


def move_to(value: Any, device: str | torch.device) -> Any:
    """Return `value`, a tensor or a collection of them, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move_to(one, device) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([move_to(one, device) for one in value])
    return value
