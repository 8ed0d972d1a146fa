"""What the script registered, sorted by how it is saved.

Parameters and their optimizer state go through torch.distributed.checkpoint by name: sharded ones
(FSDP2) as shards that can be read into another sharding; those of DDP, which are equal on every
rank, once, split over the ranks. What nothing keeps equal is each rank's own: buffers (BatchNorm's
statistics differ from rank to rank until the next broadcast), schedulers, scalers, the script's
objects, and, of several ranks, parameters outside DDP and FSDP2 (they may be a pipeline's stage).

An optimizer's state is saved by parameter name, as it is: nothing initialised, nothing cast.
Torch's own way (`get_optimizer_state_dict`) takes a step with zero gradients where there is no
state yet and then asks the checkpoint for state that never existed; `load_state_dict` casts
moments to the parameter's type. Both change what a resumed step computes.

DDP's bucket order is recorded and played back. DDP reduces gradients in buckets. It fills them in
the reverse order of the parameters at first, and before its second forward rebuilds them in the
order in which gradients became ready. A resumed process would begin with the first layout again,
and with three ranks or more a sum in another layout rounds differently. So the rebuilt order lies
in the checkpoint, and on resume one synthetic backward makes gradients ready in that order, so that
the reducer rebuilds what it had. It needs no batch, calls none of the script's code and leaves no
gradient.

Not played back: `static_graph`, whose first backward counts how often each hook fires (a count of
a synthetic backward could be wrong, and then gradients would be, silently), and sparse gradients.
Those resume with what DDP does by itself, and the claim of exactness is dropped. With
`find_unused_parameters` DDP never rebuilds, and nothing need be done.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from perdure.model.errors import ConfigError


class Registry:
    """The registered objects of one rank."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        """Start empty, on global rank `rank`."""
        self._rank, self._mark = rank, f"@{rank}"
        self._world_size = world_size
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self._orders: dict[str, list[str]] = {}

    def add(self, name: str, value: Any) -> None:
        """Register one object under its name."""
        if isinstance(value, nn.Module):
            self.models[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        else:
            self.others[name] = value

    # --- tensors that go through torch.distributed.checkpoint ---------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters and optimizer state that are saved by name."""
        state = self._model_tensors()
        names, shared = self._names(), self._shared()
        for name, optimizer in self.optimizers.items():
            for parameter_name, parameter in name_parameters(optimizer, names).items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if _goes_by_name(value, parameter):
                        path = f"optimizer.{name}.{parameter_name}.{key}"
                        state[self._key(path, value, id(parameter) in shared)] = value.detach()
        return state

    def gated(self, tensors: Iterable[str]) -> set[str]:
        """Return those keys of `tensors` that only a registered optimizer's step changes."""
        held = {
            id(p)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        free = {key for key, parameter in self._parameters().items() if id(parameter) not in held}
        return set(tensors) - free

    def _model_tensors(self) -> dict[str, Tensor]:
        return {key: parameter.detach() for key, parameter in self._parameters().items()}

    def _parameters(self) -> dict[str, Tensor]:
        """Return the models' parameters by their keys; a tied one once."""
        shared = self._shared()
        return {
            self._key(f"model.{name}.{path}", parameter, id(parameter) in shared): parameter
            for name, model in self.models.items()
            for path, parameter in unwrap(model).named_parameters()
        }

    def _names(self) -> dict[int, str]:
        return {
            id(parameter): f"{name}.{path}"
            for name, model in self.models.items()
            for path, parameter in unwrap(model).named_parameters()
        }

    def _shared(self) -> set[int]:
        """Return ids of the parameters that DDP keeps equal on every rank."""
        return {
            id(parameter)
            for model in self.models.values()
            for ddp in list_ddp_modules(model).values()
            for name, parameter in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        }

    def _key(self, path: str, value: Tensor, shared: bool) -> str:
        equal = shared or isinstance(value, DTensor) or self._world_size == 1
        return path if equal else path + self._mark

    # --- what is this rank's own --------------------------------------------------------------

    def own(self) -> dict[str, Any]:
        """Return the state that is this rank's own; small but for buffers."""
        names = self._names()
        return {
            "objects": {name: value.state_dict() for name, value in self.others.items()},
            "models": {name: _rest_of_model(model) for name, model in self.models.items()},
            "optimizers": {
                name: self._own_of(optimizer, name_parameters(optimizer, names))
                for name, optimizer in self.optimizers.items()
            },
            "bucket_order": {path: self._order(path, ddp) for path, ddp in self._ddp().items()},
        }

    def list_own(self, folder: Path) -> list[Path]:
        """Return the files in which a checkpoint has what is this rank's own."""
        path = folder / f"rank-{self._rank}.pt"
        return [path if path.exists() else folder / "rank-0.pt"]

    def merge(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what these files, once read, say together."""
        return found[0]

    def _own_of(self, optimizer: Optimizer, named: dict[str, Tensor]) -> dict[str, Any]:
        rest: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for name, parameter in named.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if _goes_by_name(value, parameter):
                    tensors.setdefault(name, {})[key] = describe_tensor(value)
                else:
                    rest.setdefault(name, {})[key] = value
        return {"groups": read_groups(optimizer, named), "rest": rest, "tensors": tensors}

    def _ddp(self) -> dict[str, DistributedDataParallel]:
        return {
            f"{name}.{path}": ddp
            for name, model in self.models.items()
            for path, ddp in list_ddp_modules(model).items()
        }

    def _order(self, path: str, ddp: DistributedDataParallel) -> list[str]:
        if not self._orders.get(path):
            self._orders[path] = read_bucket_order(ddp)
        return self._orders[path]

    # --- restoring ----------------------------------------------------------------------------

    def replay(self, own: dict[str, Any]) -> list[str]:
        """Bring DDP's buckets into the recorded order, before anything else is restored.

        Returns why that cannot be; never of two ranks, whose sums have one order only.
        """
        orders = own["bucket_order"]
        reasons = [replay_bucket_order(d, orders.get(path, [])) for path, d in self._ddp().items()]
        return [why for why in reasons if why and self._world_size > 2]

    def targets(self, own: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to read a checkpoint into, fresh ones for optimizer state.

        Raises:
            ConfigError: an optimizer is not in the checkpoint, or holds other parameters.
        """
        state = self._model_tensors()
        names, shared = self._names(), self._shared()
        for name, optimizer in self.optimizers.items():
            if name not in own["optimizers"]:
                continue
            saved = own["optimizers"][name]
            named = name_parameters(optimizer, names)
            try:
                load_groups(optimizer, named, saved["groups"])
            except ConfigError as error:
                raise ConfigError(f"optimizer {name!r}: {error.message}") from error
            optimizer.state.clear()
            for parameter_name, entries in saved["rest"].items():
                parameter = named[parameter_name]
                for key, value in entries.items():
                    optimizer.state[parameter][key] = place_scalar(value, parameter, optimizer)
            for parameter_name, entries in saved["tensors"].items():
                parameter = named[parameter_name]
                for key, description in entries.items():
                    value = make_tensor(description, parameter)
                    optimizer.state[parameter][key] = value
                    path = f"optimizer.{name}.{parameter_name}.{key}"
                    state[self._key(path, value, id(parameter) in shared)] = value
        return state

    def load_own(self, own: dict[str, Any]) -> list[str]:
        """Put this rank's own state back; return the names that the checkpoint lacks."""
        for name, model in self.models.items():
            if name in own["models"]:
                _load_rest_of_model(model, own["models"][name])
        for name, value in self.others.items():
            if name in own["objects"]:
                value.load_state_dict(own["objects"][name])
        saved = {**own["models"], **own["optimizers"], **own["objects"]}
        return sorted({*self.models, *self.optimizers, *self.others} - set(saved))


def unwrap(model: nn.Module) -> nn.Module:
    """Return the script's own module inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _goes_by_name(value: Any, parameter: Tensor) -> bool:
    """Return whether a value of an optimizer's state is sharded or replicated as `parameter` is."""
    if isinstance(parameter, DTensor):
        return isinstance(value, DTensor)
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0


def _rest_of_model(model: nn.Module) -> dict[str, Any]:
    """Return the entries of the state dict that are no parameters: buffers, extra state."""
    inner = unwrap(model)
    parameters = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    return {key: v for key, v in inner.state_dict().items() if key not in parameters}


def _load_rest_of_model(model: nn.Module, rest: dict[str, Any]) -> None:
    if not rest:
        return
    inner = unwrap(model)
    state = inner.state_dict()
    state.update(rest)
    inner.load_state_dict(state)


def name_parameters(optimizer: Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """Return the optimizer's parameters by name; those of no registered model by their place."""
    return {
        names.get(id(p), f"group{g}.{i}"): p
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }


def read_groups(optimizer: Optimizer, named: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the parameter groups with names instead of parameters."""
    names = {id(p): name for name, p in named.items()}
    return [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]


def load_groups(
    optimizer: Optimizer, named: dict[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Put learning rates and the like back.

    Raises:
        ConfigError: the optimizer holds other parameters than the saved one did.
    """
    if [group["params"] for group in read_groups(optimizer, named)] != [
        group["params"] for group in groups
    ]:
        raise ConfigError("its groups hold other parameters than those of the checkpoint")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # Schedulers and captured graphs hold this very tensor.
            elif key != "params":
                group[key] = value


def describe_tensor(value: Tensor) -> list[Any]:
    """Return what `make_tensor` needs besides the parameter: shape, type, where it lay."""
    shape = list(value.to_local().shape if isinstance(value, DTensor) else value.shape)
    return [shape, value.dtype, value.device.type, isinstance(value, DTensor)]


def make_tensor(description: list[Any], parameter: Tensor) -> Tensor:
    """Return an empty state tensor to read into, sharded like its parameter where it was."""
    shape, dtype, device_type, sharded = description
    if sharded:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    device = parameter.device if device_type != "cpu" else torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=device)


def place_scalar(value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """Return a small value where the optimizer wants it: by its parameter if it is captured."""
    for group in optimizer.param_groups:
        if any(p is parameter for p in group["params"]):
            on_device = group.get("capturable") or group.get("fused")
            return value.to(parameter.device) if on_device and isinstance(value, Tensor) else value
    return value


def list_ddp_modules(module: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return every DDP module in `module` (itself included) by its path."""
    found = module.named_modules()
    return {name: part for name, part in found if isinstance(part, DistributedDataParallel)}


def read_bucket_order(module: DistributedDataParallel) -> list[str]:
    """Return the parameters' names in the order of the rebuilt buckets; empty before that.

    It rebuilds them now if the next forward would: a checkpoint after the first step must know
    what the second one will use. All ranks call it at the same step, as they would that forward.
    Torch gives the order only with a gradient's worth of zeros, so ask once and keep the answer.
    """
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True
    if not module._has_rebuilt_buckets:
        return []
    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    buckets: Iterable[Any] = module.reducer._get_zeros_like_grad_buckets()
    return [names[id(p)] for bucket in buckets for p in bucket.parameters()]


def replay_bucket_order(module: DistributedDataParallel, order: list[str]) -> str:
    """Let the reducer rebuild its buckets for gradients ready in `order`; return why it cannot.

    Every rank must call it, because the backward reduces. The caller restores parameters,
    buffers and random state afterwards.
    """
    if not order:
        return ""
    if module._has_rebuilt_buckets:
        same = read_bucket_order(module) == order
        return "" if same else "DDP had already rebuilt its buckets, otherwise"
    parameters = dict(module.module.named_parameters())
    why = _find_obstacle(module)
    if not why and set(order) != {name for name, p in parameters.items() if p.requires_grad}:
        why = "DDP's parameters have changed"
    if why:
        return why
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward([])
    with torch.enable_grad():
        for name in order:  # One backward each: the engine promises no order within one.
            (parameters[name].reshape(-1)[:1] * 0.0).sum().backward()
    module._has_rebuilt_buckets = module.reducer._rebuild_buckets()
    for parameter in parameters.values():
        parameter.grad = None
    return "" if module._has_rebuilt_buckets else "DDP did not rebuild its buckets"


def _find_obstacle(module: DistributedDataParallel) -> str:
    if module.static_graph:
        return "DDP(static_graph=True) orders its buckets anew"
    if any(getattr(part, "sparse", False) for part in module.module.modules()):
        return "DDP with sparse gradients orders its buckets anew"
    return ""
