"""The elastic depth: a rank dies, and the others do not even leave their training loop.

    perdure.elastic.train(
        blocks=[...], optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        dataset=dataset, loss=cross_entropy, global_batch=64, micro_batch=8, steps=1000,
    )

Under `perdure run` the survivors of a death form a new world in place. Alone, or under torchrun,
the same script trains. What a step computes depends on (seed, step, micro-batch) and never on
how many ranks there are.
"""

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from perdure.model.errors import ConfigError
from perdure.model.planning.costs import ASK, read_profile
from perdure.plan.elastic.microbatches import BatchPlan, plan_batches
from perdure.plan.elastic.stage_orders import INTERLEAVED_RUNS, SCHEDULES, StageSchedule
from perdure.plan.elastic.stages import Choose, Model, choose_balanced
from perdure.plan.training_plan import TrainingPlan
from perdure.worker.attach import attach_rank
from perdure.worker.checkpoint.script import Functions, list_generators, list_ids
from perdure.worker.data import MicroBatches, Prefetcher
from perdure.worker.elastic.gradients import BUCKET_BYTES
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.moving import hash_tensors as hash_tensors
from perdure.worker.elastic.moving import map_tensors
from perdure.worker.elastic.snapshots import locate_memory
from perdure.worker.elastic.state.replicated import (
    AfterUpdate,
    Replica,
    ReplicatedState,
    make_model,
    refuse_hooks,
)
from perdure.worker.elastic.trainer import Step, Trainer
from perdure.worker.steering.config import Config, Value
from perdure.worker.steering.learning_rate import declare_rate
from perdure.worker.system.stderr import say

if TYPE_CHECKING:
    from perdure.plan.elastic.stage_choice import PlannedChoice

__all__ = [
    "Step", "Trainer", "config", "hash_tensors", "open_pipeline_trainer", "open_sharded_trainer",
    "open_trainer", "train",
]  # fmt: skip

config = settings = Config()
"""The script's live settings, the same on every member at the same step (`perdure set`). Declared
before training, with the values they start with; `lr`, the base learning rate, is there anyhow."""


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
    shard: int | Literal["full"] | None = None,
    pipeline: int | str | os.PathLike[str] | None = None,
    recompute: bool = False,
    schedule: str = "1f1b",
    snapshot_every: int = 10,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    scaler: Any = None,
    clip_norm: float = 0.0,
    config: Mapping[str, Value] | None = None,
    device: str | torch.device = "cpu",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    on_step: Callable[[Step], object] | None = None,
    after_update: AfterUpdate | None = None,
) -> torch.nn.Module:
    """Train `blocks`, a module or a list of modules called in order, and return the model.

    `dataset` is map-style and yields (input, target); one without a length is an endless stream
    with the same sample at the same position on every rank. `num_workers` processes beside each
    rank load it ahead. `loss(output, target)` is a mean over its micro-batch. `optimizer` makes an
    optimizer of the parameters, `scheduler` a schedule of the optimizer, stepped once a step.
    `on_step` is called on every rank after each committed step; it may read the state and not write
    it. `after_update(model)` is a part of each update. `config` declares settings by name and
    default, to be read from `perdure.elastic.config`. `scaler` is a `torch.amp.GradScaler` (for
    replicated state); what it skips, all skip. With `exact`, losses are bitwise the same whatever
    the world was. With `shard`, torch's `fully_shard` spreads each copy of the state over that many
    ranks or some more, or one copy over all (`"full"`); the model that is returned is sharded. With
    `pipeline`, each copy of the list of blocks is cut into so many stages, or as a cost profile in
    that file says; with `recompute`, only the inputs of blocks are kept for backward; `schedule` is
    "1f1b", "zero-bubble" or "interleaved". It returns the blocks of this rank's stage. Every
    `snapshot_every` steps, or sooner, each rank's shard or stage is copied to shared memory.

    Raises:
        ConfigError: something is refused (docs/elastic.md, What is refused).
    """
    settings.declare_all(config or {})
    if ASK in os.environ:
        importlib.import_module("perdure.worker.profiling").measure_call(locals())
    model = make_model(blocks).to(device)
    plan = plan_batches(global_batch, micro_batch)
    data = MicroBatches(dataset, plan, seed=seed, shuffle=shuffle, collate_fn=collate_fn)
    unshared = _Unshared(model, dataset, loss=loss, on_step=on_step, after_update=after_update)
    with contextlib.closing(Prefetcher(data.load, num_workers)) as ahead:
        trainer = _open(
            model, ahead.load, optimizer, unshared.watch(loss), device=device, shard=shard,
            pipeline=_choose_by(pipeline, plan, recompute=recompute), recompute=recompute,
            schedule=schedule, scheduler=scheduler, scaler=scaler, snapshot_every=snapshot_every,
            common={"micro_batches": plan.count, "seed": seed, "exact": exact,
                    "clip_norm": clip_norm, "after_update": after_update},
        )  # fmt: skip
        del trainer.plan["micro_batches"]
        trainer.plan.update(data.plan | {"loss": _name_kind(loss)})
        unshared.replica = trainer.state.replica
        for step in trainer.steps(steps):
            if on_step is not None:
                on_step(step)
                unshared.look()
    return trainer.model


