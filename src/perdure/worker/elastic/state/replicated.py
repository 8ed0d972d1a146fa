"""The replicated state: parameters, optimizer, schedule, the same bytes on every member."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from perdure.model.errors import ConfigError
from perdure.plan.elastic.commit import MemberProgress, Reformation, decide_reformation
from perdure.plan.elastic.shards import Snapshot
from perdure.plan.elastic.stage_commit import Holder, Move
from perdure.worker.checkpoint.attributes import (
    NotPlainError,
    has_array,
    hash_plain,
    list_holders,
    pack,
    read_vars,
    unpack,
)
from perdure.worker.checkpoint.modules import (
    describe_module,
    load_flags,
    load_rest,
    read_rest,
    unwrap,
)
from perdure.worker.checkpoint.plain import visit
from perdure.worker.checkpoint.registry import (
    Registry,
    list_inner,
    load_groups,
    name_parameters,
    read_groups,
)
from perdure.worker.elastic.comparing import NAMED, hash_attributes
from perdure.worker.elastic.gradients import BUCKET_BYTES, VOTES, Accumulation, Buckets, Compute
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving import (
    check_sendable,
    collect_tensors,
    find_device,
    hash_tensors,
    map_tensors,
    move_blocks,
    open_state,
    pack_state,
)
from perdure.worker.elastic.snapshots import Snapshots
from perdure.worker.elastic.state import At, Followed, Source, Taken, read_settings
from perdure.worker.system.stderr import say

Rerun = Callable[[], Any]
"""Passes a micro-batch again, or this member's part of it; returns what comes of it."""
AfterUpdate = Callable[[nn.Module], object]
"""Part of an update: alters the model alike on every member, and on a rank that follows them."""


def run_after_update(after_update: AfterUpdate | None, model: nn.Module) -> None:
    """Make the script's part of an update, which autograd does not record."""
    if after_update is not None:
        with torch.no_grad():
            after_update(model)


def list_trained(model: nn.Module) -> dict[Tensor, tuple[str, bool]]:
    """Return the name of each parameter, and whether it trains."""
    return {p: (name, p.requires_grad) for name, p in model.named_parameters()}


def drop_harmless(found: Mapping[str, dict[str, Any]], harmless: Collection[str]) -> dict[str, Any]:
    """Return the attributes that are not what passes leave behind."""
    return {
        path: {name: value for name, value in one.items() if f"{path}.{name}" not in harmless}
        for path, one in found.items()
    }


