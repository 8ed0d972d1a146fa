"""The sharded state: what `Replica` is to a replicated one, for a member that has one shard of it.

Parameters are torch's DTensors, and so are the optimizer's moments. Everything else (learning
rates, counts of steps, the schedule, buffers) is small and the same on every member: the *plain*
part. An update may not communicate, or a loss in the middle of it would leave shards of different
steps: gradients are clipped before they are cut, and the optimizer has to work element by element.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from perdure.model.errors import ConfigError
from perdure.plan.elastic.shards import Shard
from perdure.worker.elastic.group import Copy
from perdure.worker.elastic.state import load_settings, read_settings
from perdure.worker.elastic.state.fsdp import PARAMETER, Parts, Skeleton, release, shard_like
from perdure.worker.elastic.state.replicated import BufferGuard


class ShardedReplica:
    """A model of which this member has a shard, with its optimizer and schedule."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
        *,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_norm: float = 0.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Shard `model`, once `adopt` says how; `options` go to `fully_shard`."""
        self.skeleton = Skeleton(model, options or {})
        self.stand_ins = self.skeleton.stand_ins()
        self.parameters = list(self.stand_ins.values())
        self.model: nn.Module | None = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.shard: Shard | None = None
        self.begun: Callable[[], object] = lambda: None
        """Hears that the first world's optimizer is there, as it was given."""
        self._initial: nn.Module | None = model
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self._clip_norm = clip_norm
        self._sharded: dict[str, Tensor] = {}
        self._guard: BufferGuard | None = None
        self._updated = False
        self._counts = True
        """The pass under way counts: its gradients are taken."""
        self._before: dict[str, Tensor | None] = {}
        """Gradients as they were before the pass under way."""
        self._on_gradient: Callable[[Tensor], object] = lambda parameter: None

    def now(self) -> nn.Module:
        """Return the model of the newest world."""
        assert self.model is not None
        return self.model

    # --- the state ----------------------------------------------------------------------------

    def parts(self) -> Parts:
        """Return this member's rows of everything; tensors are not copied.

        Before the first world, the whole initial model.
        """
        if self._initial is not None:
            return {name: {PARAMETER: p.detach()} for name, p in self._initial.named_parameters()}
        parts: Parts = {}
        for name, parameter in self._sharded.items():
            parts[name] = {PARAMETER: _local(parameter)}
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    parts[name][key] = _local(value)
        return parts

    def plain(self) -> dict[str, Any]:
        """Return what every member has alike, and which rows there are."""
        model = self._initial if self._initial is not None else self.model
        assert model is not None
        plain: dict[str, Any] = {
            "buffers": {name: b.detach().cpu() for name, b in model.named_buffers()},
            "keys": {
                name: {key: value.dtype for key, value in entries.items()}
                for name, entries in self.parts().items()
            },
        }
        if self._initial is None:
            plain |= read_settings(self.optimizer, self.scheduler)
            plain["scalars"] = {
                name: {
                    key: value
                    for key, value in self.optimizer.state.get(parameter, {}).items()
                    if not isinstance(value, DTensor)
                }
                for name, parameter in self._sharded.items()
            }
        return plain

    def adopt(
        self,
        group: Copy,
        shard: Shard,
        parts: Parts,
        plain: dict[str, Any],
    ) -> None:
        """Become `parts`, the rows of `shard`, sharded over `group`. Nothing here communicates."""
        device = self.skeleton.device
        placed = {
            name: {key: value.to(device) for key, value in entries.items()}
            for name, entries in parts.items()
        }
        self.model = self.skeleton.build(group, shard, placed, plain["buffers"], self._take)
        self._sharded = dict(self.model.named_parameters())
        self.optimizer = self._make_optimizer(list(self._sharded.values()))
        self.scheduler = self._make_scheduler(self.optimizer) if self._make_scheduler else None
        for name, parameter in self._sharded.items():
            state = dict(plain.get("scalars", {}).get(name, {}))
            for key, value in placed[name].items():
                if key != PARAMETER:
                    state[key] = shard_like(value, parameter, self.skeleton.shapes[name])
            if state:
                self.optimizer.state[parameter] = {
                    key: value.clone() if not isinstance(value, DTensor | float | int) else value
                    for key, value in state.items()
                }
        load_settings(self.optimizer, self.scheduler, plain)
        if "groups" not in plain:
            self.begun()
        self.shard = shard
        self._empty_initial()
        self._updated = False
        self._guard = BufferGuard(self.model)

    def _empty_initial(self) -> None:
        """Free the model that was given, as far as nobody is to be sent of it."""
        if self._initial is not None:
            for parameter in self._initial.parameters():
                parameter.data = parameter.data.new_empty(0)
        self._initial = None

    def release(self) -> None:
        """The world is left: free what is gathered."""
        if self.model is not None:
            release(self.model)

    # --- a step -------------------------------------------------------------------------------

    def watch(self, on_gradient: Callable[[Tensor], object]) -> None:
        """Tell `on_gradient` of each stand-in whose gradient of a pass is there."""
        self._on_gradient = on_gradient

    def backward(self, loss: Tensor, counts: bool) -> None:
        """Add a pass's gradients to those of the stand-ins, if it `counts`.

        Where the gathering breaks in the middle, what the pass has added is taken back.
        """
        self._counts = counts
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            for name, gradient in self._before.items():
                self.stand_ins[name].grad = gradient
            raise
        finally:
            self._before.clear()

    def _take(self, name: str, parameter: Tensor) -> None:
        """A gathered parameter's gradient of this pass is there."""
        if not self._counts:
            return
        stand_in, gradient = self.stand_ins[name], parameter.grad
        assert gradient is not None
        gradient = gradient.to(stand_in.dtype)
        self._before.setdefault(name, stand_in.grad)
        stand_in.grad = gradient if stand_in.grad is None else stand_in.grad + gradient
        self._on_gradient(stand_in)

    def update(self) -> None:
        """Apply the gradients that the stand-ins have, whole: this member's rows of them.

        Raises:
            ConfigError: the optimizer communicates.
        """
        assert self.shard is not None
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
        for name, stand_in in self.stand_ins.items():
            gradient, parameter = stand_in.grad, self._sharded[name]
            assert gradient is not None
            rows = self.shard.rows(len(gradient))
            parameter.grad = shard_like(
                gradient[rows.start : rows.stop], parameter, self.skeleton.shapes[name]
            )
        if self._updated:
            self.optimizer.step()
        else:
            self._update_watched()
        if self.scheduler is not None:
            self.scheduler.step()
        for parameter in self._sharded.values():
            parameter.grad = None

    def _update_watched(self) -> None:
        """Do the first update of a world, and see that it does not communicate."""
        with CommDebugMode() as watch:  # type: ignore[no-untyped-call]
            self.optimizer.step()
        if watch.get_total_counts():
            raise ConfigError(
                f"elastic: {type(self.optimizer).__name__} communicates to update sharded "
                "parameters, which a loss could interrupt half-way",
                hint="use one that works element by element, such as AdamW or SGD, or no shard=",
            )
        self._updated = True

    def refuse_buffers(self) -> None:
        """Refuse a model whose forward pass alters its buffers; see `BufferGuard`."""
        if self._guard is not None:
            self._guard.check()


def _local(value: Tensor) -> Tensor:
    assert isinstance(value, DTensor)
    return value._local_tensor.detach()
