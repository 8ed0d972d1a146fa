"""An optimizer's state by parameter name, as it is: nothing initialised, nothing cast.

Torch's own way (`get_optimizer_state_dict`) takes a step with zero gradients where there is no
state yet and then asks the checkpoint for state that never existed; `load_state_dict` casts
moments to the parameter's type. Both change what a resumed step computes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from perdure.model.errors import ConfigError


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
            if key == "params":
                continue
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # Schedulers and captured graphs hold this very tensor.
            else:
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