def refuse_loose(optimizer: torch.optim.Optimizer, known: Collection[Tensor]) -> None:
    """Refuse an optimizer that steps a parameter which is not `known`, or has another one in it.

    Raises:
        ConfigError: a member's gradient or state would be its own.
    """
    for place, inner in list_inner(optimizer):
        if inner.state is not optimizer.state:
            raise ConfigError(
                f"elastic: {type(optimizer).__name__}.{place} is an optimizer whose state a rank "
                "that joins would not be sent",
                hint="give the inner optimizer to perdure, and do the rest in after_update=",
            )
    for parameter in _list_stepped(optimizer):
        if parameter not in known:
            raise ConfigError(
                f"elastic: the optimizer steps a parameter of shape {list(parameter.shape)} that "
                "the model does not have, and whose gradient members would not share",
                hint="make it a parameter of the model",
            )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse a hook on accumulated gradients: each member has only a part of them.

    Raises:
        ConfigError: a parameter has one.
    """
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"elastic: {name} has a hook on its accumulated gradient, and each member has only "
                "a part of that",
                hint="register_hook sees each micro-batch's; clip by clip_norm=",
            )


def describe_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> dict[str, dict[str, Any]]:
    """Return the optimizer's settings for each of the parameters that have `names`.

    A rate counts by its ratio to the first group's: `perdure set` may have changed all of them.
    """
    first = float(optimizer.param_groups[0].get("lr", 0.0)) or 1.0
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        told = {k: read_plain(v) for k, v in group.items() if k not in ("params", "lr", "name")}
        told["lr"] = f"{float(group.get('lr', 0.0)) / first:.5g}"
        found |= {names[p]: told for p in group["params"] if p in names}
    return found


def read_plain(value: Any) -> Any:
    """Return a setting as it reads on every rank alike; of what is no number or word, its kind."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [read_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def refuse_regrouped(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse an optimizer that gives parameters other settings than it did at first.

    Raises:
        ConfigError: it chooses them by what a part of the model does not keep.
    """
    for name, settings in now.items():
        if settings != before.get(name, settings):
            raise ConfigError(
                f"elastic: the optimizer gives {name} other settings than if it has the whole "
                "model",
                hint="choose groups by shape or by an attribute of each parameter, and not by "
                "its identity or its place in the list",
            )


class Replica:
    """A model with its optimizer and schedule. The only place that alters them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float = 0.0,
        after_update: AfterUpdate | None = None,
    ) -> None:
        """Update `model` by `optimizer`; gradients are clipped to `clip_norm` if that is not 0.

        `scaler` is a GradScaler. It looks at reduced gradients, which are the same everywhere: a
        step that it skips is skipped, and so committed, by all.

        Raises:
            ConfigError: `optimizer` steps a parameter that `model` does not have.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler, self._clip_norm, self._after_update = scaler, clip_norm, after_update
        self.device = find_device(model)
        refuse_hooks(model)
        self.names: dict[Tensor, str] = {p: name for name, p in unwrap(model).named_parameters()}
        self.registry = Registry()
        """Knows the plain attributes that training has changed."""
        for name, part in self.parts().items():
            self.registry.add(name, part)
        self._modules = list(unwrap(model).named_modules())
        if scaler is not None:  # Who follows or rolls forward may not have scaled a loss yet.
            scaler.scale(self.parameters[0].new_zeros(1))
        self.guard = BufferGuard(model)
        self._stepped = 0
        """Parameters that the optimizer stepped when they were checked."""
        self.check_parameters(self.parameters)

    @property
    def parameters(self) -> list[Tensor]:
        """Return what is trained now."""
        return [p for p in self.names if p.requires_grad]

    def check_parameters(self, reduced: Collection[Tensor]) -> None:
        """Refuse what an update would alter by this member's gradients alone.

        Raises:
            ConfigError: a parameter has a gradient that is not `reduced`, or no model has it.
        """
        stepped = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if stepped != self._stepped:
            self._stepped = stepped
            refuse_loose(self.optimizer, self.names)
        if len(reduced) == len(self.names):
            return
        known = set(map(id, reduced))
        for parameter, name in self.names.items():
            if parameter.grad is not None and id(parameter) not in known:
                raise ConfigError(
                    f"elastic: {name} got a gradient in a step that began while its requires_grad "
                    "was False",
                    hint="set requires_grad in on_step, between two steps",
                )

    def update(self, *, clipped: bool = False) -> bool:
        """Apply the gradients that the parameters have now; return whether that altered them.

        `clipped` says that they are, and are unscaled: another member has applied them before.
        An optimizer or a hook of it may alter gradients in place, as `foreach` does for Nesterov.
        """
        if self.scaler is not None:
            self._unscale(done=clipped)
        if self._clip_norm and not clipped:
            nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
        gradients = [p.grad for p in self.names if p.grad is not None]
        versions = [gradient._version for gradient in gradients]
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        run_after_update(self._after_update, self.model)
        return versions != [gradient._version for gradient in gradients]

    def scale(self, loss: Tensor) -> Tensor:
        """Return what backward is to begin with."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _unscale(self, *, done: bool) -> None:
        """Unscale, and find out whether the step is to be skipped."""
        kept = self.scaler.state_dict()
        if done:
            self.scaler.load_state_dict(kept | {"scale": 1.0})
        self.scaler.unscale_(self.optimizer)
        if done:
            self.scaler.load_state_dict(kept)

    def parts(self) -> dict[str, Any]:
        """Return the objects that have the state, by name."""
        parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def state(self) -> dict[str, Any]:
        """Return all of it; tensors are not copied."""
        return {
            **{name: part.state_dict() for name, part in self.parts().items()},
            "model": {name: p for p, name in self.names.items()},
            "rest": {
                key: value
                for key, value in read_rest(self.model).items()
                if key not in self.guard.harmless
            },
            "module": describe_module(self.model),
            "groups": read_groups(self.optimizer, self._name_parameters()),
            "attributes": drop_harmless(self.registry.read_common(), self.guard.harmless),
            "changed": {path: list(one) for path, one in self.registry.read_attributes().items()},
            "harmless": sorted(self.guard.harmless),
        }

    def list_attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that have changed since training began, on every member alike."""
        return drop_harmless(self.registry.read_attributes(), self.guard.harmless)

    def list_named(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that members should have alike, and may have otherwise."""
        return drop_harmless(self.registry.read_common(OWN), self.guard.harmless)

    def list_compared(self) -> dict[str, Any]:
        """Return what has to be the same on every member, by names."""
        kept = [place for place in list_buffers(unwrap(self.model)) if not place.transient]
        named = self._name_parameters().items()
        return {
            "model": dict(unwrap(self.model).named_parameters()),
            "attributes": {
                path: {name: value for name, value in one.items() if not has_array(value)}
                for path, one in self.list_attributes().items()
            },
            "buffers": {place.name: place.value for place in kept},
            "optimizer": {name: dict(self.optimizer.state.get(p, {})) for name, p in named},
            "settings": read_settings(self.optimizer, self.scheduler),
            "scaler": self.scaler.state_dict() if self.scaler is not None else {},
            "flags": self.flags(),
        }

    def flags(self) -> list[list[str]]:
        """Return which parameters do not train, and which modules evaluate."""
        frozen = [name for p, name in self.names.items() if not p.requires_grad]
        return [frozen, [path for path, module in self._modules if not module.training]]

    def _name_parameters(self) -> dict[str, Tensor]:
        return name_parameters(self.optimizer, {id(p): name for p, name in self.names.items()})

    @property
    def nbytes(self) -> int:
        """Return about what its state has, with the two moments of Adam."""
        return 3 * sum(p.nbytes for p in self.model.parameters())

    def load(self, state: dict[str, Any]) -> None:
        """Become `state`."""
        known = {name: p for p, name in self.names.items()}
        with torch.no_grad():
            for name, value in state["model"].items():
                known[name].copy_(value)
            load_rest(self.model, state["rest"], state["module"])
        load_flags(self.model, state["module"])
        load_groups(self.optimizer, self._name_parameters(), state["groups"], known)
        for name, part in self.parts().items():
            if name != "model":
                part.load_state_dict(state[name])
        self._load_entries(state["optimizer"].get("state", {}))
        self.registry.load_attributes(state["attributes"])
        self.registry.note_unchanged(state["attributes"], state["changed"])
        harmless = self.guard.harmless | set(state["harmless"])
        self.guard = BufferGuard(self.model)
        self.guard.harmless |= harmless

    def _load_entries(self, state: dict[Any, Any]) -> None:
        """Put each parameter's moments back in their own type, and as the parameter lies.

        Torch casts them to the parameter's type. A fused kernel pairs elements by their places.
        """
        for number, parameter in enumerate(_list_stepped(self.optimizer)):
            if number in state:
                cast = iter(collect_tensors(self.optimizer.state[parameter]))
                place = functools.partial(_place, cast=cast, parameter=parameter)
                self.optimizer.state[parameter] = map_tensors(state[number], place)


