"""What the script registered, sorted by how it is saved.

Parameters and their optimizer state go through torch.distributed.checkpoint by name: sharded ones
(FSDP2) as shards that can be read into another sharding; those of DDP, which are equal on every
rank, once, split over the ranks. What nothing keeps equal is each rank's own: buffers (BatchNorm's
statistics differ from rank to rank until the next broadcast), schedulers, scalers, the script's
objects, and, of several ranks, parameters outside DDP and FSDP2 (they may be a pipeline's stage).

What training uses is state, whatever `state_dict()` exports (`modules.py`). An optimizer may hold
another one, which has its state (ZeroRedundancyOptimizer). It may step parameters that no model
has: their values are saved with it. Gradients are saved if a step ends amid an accumulation.

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

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from perdure.model.errors import ConfigError, UnfitError
from perdure.model.failures import names_lost_peer
from perdure.worker.checkpoint.attributes import (
    BASE,
    CALLED,
    Born,
    list_holders,
    list_large,
    load_attributes,
    note_attributes,
    read_changed,
    read_common,
    read_vars,
)
from perdure.worker.checkpoint.modules import (
    describe_module,
    load_flags,
    load_rest,
    prepare_parameters,
    read_rest,
    unwrap,
)
from perdure.worker.checkpoint.plain import check_plain
from perdure.worker.checkpoint.twins import find_lost, is_own, try_twin
from perdure.worker.settings import OWN


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
        self.born: dict[str, Born] = {}
        """The attributes of modules and optimizers as they were registered."""
        self.updated: set[int] = set()
        """Ids of the registered optimizers that have stepped since the boundary before."""
        self.carries = False
        """Whether gradients are added to those of steps before, although an optimizer stepped."""

    def add(self, name: str, value: Any) -> None:
        """Register one object under its name."""
        if isinstance(value, nn.Module):
            self.models[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        else:
            self.others[name] = value
        self.born = note_attributes(self._list_owners(name)) | self.born

    # --- tensors that go through torch.distributed.checkpoint ---------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters, optimizer state, and gradients that are saved by name."""
        names, shared = self._names(), self._shared()
        state = {key: one.detach() for key, one in self._parameters(names=names).items()}
        for name, optimizer in self._list_optimizers():
            for parameter_name, parameter in name_parameters(optimizer, names).items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if _goes_by_name(value, parameter):
                        path = f"optimizer.{name}.{parameter_name}.{key}"
                        state[self._key(path, value, id(parameter) in shared)] = value.detach()
        for path, gradient in self._gradients(names).items():
            state[self._key(path, gradient, shared=False)] = gradient
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
        return {key for key in tensors if key not in free and not key.startswith(_GRADIENT)}

    def _parameters(
        self, only: str = "", *, names: dict[int, str] | None = None
    ) -> dict[str, Tensor]:
        """Return the parameters by their keys, a tied one once; none that has no shape yet."""
        shared = self._shared()
        found: dict[str, Tensor] = {
            self._key(f"model.{name}.{path}", parameter, id(parameter) in shared): parameter
            for name, model in self.models.items()
            if _is_of(name, only)
            for path, parameter in unwrap(model).named_parameters()
            if not is_lazy(parameter)
        }
        names = self._names() if names is None else names
        loose = (one for one in self._list_loose(names) if _is_of(one[0], only))
        return found | {self._loose_key(*one): one[2] for one in loose}

    def _list_loose(self, names: dict[int, str]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the parameters that an optimizer steps and no model has: its name, place, value."""
        seen = set(names)
        for name, optimizer in self._list_optimizers():
            for place, parameter in name_parameters(optimizer, names).items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, place, parameter

    def _loose_key(self, name: str, place: str, parameter: Tensor) -> str:
        return self._key(f"parameter.{name}.{place}", parameter, shared=False)

    def _gradients(self, names: dict[int, str]) -> dict[str, Tensor]:
        """Return the gradients that the next step adds to: of optimizers that have not stepped."""
        return {
            f"{_GRADIENT}{name}.{path}": parameter.grad.detach()
            for name, optimizer in self.optimizers.items()
            if self.carries or id(optimizer) not in self.updated
            for path, parameter in name_parameters(optimizer, names).items()
            if parameter.grad is not None and parameter.grad.layout == torch.strided
        }

    def _list_optimizers(self) -> list[tuple[str, Optimizer]]:
        """Return the registered optimizers, and those that they hold, with their names."""
        found: list[tuple[str, Optimizer]] = []
        left = list(self.optimizers.items())
        while left:
            name, one = left.pop(0)
            if not any(one.state is other.state for _, other in found):
                found.append((name, one))
                left += [(f"{name}.{place}", inner) for place, inner in list_inner(one)]
        return found

    def _list_owners(self, only: str = "") -> dict[str, Any]:
        """Return all modules of models, all optimizers, and other objects, by their paths."""
        several = [
            *self._list_optimizers(),
            *((name, one) for name, one in self.others.items() if not is_own(one)),
            *(
                (f"{name}.{place}", one)
                for name, driven in self.others.items()
                for place, one in getattr(driven, "list_owned", dict)().items()
            ),
        ]
        return {
            f"{name}.{path}".rstrip("."): module
            for name, model in self.models.items()
            if _is_of(name, only)
            for path, module in unwrap(model).named_modules()
        } | {name: one for name, one in several if _is_of(name, only)}

    def read_attributes(self, *, placed: bool = False) -> dict[str, dict[str, Any]]:
        """Return the plain attributes that have changed since their owners were registered."""
        return read_changed(self._list_owners(), self.born, placed=placed)

    def read_common(self, kinds: tuple[type, ...] = (float,)) -> dict[str, dict[str, Any]]:
        """Return these, and all tensors, arrays, and values of `kinds`."""
        return read_common(self._list_owners(), self.born, kinds)

    def load_attributes(self, saved: dict[str, dict[str, Any]], only: str = "") -> None:
        """Put such attributes back."""
        load_attributes(self._list_owners(only), saved)

    def note_unchanged(
        self, saved: dict[str, dict[str, Any]], changed: dict[str, list[str]]
    ) -> None:
        """Note that of the attributes that were put back only `changed` ones have changed."""
        now = note_attributes(self._list_owners())
        for path, values in saved.items():
            fresh = (values.keys() & now.get(path, {}).keys()) - set(changed.get(path, ()))
            self.born.setdefault(path, {}).update({name: now[path][name] for name in fresh})

    def list_kept(self) -> tuple[dict[str, Any], set[int], list[str]]:
        """Return objects whose plain attributes are saved, by path; ids of all that is saved.

        Last come the paths of those that were not there, or were of another class, when the script
        registered their owner. An object with a `state_dict` makes its own again.
        """
        roots = self._list_owners()
        holders = list_holders(roots)
        optimizers = [one for _, one in self._list_optimizers()]
        modules = [part for model in self.models.values() for part in model.modules()]
        tensors = [one for part in modules for one in (*part._parameters.values(),
                                                       *part._buffers.values())]  # fmt: skip
        loose = [parameter for _, _, parameter in self._list_loose(self._names())]
        inner = [one.state for one in optimizers] + [one.param_groups for one in optimizers]
        entries = [one for o in optimizers for one in o.state.values()]
        owners = (*holders.values(), *self.others.values())
        values = [one for owner in owners for name, one in read_vars(owner).items()
                  if name not in BASE and one is not None
                  and not isinstance(one, (int, float, complex, str, bytes, *CALLED))]  # fmt: skip
        kept = (self.others.values(), holders.values(), optimizers, modules, tensors, loose, inner,
                entries, values)  # fmt: skip
        fresh = [path for path, one in holders.items()
                 if path not in roots and path.partition(".")[0] not in self.others
                 and self.born.get(path, {}).get("") != (b"", id(type(one)))]  # fmt: skip
        return holders, {id(one) for several in kept for one in several if one is not None}, fresh

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
            "objects": {name: _read_state(name, value) for name, value in self.others.items()},
            "models": {name: read_rest(model) for name, model in self.models.items()},
            "modules": {name: describe_module(model) for name, model in self.models.items()},
            "optimizers": {
                name: self._own_of(optimizer, name_parameters(optimizer, names))
                for name, optimizer in self._list_optimizers()
            },
            "attributes": self.read_attributes(placed=True),
            "loose": [[name, place] for name, place, _ in self._list_loose(names)],
            "carries": self.carries,
            "gradients": {path: describe_tensor(g) for path, g in self._gradients(names).items()},
            "hooks": [path for path, ddp in self._ddp().items() if has_hook_state(ddp)],
            "bucket_order": {path: self._order(path, ddp) for path, ddp in self._ddp().items()},
        }

    def check(self) -> None:
        """Refuse an object whose state no checkpoint could keep.

        Raises:
            UnfitError: it does not load as plain data, or cannot be taken.
        """
        names = self._names()
        for name, value in self.others.items():
            check_plain(f"{name} ({type(value).__name__})", _read_state(name, value))
        for name, model in self.models.items():
            check_plain(f"{name} ({type(model).__name__})", read_rest(model))
        for name, optimizer in self._list_optimizers():
            state = self._own_of(optimizer, name_parameters(optimizer, names))
            check_plain(f"{name} ({type(optimizer).__name__})", state)

    def try_twins(self) -> list[str]:
        """Return which objects do not give back the state that they are loaded with.

        Raises:
            UnfitError: one refuses it.
        """
        found = [try_twin(name, value) for name, value in self.others.items()]
        found += [getattr(value, "doubt", "") for value in self.others.values() if is_own(value)]
        return [why for why in found if why]

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
        return {
            "groups": read_groups(optimizer, named),
            "rest": rest,
            "tensors": tensors,
            "more": {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)},
        }

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

    def targets(self, own: dict[str, Any], only: str = "") -> dict[str, Tensor]:
        """Return the tensors to read a checkpoint into, fresh ones for optimizer state.

        With `only` they are those of the object of this name.

        Raises:
            ConfigError: an optimizer or a model holds other parameters than in the checkpoint.
        """
        described = own.get("modules", {})
        for name in sorted(self.models.keys() & described.keys()):
            if not _is_of(name, only):
                continue
            with name_misfit(f"model {name!r}"):
                prepare_parameters(self.models[name], described[name])
        known = self._name_all()
        names, shared = self._names(), self._shared()
        optimizers = [
            (name, one)
            for name, one in self._list_optimizers()
            if name in own["optimizers"] and _is_of(name, only)
        ]
        for name, optimizer in optimizers:
            with name_misfit(f"optimizer {name!r}"):
                groups = own["optimizers"][name]["groups"]
                load_groups(optimizer, name_parameters(optimizer, names), groups, known)
        state = {key: parameter.detach() for key, parameter in self._parameters(only).items()}
        for one in self._list_lost(own):
            state.pop(self._loose_key(*one), None)
        for name, optimizer in optimizers:
            saved, named = own["optimizers"][name], name_parameters(optimizer, names)
            optimizer.state.clear()
            optimizer.state.update(saved.get("more", {}))
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
        return state | self._make_gradients(own.get("gradients", {}), only)

    def _make_gradients(self, saved: dict[str, list[Any]], only: str) -> dict[str, Tensor]:
        """Give parameters gradients to read the saved ones into; return these."""
        names, state = self._names(), dict[str, Tensor]()
        for name, optimizer in self.optimizers.items():
            if not _is_of(name, only):
                continue
            for path, parameter in name_parameters(optimizer, names).items():
                key = f"{_GRADIENT}{name}.{path}"
                if key in saved:
                    parameter.grad = make_tensor(saved[key], parameter)
                    state[self._key(key, parameter.grad, shared=False)] = parameter.grad
        return state

    def watch_gradients(self) -> list[Any]:
        """Note if a gradient is added to one of before, though its optimizer has stepped since.

        Return the handles of the hooks that notice it.
        """
        handles = []
        for optimizer in self.optimizers.values():
            several = (p for group in optimizer.param_groups for p in group["params"])
            one = next((p for p in several if p.grad is not None and p.requires_grad), None)
            plain = isinstance(one, Tensor) and not isinstance(one, DTensor)
            if id(optimizer) in self.updated and one is not None and plain:
                handles.append(one.register_hook(functools.partial(self._look_at_gradient, one)))
        return handles

    def _look_at_gradient(self, parameter: Tensor, _: Tensor) -> None:
        self.carries |= parameter.grad is not None and bool(parameter.grad.any())

    def _list_lost(self, own: dict[str, Any]) -> list[tuple[str, str, Tensor]]:
        """Return the parameters of no model whose values the checkpoint lacks."""
        saved = own.get("loose", ())
        return [one for one in self._list_loose(self._names()) if [one[0], one[1]] not in saved]

    def _name_all(self) -> dict[str, Tensor]:
        """Return all models' parameters by the names that optimizers' groups have for them."""
        return {
            f"{name}.{path}": parameter
            for name, model in self.models.items()
            for path, parameter in unwrap(model).named_parameters()
        }

    def load_own(self, own: dict[str, Any], only: str = "") -> list[str]:
        """Put this rank's own state back; return why that is not all of it.

        With `only` it is that of the object of this name.
        """
        described = own.get("modules", {})
        for name, model in self.models.items():
            if name in own["models"] and _is_of(name, only):
                with name_misfit(f"model {name!r}"):
                    load_rest(model, own["models"][name], described.get(name, {}))
                if name in described:
                    load_flags(model, described[name])
        unlike = []
        for name, value in self.others.items():
            if name in own["objects"] and _is_of(name, only):
                with name_misfit(f"object {name!r}"):
                    value.load_state_dict(own["objects"][name])
        self.carries |= own.get("carries", False)
        self.load_attributes(own.get("attributes", {}), only)
        for name, value in self.others.items():
            if name in own["objects"] and _is_of(name, only) and not is_own(value):
                unlike.append(find_lost(name, value, own["objects"][name]))
        mine, saved = self._list_names(), _list_saved(own)
        lost = sorted(name for name in mine - saved if not name.startswith(OWN))
        lost += [f"{name}.{place}" for name, place, _ in self._list_lost(own)]
        why = [f"not in the checkpoint: {', '.join(lost)}"] if lost else []
        if large := list_large(own.get("attributes", {})):
            why.append(f"too large for a checkpoint: {', '.join(large)}")
        if hooks := own.get("hooks"):
            why.append(f"no checkpoint has the state of DDP's hook in {', '.join(hooks)}")
        told = (
            getattr(one, "why_not_exact", "") for n, one in self.others.items() if _is_of(n, only)
        )
        return why + [text for text in (*unlike, *told) if text]

    def list_left(self, own: dict[str, Any]) -> list[str]:
        """Return the names of objects that the checkpoint has and the script has not registered."""
        return sorted(_list_saved(own) - self._list_names())

    def _list_names(self) -> set[str]:
        return {*self.models, *self.others, *(name for name, _ in self._list_optimizers())}


def _read_state(name: str, value: Any) -> Any:
    try:
        return value.state_dict()
    except Exception as error:  # The script's own code.
        raise UnfitError(f"{name}.state_dict() failed: {error!r}") from error


def _list_saved(own: dict[str, Any]) -> set[str]:
    return {*own["models"], *own["optimizers"], *own["objects"]}


def _is_of(name: str, only: str) -> bool:
    """Return whether `name` is `only`, or inside it; any is if `only` is empty."""
    return not only or name == only or name.startswith(f"{only}.")


_GRADIENT = "gradient."
"""What the key of a gradient begins with."""


_ELSEWHERE = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
"""Errors of torch that say nothing about a checkpoint: a restart may not meet them."""


@contextlib.contextmanager
def name_misfit(what: str, hint: str = "") -> Iterator[None]:
    """Say in one line what does not fit.

    Raises:
        UnfitError: a state is whole, and does not fit the object.
    """
    try:
        yield
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, ConfigError) as error:
        if isinstance(error, _ELSEWHERE) or names_lost_peer(str(error)):
            raise
        text = " ".join(str(error).split())
        if not text or isinstance(error, LookupError | TypeError | AttributeError):
            text = f"{type(error).__name__}: {text}"
        cause = None if isinstance(error, ConfigError) else error
        raise UnfitError(f"{what}: {text}", hint=hint) from cause


def list_inner(optimizer: Optimizer) -> list[tuple[str, Optimizer]]:
    """Return the optimizers among an optimizer's attributes, also in lists and dicts."""
    found: list[tuple[str, Optimizer]] = []
    for key, value in vars(optimizer).items():
        several: Any = enumerate(value) if isinstance(value, list | tuple) else [("", value)]
        inner = value.items() if isinstance(value, dict) else several
        # Not before: the text of a key that is a tensor takes milliseconds.
        found += [(f"{key}.{n}".rstrip("."), one) for n, one in inner if isinstance(one, Optimizer)]
    return found


def list_hooked(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, or, if it was never initialized as one, those that it holds."""
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return [optimizer]
    return [one for _, inner in list_inner(optimizer) for one in list_hooked(inner)]


def _goes_by_name(value: Any, parameter: Tensor) -> bool:
    """Return whether a value of an optimizer's state is sharded or replicated as `parameter` is."""
    if isinstance(parameter, DTensor):
        return isinstance(value, DTensor)
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0


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
    optimizer: Optimizer,
    named: dict[str, Tensor],
    groups: list[dict[str, Any]],
    known: dict[str, Tensor],
) -> None:
    """Put learning rates and the like back, and the groups as the script changed them meanwhile.

    `named` are the optimizer's parameters, `known` those of all models.

    Raises:
        ConfigError: the saved optimizer held parameters that are not known, or not all of these.
    """
    members = [group["params"] for group in groups]
    if [group["params"] for group in read_groups(optimizer, named)] != members:
        known = known | named
        saved = {name for names in members for name in names}
        if lost := sorted(saved - known.keys()):
            raise ConfigError(f"it stepped {lost[0]}, which the script does not have")
        if fresh := sorted(named.keys() - saved):
            raise ConfigError(f"it steps {fresh[0]}, and did not when the checkpoint was made")
        del optimizer.param_groups[len(groups) :]
        for group in optimizer.param_groups:
            group["params"] = []
        for number, names in enumerate(members):
            parameters = [known[name] for name in names]
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = parameters
            else:
                optimizer.add_param_group({"params": parameters})
    for group, one in zip(optimizer.param_groups, groups, strict=True):
        for key, value in one.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)  # Schedulers and captured graphs hold this very tensor.
            elif key != "params":
                group[key] = value


def describe_tensor(value: Tensor) -> list[Any]:
    """Return what `make_tensor` needs: shape, type, where it lay, how it lay in memory."""
    local = value.to_local() if isinstance(value, DTensor) else value
    strides = list(local.stride())
    return [list(local.shape), value.dtype, value.device.type, local is not value, strides]


def make_tensor(description: list[Any], parameter: Tensor) -> Tensor:
    """Return an empty state tensor to read into, sharded like its parameter where it was."""
    shape, dtype, device_type, sharded, *strides = description
    if sharded:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    device = parameter.device if device_type != "cpu" else torch.device("cpu")
    if strides and is_dense(shape, strides[0]):
        return torch.empty_strided(shape, strides[0], dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def is_dense(shape: list[int], strides: list[int]) -> bool:
    """Return whether each place in memory is one element, as of a transposed tensor."""
    size = 1
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count != 1 and stride != size:
            return False
        size *= count
    return True


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


def has_hook_state(module: DistributedDataParallel) -> bool:
    """Return whether a communication hook of DDP has a state, such as PowerSGD's errors."""
    states = (state for _, state in module._comm_hooks)
    return any(not isinstance(one, dist.ProcessGroup | None) for one in states)


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
