"""What a module has besides its parameters' values, found by walking it.

`state_dict()` says what an export holds. Training needs more. Some buffers are not persistent, were
None before the first pass, or grow. Some parameters do not train, and some modules evaluate. A
resume puts all of it back by name, in the saved shape and type.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from perdure.model.errors import ConfigError
from perdure.worker.checkpoint.attributes import is_own_file

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the script's own module inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def describe_module(model: nn.Module) -> dict[str, Any]:
    """Return the shape and type of each parameter, and the flags that differ from the usual."""
    inner = unwrap(model)
    parameters = dict(inner.named_parameters())
    modules = list(inner.named_modules())
    return {
        "shapes": {
            path: None if is_lazy(p) else [list(p.shape), p.dtype] for path, p in parameters.items()
        },
        "frozen": [path for path, p in parameters.items() if not p.requires_grad],
        "evaluating": [path for path, module in modules if not module.training],
        "transient": [
            _join(path, name)
            for path, module in modules
            for name in module._non_persistent_buffers_set
        ],
        "buffers": [_join(path, name) for path, module in modules for name in module._buffers],
    }


def describe_build(module: nn.Module, *, whole: bool) -> list[Any]:
    """Return what a script builds and no state has: classes, names of parts, its own hooks.

    With `whole` it also has the names of all parameters; tied ones have one name.
    """
    kind: Any = type(module)
    if issubclass(kind, LazyModuleMixin):
        kind = kind.cls_to_become or kind
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    hooks = [one for p in parameters.values() if p.requires_grad for one in list_hooks(p)]
    shown = [f"{name} {parameter.dtype}" for name, parameter in parameters.items()]
    names = [name for name, _ in module.named_parameters()] if whole else []
    return [kind.__qualname__, [*module._modules], shown, names, list_hooks(module), hooks]


def list_hooks(owner: Any) -> list[str]:
    """Return the names of the script's own hooks of a module, an optimizer, or a tensor."""
    kinds = _TENSOR_HOOKS if isinstance(owner, Tensor) else _HOOKS
    found = [hooks for kind in kinds if (hooks := getattr(owner, kind, None))]
    several = [inspect.unwrap(one) for hooks in found for one in hooks.values()]
    return [one.__qualname__ for one in several if _is_own_function(one)]


def _is_own_function(value: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return code is not None and is_own_file(code.co_filename)


def read_rest(model: nn.Module) -> dict[str, Any]:
    """Return every buffer by name, and what else the state dict has: extra state."""
    inner = unwrap(model)
    parameters = {name for name, _ in inner.named_parameters(remove_duplicate=False)}
    rest = {key: value for key, value in inner.state_dict().items() if key not in parameters}
    for path, module in inner.named_modules():
        for name, value in module._buffers.items():
            rest[_join(path, name)] = value
    return {key: value for key, value in rest.items() if not is_lazy(value)}


def prepare_parameters(model: nn.Module, saved: dict[str, Any]) -> None:
    """Give lazy parameters the saved shape, before values are read into them.

    Raises:
        ConfigError: the model has other parameters than the saved one.
    """
    live = dict(unwrap(model).named_parameters())
    shapes: dict[str, Any] = saved["shapes"]
    if lost := sorted(shapes.keys() - live.keys()):
        raise ConfigError(f"the checkpoint has the parameter {lost[0]}, and the script does not")
    if fresh := sorted(live.keys() - shapes.keys()):
        raise ConfigError(f"the script has the parameter {fresh[0]}, and the checkpoint does not")
    for path, parameter in live.items():
        if shapes[path] is None:
            continue
        shape, dtype = shapes[path]
        if is_lazy(parameter):
            parameter.materialize(shape, dtype=dtype)
        elif list(parameter.shape) != shape:
            raise ConfigError(
                f"the parameter {path} has the shape {list(parameter.shape)}, "
                f"and {shape} in the checkpoint"
            )


def load_flags(model: nn.Module, saved: dict[str, Any]) -> None:
    """Put back which parameters train, and which modules are in evaluation."""
    inner = unwrap(model)
    frozen, evaluating = set(saved["frozen"]), set(saved["evaluating"])
    for path, parameter in inner.named_parameters():
        if parameter.requires_grad == (path in frozen):
            parameter.requires_grad_(path not in frozen)
    for path, module in inner.named_modules():
        module.training = path not in evaluating


def load_rest(model: nn.Module, rest: dict[str, Any], saved: dict[str, Any]) -> None:
    """Put buffers back by name, and hand the script's own `load_state_dict` what else there is."""
    inner = unwrap(model)
    modules = dict(inner.named_modules(remove_duplicate=False))
    buffers, transient = set(saved.get("buffers", ())), set(saved.get("transient", ()))
    left: dict[str, Any] = {}
    for key, value in rest.items():
        path, _, name = key.rpartition(".")
        owner = modules.get(path)
        if owner is not None and (name in owner._buffers or key in buffers):
            if name not in owner._buffers:  # A pass has registered it.
                owner.register_buffer(name, None, persistent=key not in transient)
            owner._buffers[name] = _load_buffer(owner._buffers[name], value, inner)
        else:
            left[key] = value
    if left:
        state = inner.state_dict()
        state.update(left)
        inner.load_state_dict(state)


def _load_buffer(live: Tensor | None, value: Tensor | None, model: nn.Module) -> Tensor | None:
    """Return the buffer with the saved value: the live tensor, if it can hold it."""
    if value is None:
        return None
    if live is None:
        return value.to(next(model.parameters(), value).device)
    if is_lazy(live):
        live.materialize(value.shape, dtype=value.dtype)
    elif _describe(live) != _describe(value):
        return value.to(live.device)
    return live.copy_(value)


def _describe(value: Tensor) -> tuple[Any, ...]:
    strides = value.stride() if value.layout == torch.strided else ()
    return value.shape, value.dtype, value.layout, strides


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