def _place(value: Tensor, cast: Iterator[Tensor], parameter: Tensor) -> Tensor:
    """Return a copy of `value`, on the device of the next tensor that torch has `cast`."""
    like = parameter.detach() if value.shape == parameter.shape else value
    return torch.empty_like(like, dtype=value.dtype, device=next(cast).device).copy_(value)


def _list_stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class BufferGuard:
    """Sees whether a model's forward pass alters its buffers, as BatchNorm's does.

    Buffers are compared before and after each step's passes: by their bytes in the first steps, and
    later too if they are small and on the CPU; else by address and version. The plain attributes of
    the script's own modules are compared in the first steps, and in every hundredth.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch from now on."""
        self._model = unwrap(model)
        self._steps = 0
        self._bytes = True
        """Bytes are compared in the step under way."""
        self._places = list_buffers(self._model)
        self._before: dict[str, Any] | None = None
        self._parameters = {
            name: p
            for name, p in self._model.named_parameters()
            if type(p) is nn.Parameter and p.layout == torch.strided
        }
        """Not those of shards: what is gathered for a pass is not what an update alters."""
        self._held: dict[str, tuple[int, int, str]] = {}
        self._kept: dict[str, Tensor | None] = {}
        """What is not persistent, as it was before the step under way."""
        self.harmless: set[str] = set()
        """Buffers, and attributes (with "model." before them), that follow from the input alone."""
        self._attributes: dict[str, dict[str, Any]] = {}
        """Attributes before the passes, as plain data, by module and name."""

    def note(self) -> None:
        """Note the buffers as they are before a step's passes."""
        if self._before is not None:
            return  # The step is made again.
        if self._steps < _FIRST_STEPS:
            self._places = list_buffers(self._model)
            self._kept = {
                place.name: None if place.value is None else place.value.clone()
                for place in self._places
                if place.transient
            }
        due = self._steps < _FIRST_STEPS or self._steps % _EVERY == 0
        self._attributes = self._read_attributes() if due else {}
        buffers = [place.value for place in self._places if place.value is not None]
        self._bytes = self._steps < _FIRST_STEPS or (
            all(b.is_cpu for b in buffers)
            and sum(b.nbytes + _SMALL_BYTES // 64 for b in buffers) <= _SMALL_BYTES
        )
        self._before, self._held = self._read(), self._read_parameters()

    def forget(self) -> None:
        """Forget what was noted: an update was made in the place of the step under way."""
        self._before = None

    def has_altered(self) -> bool:
        """Return whether the passes since `note` have altered plain attributes."""
        return bool(self._list_altered(self._attributes))

    def check(self, rerun: Rerun | None = None, *, together: bool = False) -> None:
        """Refuse the model if the passes since `note` have altered a buffer that is state.

        A persistent buffer is state. Another one is none if `rerun`, which passes a micro-batch
        again, gives the same loss and leaves the same bytes: then it follows from the input alone.
        Members that pass `together` do so for attributes alone, if any of them has altered some.

        Raises:
            ConfigError: such a state would depend on which rank computed which micro-batch.
        """
        before, self._before = self._before, None
        if before is None:
            return
        self._check_parameters()
        self._check_attributes(rerun, together=together)
        rerun = None if together else rerun
        if self._steps < _FIRST_STEPS:
            self._places = list_buffers(self._model)
        self._steps += 1
        after = self._read()
        altered = [p for p in self._places if before.get(p.name) != after[p.name]]
        found = [p for p in altered if not p.transient]
        if not found and altered:
            found = [] if self._is_harmless(altered, rerun) else altered
            self.harmless |= {place.name for place in altered}
        if found:
            raise ConfigError(
                f"elastic: the forward pass alters the buffer {found[0].name}, which ranks would "
                "then not have in common",
                hint="use GroupNorm or LayerNorm, or track_running_stats=False",
            )

    def _check_parameters(self) -> None:
        """Refuse the model if its passes have altered a parameter.

        In the first steps the beginning of each is compared; later only torch's count of changes.
        A parameter may get another place in memory, as an RNN's do on a GPU.

        Raises:
            ConfigError: each member would alter it by its own micro-batches.
        """
        for name, (place, version, begins) in self._read_parameters().items():
            was = self._held[name]
            if begins != was[2] or (place == was[0] and version != was[1]):
                raise ConfigError(
                    f"elastic: the forward pass alters the parameter {name}, which ranks would "
                    "then not have in common",
                    hint="alter it in after_update=; an nn.Embedding's max_norm does so too",
                )

    def _read_parameters(self) -> dict[str, tuple[int, int, str]]:
        young = self._steps < _FIRST_STEPS
        return {
            name: (p.data_ptr(), p._version, _hash_beginning(p) if young else "")
            for name, p in self._parameters.items()
        }

    def _check_attributes(self, rerun: Rerun | None, *, together: bool) -> None:
        """Refuse the model if its passes depend on a plain attribute that they alter.

        A number that alters nothing so far, such as a counter or a time, is named once. It is
        looked at again, because a later pass may depend on it. A tensor, an array, or a generator
        with another content is refused.

        Raises:
            ConfigError: each member would have another value.
        """
        before, self._attributes = self._attributes, {}
        altered = self._list_altered(before)
        if rerun is None or not (altered or together):
            return
        left, results = self._read_attributes() if altered else {}, []
        for kept in (False, True):  # First with what the passes left.
            if kept:
                self._put_back(before, altered)
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                made = _describe_all(rerun())
            results.append([made, *self._hash_attributes(altered)])
        differs = [one != two for one, two in zip(*results, strict=True)]
        state = [key for key, differ in zip(altered, differs[1:], strict=True) if differ]
        if not differs[0]:
            numbers = [key for key in state if _is_number(left[key[0]].get(key[1]))]
            self._put_back(left, numbers)
            state = [key for key in state if key not in numbers]
            self._name(numbers)
        elif altered:
            state = state or altered
        self.harmless |= {_name_attribute(*key) for key in altered}
        if state:
            names = " or ".join(".".join(filter(None, key)) for key in state)
            raise ConfigError(
                f"elastic: the forward pass alters the attribute {names}, which ranks would "
                "then not have in common",
                hint="alter it in after_update=, which every member calls alike",
            )

    def _name(self, numbers: Sequence[tuple[str, str]]) -> None:
        """Name the attributes that members do not have in common, each once."""
        names = [_name_attribute(*key) for key in numbers]
        fresh = [name for name in names if name not in self.harmless]
        if fresh:
            say(
                f"elastic: members do not have {', '.join(fresh[:5])} in common: passes alter it, "
                "and no result depends on it so far. If one is to, alter it in after_update="
            )

    def _list_holders(self) -> dict[str, Any]:
        return list_holders(dict(self._model.named_modules()))

    def _read_attributes(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for path, owner in self._list_holders().items():
            found[path] = {}
            for name, value in read_vars(owner).items():
                with contextlib.suppress(NotPlainError):
                    if name[:1] != "_" or name not in _OF_MODULES:
                        kept = hash_plain(value, places=False), visit(pack(value), _clone, _same)
                        found[path][name] = kept
        return found

    def _list_altered(self, before: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
        if not before:
            return []
        return [
            (path, name)
            for path, found in self._read_attributes().items()
            for name, kept in found.items()
            if kept[0] != before.get(path, {}).get(name, (b"",))[0]
            and path in before
            and (_is_number(kept) or _name_attribute(path, name) not in self.harmless)
        ]

    def _put_back(self, before: dict[str, dict[str, Any]], altered: list[tuple[str, str]]) -> None:
        owners = self._list_holders()
        for path, name in altered:
            owner = owners[path]
            if name in before[path]:
                live = read_vars(owner).get(name)
                value = unpack(before[path][name][1], live, find_device(self._model))
                object.__setattr__(owner, name, value)
            elif name in read_vars(owner):
                object.__delattr__(owner, name)

    def _hash_attributes(self, names: list[tuple[str, str]]) -> list[bytes]:
        owners = self._list_holders()
        return [hash_plain(read_vars(owners[p]).get(n), places=False) for p, n in names]

    def _is_harmless(self, altered: Sequence["Place"], rerun: Rerun | None) -> bool:
        if rerun is None:  # Members that gather from each other cannot pass one alone.
            return self._steps > _FIRST_STEPS
        results = []
        for kept in ({}, self._kept if self._bytes else {}):  # The one that it has goes first.
            for place in altered:
                if place.name in kept:
                    place.owner[place.key] = kept[place.name]
            with torch.no_grad():
                made = _describe_all(rerun())
            results.append([made, *(_describe(place.value) for place in altered)])
        return bool(results[0] == results[1])

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for place in self._places:
            value = place.value
            if place.name in self.harmless or value is None:
                found[place.name] = None
            elif self._bytes:
                found[place.name] = _describe(value)
            else:
                found[place.name] = (value.data_ptr(), value._version, value.shape)
        return found


class Place(NamedTuple):
    """Where a buffer is."""

    name: str
    owner: dict[str, Tensor | None]
    key: str
    transient: bool
    """It is not persistent."""

    @property
    def value(self) -> Tensor | None:
        """Return the buffer."""
        return self.owner.get(self.key)


def list_buffers(model: nn.Module) -> list[Place]:
    """Return where the buffers of `model` are."""
    return [
        Place(
            f"{path}.{key}" if path else key,
            module._buffers,
            key,
            key in module._non_persistent_buffers_set,
        )
        for path, module in model.named_modules()
        for key in module._buffers
    ]


def _hash_beginning(parameter: Tensor) -> str:
    return hash_tensors([parameter.detach().reshape(-1)[:_BEGINNING]])


def _describe(value: Tensor | None) -> Any:
    return value if value is None else (value.dtype, value.shape, hash_tensors([value]))


def _clone(value: Tensor) -> Tensor:
    return value.detach().clone()


def _same(value: Any) -> Any:
    return value.copy() if hasattr(value, "dtype") else value


def _describe_all(made: Any) -> list[Any]:
    return [_describe(tensor) for tensor in collect_tensors(made)]


def _name_attribute(path: str, name: str) -> str:
    return f"model.{path}.{name}".replace("..", ".")


def _is_number(kept: tuple[bytes, Any] | None) -> bool:
    """Return whether an attribute is a number or a word, or a container of these."""
    if kept is None:
        return False
    generator = type(kept[1]) is tuple and kept[1][0] == "generator"
    return not generator and not has_array(kept[1])


OWN = (int, bool)
"""Kinds of attributes of which a rank may have its own value, such as its number."""
_OF_MODULES = frozenset(vars(nn.Module()))
_EVERY = 100
"""Steps between two comparisons of attributes."""
_FIRST_STEPS = 4
_BEGINNING = 1 << 16
"""Elements of a parameter that are compared."""
_SMALL_BYTES = 1 << 20
"""Bytes of at most 64 buffers, for each of which some microseconds pass beside."""


def make_model(blocks: Any) -> nn.Module:
    """Return `blocks` as one model: a module, or a list of them that is called in order."""
    return blocks if isinstance(blocks, nn.Module) else nn.Sequential(*blocks)


class ReplicatedState(Followed):
    """A state that everyone has whole: what one member has reduced is what all have.

    A newcomer follows all members.
    """

    work: Accumulation
    whole = True
    node = ""

    def __init__(
        self,
        replica: Replica,
        compute: Compute,
        *,
        count: int,
        seed: int,
        exact: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Train `replica` with `count` micro-batches a step, each once, by `compute`."""
        self.replica = replica
        self.snapshots = Snapshots(None, -1, Snapshot, every=0)
        self._count = count
        self._make_buckets = functools.partial(
            Buckets,
            bucket_bytes=bucket_bytes,
            rider=0 if exact else 2 * count + VOTES,
            names=replica.names,
        )
        self.work = Accumulation(
            compute,
            self._backward,
            self._make_buckets(replica.parameters),
            count=count,
            seed=seed,
            exact=exact,
            whole=True,
        )
        self._holds = False
        """The buffers of the step before have its reduced gradients."""

    # --- a step -------------------------------------------------------------------------------

    def _backward(self, loss: Tensor, counts: bool) -> None:
        self.replica.scale(loss).backward()  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Have room for the gradients of what is trained now."""
        self._fit()
        self.replica.guard.note()

    def check_step(self) -> None:
        """Refuse a model whose members would differ after this step."""
        if done := self.work.done:
            rerun = functools.partial(self.work.recompute, self.applied, done[-1])
            self.replica.guard.check(rerun)
        self.replica.check_parameters(self.work.buckets.params)

    def _fit(self) -> None:
        """Make other buckets if a script has frozen or unfrozen parameters.

        Members that are behind take the whole state: the sums of the step before are gone.
        """
        trained = self.replica.parameters
        if [id(p) for p in trained] != [id(p) for p in self.work.buckets.params]:
            self.work.fit(self._make_buckets(trained))
            self._holds = False

    def update(self, source: Source) -> None:
        """Apply the gradients that the buffers of this step have."""
        self.work.buckets.expose(self.applied)
        self.replica.guard.forget()
        self.work.seed_update(self.applied)
        altered = self.replica.update(clipped=source == "sent")
        self.applied += 1
        self._holds = source != "followed" and not altered
        self.work.clear()

    # --- the world ----------------------------------------------------------------------------

    def prepare(self, *, joins: bool) -> None:
        """Do once what a join does with a state: the first time takes a tenth of a second.

        Raises:
            ConfigError: an entry of the state could not be sent to others.
        """
        check_sendable(self.replica.state())
        if joins:
            skeleton, tensors = pack_state(self.replica.state())
            state, empty = open_state(skeleton)
            for target, tensor in zip(empty, tensors, strict=True):
                target.copy_(tensor)
            self.replica.load(state)

    def stand(self) -> MemberProgress:
        """Return how far this member is."""
        return MemberProgress(self.applied, tuple(self.work.done), self._holds)

    def decide(self, progress: Mapping[int, MemberProgress], line: int) -> Reformation:
        """Return how all come to one step."""
        return decide_reformation(self._count, progress)

    def list_reduced(self, step: int) -> list[Tensor]:
        """Return the reduced gradients, and the sums with them."""
        apart = [] if self.work.tally.rides else [self.work.tally.sums(step)]
        return [*self.work.buckets.flats(step), *apart]

    def take(self, plan: Reformation, group: Group, settings: dict[str, Any]) -> Taken:
        """Receive the whole state, where this member has none, or give a share of it."""
        donors = tuple(Holder(donor) for donor in plan.donors)
        moves = [Move(0, rank, donors) for rank in plan.fresh]
        found = move_blocks(group, moves, lambda holder, block: self.replica.state())
        if not found:
            self.applied = plan.step
            return Taken()
        self.replica.load(found[0])
        self._fit()
        self.applied, self._holds = plan.step, False
        self.work.clear()
        return Taken({}, changed=True)

    def enter(
        self, plan: Reformation, group: Group, progress: Mapping[int, MemberProgress], line: int
    ) -> None:
        """Compute what nobody has."""
        self.line = self.ready = line
        kept = {m: donor for donor in plan.donors for m in progress[donor].done}
        self.work.enter(plan.todo, kept, group.me, (group.me,))

    def list_units(self) -> dict[str, Any]:
        """Return the whole state as one unit, and what may differ as another one."""
        return {"": self.replica.list_compared(), NAMED: hash_attributes(self.replica.list_named())}

    # --- what outlives a loss -----------------------------------------------------------------

    def part(self, group: Group) -> tuple[bool, int, int]:
        """Return that the first member saves it all."""
        return group.index == 0, 0, 1

    def list_saved(self) -> dict[str, Any]:
        """Return the objects that have the state."""
        return self.replica.parts()

    def make_registry(self, number: int, count: int) -> Registry:
        """Return what knows the attributes as they were before any step."""
        registry = Registry(number, count)
        registry.born = dict(self.replica.registry.born)
        return registry

    # --- what a newcomer follows --------------------------------------------------------------

    def choose_donors(self, answers: Mapping[int, At], ahead: Sequence[int]) -> tuple[int, ...]:
        """Return all of them."""
        return tuple(answers)

    def become(self, state: Any, step: int, line: int) -> None:
        """Become `state`."""
        self.replica.load(state)
        self._fit()
        self.applied = step

    def hash_settings(self) -> str:
        """Return a hash of all else that an update depends on."""
        flags = xxhash.xxh3_64_hexdigest(repr(self.replica.flags()).encode())
        return super().hash_settings() + flags

    def list_sent(self) -> list[Tensor]:
        """Return the buffers of the gradients of the step under way."""
        return self.work.buckets.flats(self.applied)
