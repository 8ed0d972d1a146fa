"""A model sharded by torch's own `fully_shard`, built anew for each world.

An FSDP2 module belongs to its process group: in a new world it raises, and it cannot be sharded
twice. So the model is kept as a skeleton, whose parameters have shapes and no data, and for each
world a copy of it is sharded and given its shards. `fully_shard` gathers parameters before they
are used and frees them afterwards. Gradients it never sees: they are taken from the gathered
parameters as soon as they are there, and accumulate, whole, in stand-ins, one for each parameter.
From there on they are what replicated ones are: finished micro-batches survive the loss of
anyone, copies are reduced, and what was partly reduced is made again. It costs memory for a whole
set of gradients, which sharding would otherwise cut too.

All members of a copy gather together, so they run as many micro-batches: who has fewer runs one
whose gradients are dropped.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from perdure.model.errors import ConfigError
from perdure.plan.elastic.shards import Shard
from perdure.worker.elastic.group import Copy

Parts = dict[str, dict[str, Tensor]]
"""Name of a parameter -> key -> rows of it (key `PARAMETER`), or of an optimizer's state."""
PARAMETER = ""


class Skeleton:
    """A model without data: what a sharded one is made from."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Keep `model`'s structure and buffers; `options` go to `fully_shard`.

        Raises:
            ConfigError: a parameter has no rows.
        """
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        for name, shape in self.shapes.items():
            if not shape:
                raise ConfigError(
                    f"elastic: the parameter {name} has no dimension to be cut along",
                    hint="give it the shape (1,), or train it replicated",
                )
        self.lengths = sorted({shape[0] for shape in self.shapes.values()})
        self.device = next(model.parameters()).device
        self._options = dict(options)
        self._template = _strip(model)
        self._built = 0

    def stand_ins(self) -> dict[str, Tensor]:
        """Return, for each trainable parameter, a tensor of its shape that takes no memory."""
        return {
            name: torch.empty(1, dtype=p.dtype, device=self.device).expand(p.shape).requires_grad_()
            for name, p in self._template.named_parameters()
            if p.requires_grad
        }

    def build(
        self,
        group: Copy,
        shard: Shard,
        parts: Parts,
        buffers: Mapping[str, Tensor],
        take: Callable[[str, Tensor], object],
    ) -> nn.Module:
        """Return the model, sharded over `group`, with the rows of `shard` that `parts` have.

        `take` is called with each parameter's name and gathered form when its gradient is there.
        """
        model = copy.deepcopy(self._template)
        names = {(id(m), key): name for m, key, name in _list_places(model)}
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        self._built += 1
        name = (
            f"world{self._built}"  # Torch takes two meshes of a size for the same one, otherwise.
        )
        mesh = init_device_mesh(self.device.type, (shard.count,), mesh_dim_names=(name,))
        units = [*find_units(model), model]
        for unit in units:
            fully_shard(unit, mesh=mesh, **self._options)
        state = {
            name: DTensor.from_local(
                parts[name][PARAMETER],
                mesh,
                [ShardPlacement(0)],
                run_check=False,
                shape=shape,
                stride=_stride_of(shape),
            )
            for name, shape in self.shapes.items()
        }
        model.load_state_dict(state, strict=False, assign=True)
        for unit in units:
            assert isinstance(unit, FSDPModule)
            unit.set_custom_all_gather(_AllGather(group))
            unit.register_forward_pre_hook(_Watch(_places_of(unit), names, take))
        return model


class _AllGather(AllGather):
    """Gathers over a copy's group, where an order to leave it is heard."""

    def __init__(self, group: Copy) -> None:
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather, and wait for it.

        Raises:
            Broken: a member was lost.
        """
        self._group.all_gather(output_tensor, input_tensor)
        self._group.wait()


class _Watch:
    """A unit's parameters are gathered: see to it that their gradients are taken."""

    def __init__(
        self,
        places: list[tuple[nn.Module, str]],
        names: Mapping[tuple[int, str], str],
        take: Callable[[str, Tensor], object],
    ) -> None:
        self._places = [(module, key, names[id(module), key]) for module, key in places]
        self._take = take
        self._known: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any) -> None:
        for owner, key, name in self._places:
            parameter = getattr(owner, key)
            if self._known.get(name) is not parameter and parameter.requires_grad:
                self._known[name] = parameter
                parameter.register_post_accumulate_grad_hook(self._make_hook(name))

    def _make_hook(self, name: str) -> Callable[[Tensor], None]:
        take = self._take

        def hook(parameter: Tensor) -> None:
            take(name, parameter)
            parameter.grad = None

        return hook


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are gathered one by one: a sequence's, or those of a module list.

    Raises:
        ConfigError: none is found, so that all of the model would be gathered at once.
    """
    lists = [model] if isinstance(model, nn.Sequential) else model.children()
    units = [
        child
        for one in lists
        if isinstance(one, nn.Sequential | nn.ModuleList)
        for child in one
        if any(True for _ in child.parameters())
    ]
    if not units:
        raise ConfigError(
            f"elastic: no blocks are found in {type(model).__name__}",
            hint="give a list of blocks, or keep them in an nn.ModuleList",
        )
    return units


def release(model: nn.Module) -> None:
    """Free what a broken pass has left gathered, and what torch remembers of the mesh.

    Its caches would keep the mesh, and with it the descriptors of its process group.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()
    for cached in (MeshTopoInfo.build_from_mesh, _gen_transform_infos):
        cached.cache_clear()
    if isinstance(model, FSDPModule):
        with contextlib.suppress(Exception):  # Whatever state it is in: it is not used again.
            model.reset_iter_state()


def _strip(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose parameters have no data; buffers are copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _list_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, attribute, name) of every parameter; a shared one has the first's name."""
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{key}" if path else key
            yield module, key, first.setdefault(id(parameter), name)


def _places_of(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return where the parameters are that are gathered with `unit`, and not with one inside it."""
    places = [(unit, key) for key, _ in unit.named_parameters(recurse=False)]
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            places += _places_of(child)
    return places


def _stride_of(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def shard_like(value: Tensor, parameter: Tensor, shape: torch.Size) -> Tensor:
    """Return `value`, this member's rows, as a sharded tensor like `parameter`."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=_stride_of(shape),
    )