class _Unshared:
    """Names what functions of the script keep, and members do not have in common."""

    def __init__(self, model: torch.nn.Module, dataset: Any, **functions: Any) -> None:
        self.replica: Any = None
        self._model, self._left = model, _LOOKS
        self._functions = Functions(**functions)
        self._tell(list(list_generators("dataset", dataset)))

    def watch(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """Return `loss`, which is looked at after each of its first calls."""

        def call(output: Any, target: Any) -> Tensor:
            found = loss(output, target)
            self.look()
            return found

        return call

    def look(self) -> None:
        """Say what has changed, as long as training is young."""
        if self._left and self.replica is not None:
            self._left -= 1
            optimizer = self.replica.optimizer
            several = [optimizer, self.replica.scheduler, *vars(optimizer or self).values()]
            self._tell(self._functions.look(list_ids(self._model) | set(map(id, several))))

    def _tell(self, names: list[str]) -> None:
        if names:
            say(
                f"elastic: members do not have {', '.join(names[:5])} in common: it changes while "
                "training, and a rank that joins begins with its own"
            )


_LOOKS = 12
"""Calls of the loss and of `on_step` after which perdure looks at what they keep."""


def _open(
    model: torch.nn.Module,
    load_host: Callable[[int, int], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[Any, Any], Tensor],
    *,
    device: str | torch.device,
    shard: int | Literal["full"] | None,
    pipeline: "int | PlannedChoice | None",
    recompute: bool,
    schedule: str,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    scaler: Any,
    snapshot_every: int,
    common: dict[str, Any],
) -> Trainer:
    """Return the loop over a model that is replicated, sharded, or cut into stages."""

    def load(step: int, number: int) -> Any:
        inputs, targets = load_host(step, number)
        return map_tensors((inputs, targets), lambda tensor: tensor.to(device))

    def run(model: Callable[[Any], Any], step: int, number: int) -> Tensor:
        inputs, targets = load(step, number)
        return loss(model(inputs), targets)

    _check_schedule(schedule, pipeline)
    refuse_hooks(model)
    if pipeline is not None and shard is not None:
        raise ConfigError("elastic: shard= and pipeline= are alternatives", hint="leave out one")
    if scaler is not None and (pipeline or shard) is not None:
        raise ConfigError("elastic: scaler= is for replicated state", hint="train in bfloat16")
    if pipeline is not None:
        return open_pipeline_trainer(
            list_blocks(model), optimizer, load, loss, stages=pipeline, scheduler=scheduler,
            snapshot_every=snapshot_every, device=device, recompute=recompute,
            schedule=schedule, **common,
        )  # fmt: skip
    if shard is not None:
        return open_sharded_trainer(
            model, optimizer, run, shard=shard, snapshot_every=snapshot_every,
            scheduler=scheduler, **common,
        )  # fmt: skip
    made = optimizer(model.parameters())
    stepped = scheduler(made) if scheduler is not None else None
    compute = functools.partial(run, model)
    return open_trainer(model, made, compute, scheduler=stepped, scaler=scaler, **common)


def open_trainer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    compute: Callable[[int, int], Tensor],
    *,
    micro_batches: int,
    seed: int = 0,
    exact: bool = False,
    scheduler: Any = None,
    scaler: Any = None,
    clip_norm: float = 0.0,
    after_update: AfterUpdate | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Trainer:
    """Return a loop for those who write their own: `for step in trainer.steps(total): ...`.

    `compute(step, micro_batch)` returns the mean loss of a micro-batch; it is called for each
    micro-batch once by some rank, and has to depend on its arguments alone. Generators are
    seeded for it. A loss is to be returned unscaled; `scaler` is applied to it here.
    """
    membership = Membership(attach_rank())
    _declare_rate(optimizer, lambda: ([optimizer], [scheduler]))
    replica = Replica(
        model, optimizer, scheduler=scheduler, scaler=scaler, clip_norm=clip_norm,
        after_update=after_update,
    )  # fmt: skip
    state = ReplicatedState(
        replica, compute, count=micro_batches, seed=seed, exact=exact, bucket_bytes=bucket_bytes
    )
    plan = _plan(model, micro_batches, seed, exact, clip_norm)
    plan |= _name_parts(optimizer, scheduler, after_update)
    return Trainer(state, membership=membership, config=config, plan=plan)


def _plan(
    model: torch.nn.Module, micro_batches: int, seed: int, exact: bool, clip_norm: float
) -> TrainingPlan:
    """Return what all members have to have in common."""
    return {
        "micro_batches": str(micro_batches),
        "seed": str(seed),
        "exact": str(exact),
        "clip_norm": str(float(clip_norm)),
        "parameters": {name: _describe(p) for name, p in model.named_parameters()},
        "modules": {path: _name_kind(module) for path, module in model.named_modules()},
    }


def _name_parts(optimizer: Any, scheduler: Any, after_update: Any) -> TrainingPlan:
    """Return the names of what updates the state, for members to compare."""
    return {
        "optimizer": _name_kind(optimizer),
        "scheduler": _name_kind(scheduler),
        "after_update": _name_kind(after_update),
    }


def _name_kind(value: Any) -> str:
    """Return what an object is, with the settings of a module of torch; or a function's name."""
    kind = type(value)
    if isinstance(value, torch.nn.Module) and kind.__module__.startswith("torch.nn."):
        return f"{kind.__name__}({value.extra_repr()})"
    return str(getattr(value, "__qualname__", kind.__qualname__))


def _describe(parameter: Tensor) -> str:
    """Return the type, shape and layout of a parameter."""
    if is_lazy(parameter):
        return "lazy"
    words = f"{parameter.dtype} {list(parameter.shape)}".removeprefix("torch.")
    if parameter.layout != torch.strided:
        return f"{words} {parameter.layout}"
    return words if parameter.is_contiguous() else f"{words} strides {parameter.stride()}"


def _declare_rate(
    optimizer: torch.optim.Optimizer, find: Callable[[], tuple[list[Any], list[Any]]]
) -> None:
    """Declare `lr`, unless the script has one of its own."""
    if "lr" not in config:
        declare_rate(config, [optimizer], find)


def open_sharded_trainer(
    model: torch.nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    compute: Callable[[torch.nn.Module, int, int], Tensor],
    *,
    shard: int | Literal["full"],
    micro_batches: int,
    snapshot_every: int = 10,
    seed: int = 0,
    exact: bool = False,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float = 0.0,
    after_update: AfterUpdate | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    options: Mapping[str, Any] | None = None,
) -> Trainer:
    """Return a loop over a sharded `model`: what `open_trainer` is to a replicated one.

    The model, its optimizer and its schedule are made anew for each world, so that the last two
    are given as what makes them, and `compute(model, step, micro_batch)` is given the newest
    model. It may be called once more for a micro-batch that counts only once, to keep others
    company. `options` go to `fully_shard`.

    Raises:
        ConfigError: `shard` is no number of ranks.
    """
    from perdure.worker.elastic.state.sharded import ShardedReplica, ShardedState

    if shard != "full" and (not isinstance(shard, int) or shard < 1):
        raise ConfigError(f"elastic: shard={shard!r} is neither a number of ranks nor 'full'")
    membership = Membership(attach_rank())
    replica = ShardedReplica(
        model, optimizer, scheduler=scheduler, clip_norm=clip_norm, options=dict(options or {}),
        after_update=after_update,
    )  # fmt: skip
    sample = optimizer(replica.parameters)  # For its rates: each world has one of its own.
    plan = _plan(model, micro_batches, seed, exact, clip_norm)
    plan |= _name_parts(sample, scheduler, after_update)
    _declare_rate(sample, lambda: ([replica.optimizer], [replica.scheduler]))
    replica.begun = lambda: config.reapply("lr")
    state = ShardedState(
        replica,
        lambda step, micro_batch: compute(replica.model, step, micro_batch),
        me=membership.me,
        count=micro_batches,
        seed=seed,
        minimum=0 if shard == "full" else shard,
        exact=exact,
        snapshot_every=snapshot_every,
        memory=locate_memory(),
        bucket_bytes=bucket_bytes,
    )
    return Trainer(state, membership=membership, config=config, plan=plan)


def open_pipeline_trainer(
    blocks: Sequence[torch.nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    load: Callable[[int, int], Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    stages: "int | PlannedChoice",
    micro_batches: int,
    snapshot_every: int = 10,
    seed: int = 0,
    exact: bool = False,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_norm: float = 0.0,
    after_update: AfterUpdate | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    recompute: bool = False,
    schedule: str = "1f1b",
    device: str | torch.device = "cpu",
) -> Trainer:
    """Return a loop over `blocks` cut into `stages`: what `open_trainer` is to a replicated model.

    `stages` is a number of them, or what chooses by a cost profile. `load(step, micro_batch)`
    returns (inputs, targets); the ranks of the first and of the last stage call it. A block takes
    and returns a tensor, or a tuple of tensors. With `recompute`, only the inputs of blocks are
    kept between forward and backward. `schedule` is "1f1b"; or "zero-bubble", for a model whose
    gradients of weights can be put off; or "interleaved", where each rank has two runs of blocks.

    Raises:
        ConfigError: `stages` does not fit the ranks or the model, or blocks share a parameter.
    """
    from perdure.worker.elastic.state.blocks import StagedReplica
    from perdure.worker.elastic.state.staged import StagedState

    if isinstance(stages, int) and stages < 1:
        raise ConfigError(f"elastic: pipeline={stages!r} is no number of stages")
    if not isinstance(stages, int) and stages.blocks != len(blocks):
        raise ConfigError(
            f"elastic: the cost profile has {stages.blocks} blocks, the model {len(blocks)}",
            hint="profile the list of blocks that is trained",
        )
    membership = Membership(attach_rank())
    replica = StagedReplica(
        blocks, optimizer, scheduler=scheduler, clip_norm=clip_norm, after_update=after_update
    )
    plan = _plan(torch.nn.ModuleList(blocks), micro_batches, seed, exact, clip_norm)
    plan |= _name_parts(replica.optimizer, replica.scheduler, after_update)
    _declare_rate(replica.optimizer, lambda: ([replica.optimizer], [replica.scheduler]))
    choose: Choose = stages  # type: ignore[assignment]
    if isinstance(stages, int):
        runs = INTERLEAVED_RUNS if schedule == "interleaved" else 1
        model = Model(weights=replica.weights, sizes=replica.sizes, stages=stages, runs=runs)
        choose = functools.partial(choose_balanced, model)
    state = StagedState(
        replica,
        load,
        loss,
        me=membership.me,
        count=micro_batches,
        seed=seed,
        exact=exact,
        choose=choose,
        snapshot_every=snapshot_every,
        memory=locate_memory(),
        bucket_bytes=bucket_bytes,
        recompute=recompute,
        schedule=_check_schedule(schedule, stages),
        device=device,
    )
    return Trainer(state, membership=membership, config=config, plan=plan)


def _check_schedule(name: str, stages: "int | PlannedChoice | None") -> StageSchedule:
    """Return the schedule of that name.

    Raises:
        ConfigError: it is none for such stages.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"elastic: schedule={name!r} is none of {', '.join(SCHEDULES)}")
    if name != "1f1b" and not isinstance(stages, int):
        raise ConfigError(
            f"elastic: schedule={name!r} needs pipeline=N",
            hint="a cost profile chooses among worlds in 1f1b",
        )
    return name


def _choose_by(
    pipeline: int | str | os.PathLike[str] | None, plan: BatchPlan, *, recompute: bool
) -> "int | PlannedChoice | None":
    """Return a number of stages, or what chooses by the cost profile in a file.

    Raises:
        ConfigError: the file cannot be read, or is no cost profile of such micro-batches.
    """
    from perdure.plan.elastic.stage_choice import PlannedChoice

    if pipeline is None or isinstance(pipeline, int):
        return pipeline
    try:
        text = Path(pipeline).read_text()
    except OSError as error:
        raise ConfigError(f"elastic: no cost profile at {pipeline}: {error.strerror}") from None
    memory = 0
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    profile = read_profile(text, str(pipeline))
    return PlannedChoice(
        profile, plan.global_batch, plan.micro_batch, recompute=recompute, memory_bytes=memory
    )


def list_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks of a model that is called block by block.

    Raises:
        ConfigError: it is one module, of which nothing says where it can be cut.
    """
    if not isinstance(model, torch.nn.Sequential):
        raise ConfigError(
            f"elastic: {type(model).__name__} cannot be cut into stages",
            hint="give a list of blocks, called in order",
        )
    return list(model)
