"""What modules, optimizers, and objects of the script have as plain attributes, and change.

A temperature that is annealed, a hidden state, a memory of features in a list, or a generator is in
no `state_dict()`. Only what has changed since the object was registered is kept. So a constant that
you edit between two runs has the value of the script. Classes of torch keep their state elsewhere.
"""

import argparse
import contextlib
import enum
import functools
import itertools
import marshal
import random
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_PLAIN = (list, tuple, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
BYTES_MAX = 64 << 20
"""Size of a tensor or an array up to which it is kept."""
_ITEMS_MAX = 1 << 17
"""Entries of all containers of one attribute up to which it is kept."""
_MARSHALLED = 1 << 22
"""Entries of a container of scalars up to which all of them are compared."""
_HASHED = 1 << 20
"""Bytes of a tensor up to which they are compared; torch counts the changes of a larger one."""
BASE = frozenset(
    {*vars(nn.Module()), *vars(Optimizer([nn.Parameter()], {})), "training", "_forward_module"}
)
"""Attributes that torch's own classes keep, or that have a place of their own in a checkpoint."""
_STATELESS = ("torch", "perdure", "builtins", "abc", "typing", "collections", "numpy", "random")
"""Packages whose classes have no state in plain attributes."""
_LAYERS = ("torch.nn.modules.", "torch.ao.", "torch.optim.")
"""Modules of torch whose classes a script may change: a momentum, the share of a dropout."""
_ROOTS = ("torch.nn.modules.module", "torch.optim.optimizer", "torch.optim.lr_scheduler",
          "torch.optim.swa_utils")  # fmt: skip
"""Those with a state elsewhere, or none."""
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_FACTORIES = {one.__name__: one for one in (bool, int, float, str, *_PLAIN, *_DICTS)}
"""What may make the entries that a defaultdict lacks, by name."""
CALLED = (types.FunctionType, types.MethodType, functools.partial, Iterator, enum.Enum)
"""What may keep values from call to call, and an Enum, which may be within a function."""
SPACES = (types.SimpleNamespace, argparse.Namespace)
_GONE = ("gone",)
"""In the place of an attribute that the script has deleted."""
Born = dict[str, tuple[bytes, int]]
"""Attribute -> a hash of its value at the registration, and its id. "" has that of the class."""


class NotPlainError(Exception):
    """A value that is no plain data."""


def list_holders(roots: dict[str, Any]) -> dict[str, Any]:
    """Return `roots` and the objects of the script's own classes that they have, by their paths."""
    found = {path: one for path, one in roots.items() if _may_keep(type(one).__mro__)}
    seen = set(map(id, roots.values()))
    left = list(found.items())
    while left:
        path, owner = left.pop()
        for name, value in read_vars(owner).items():
            if name in BASE or type(value) in _SCALARS:
                continue
            for place, one in _list_entries(value):
                if id(one) not in seen and _is_holder(one):
                    seen.add(id(one))
                    inner = f"{path}.{name}{place}".lstrip(".")
                    found[inner] = one
                    left.append((inner, one))
    return found


def _is_holder(one: Any) -> bool:
    """Return whether an object has attributes that a script changes; an Enum's are its own."""
    with contextlib.suppress(Exception):  # A proxy may know no class yet.
        kind: Any = type(one)
        own = is_own_class(one.__class__) and not isinstance(one, type | enum.Enum)
        return kind in SPACES or (own and (hasattr(one, "__dict__") or bool(_list_slots(kind))))
    return False


def read_vars(owner: Any) -> dict[str, Any]:
    """Return the attributes that an object has itself, also those in slots."""
    kind: Any = type(owner)
    slots = {name: getattr(owner, name) for name in _list_slots(kind) if hasattr(owner, name)}
    return slots | getattr(owner, "__dict__", {})


@functools.cache
def _list_slots(kind: type) -> tuple[str, ...]:
    own = [one.__dict__.get("__slots__", ()) for one in kind.__mro__ if is_own_class(one)]
    several = ((one,) if isinstance(one, str) else one for one in own)
    return tuple(name for names in several for name in names if name[:2] != "__")


def _list_entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a value, or what a container has, if it may be an object of the script's own."""
    if type(value) in (list, tuple, deque, *_DICTS):
        several = value.items() if type(value) in _DICTS else enumerate(value)
        for key, one in several:
            if type(one) not in _SCALARS and not isinstance(one, Tensor | nn.Module | Optimizer):
                yield f".{key}", one
    elif type(value) not in _SCALARS and not isinstance(value, Tensor | nn.Module | Optimizer):
        yield "", value


def note_attributes(owners: dict[str, Any]) -> dict[str, Born]:
    """Return hashes of what the attributes of `owners`, by their paths, are now."""
    return {
        path: {"": (b"", id(type(one))), **{n: (now, id(v)) for n, v, now in _list_hashes(one)}}
        for path, one in list_holders(owners).items()
    }


def read_changed(
    owners: dict[str, Any], born: dict[str, Born], *, placed: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the attributes that have changed, by owner and name; None if it is too large.

    If `placed`, each says whether it is the object that was registered, or has taken its place, and
    what several have is saved once.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: dict[int, int] | None = {} if placed else None
    for path, owner in list_holders(owners).items():
        before = born.get(path, {})
        for name, value, now in _list_hashes(owner):
            was, place = before.get(name, (b"", 0))
            if was != now:
                packed = pack(value, seen) if _measure(value) else None
                if placed and packed is not None and type(value) not in _SCALARS:
                    packed = "place", place == id(value), packed
                found.setdefault(path, {})[name] = packed
        if before.get("") == (b"", id(type(owner))):
            for name in before.keys() - read_vars(owner).keys() - {""}:
                found.setdefault(path, {})[name] = _GONE
    return found


def read_common(
    owners: dict[str, Any], born: dict[str, Born], kinds: tuple[type, ...] = (float,)
) -> dict[str, dict[str, Any]]:
    """Return the attributes that have changed, and all tensors, arrays, and values of `kinds`.

    A script may draw these at random, without a seed that all ranks have in common, or was edited.
    A whole number, a flag, or a word may be the rank's own.
    """
    found = read_changed(owners, born)
    for path, values in read_changed(owners, {}).items():
        drawn = {k: one for k, one in values.items() if type(one) in kinds or has_array(one)}
        if drawn:
            found[path] = drawn | found.get(path, {})
    return found


def has_array(packed: Any) -> bool:
    """Return whether a packed attribute has a tensor or an array."""
    if isinstance(packed, tuple | list):
        return any(map(has_array, packed))
    return isinstance(packed, Tensor) or _is_array(packed)


def list_large(saved: dict[str, dict[str, Any]]) -> list[str]:
    """Return the attributes that were too large to be kept."""
    return [f"{path}.{n}" for path, values in saved.items() for n in values if values[n] is None]


def load_attributes(owners: dict[str, Any], saved: dict[str, dict[str, Any]]) -> None:
    """Put changed attributes back; a tensor of a device to that of its module."""
    holders = list_holders(owners)
    made: list[Any] = []
    for path, values in saved.items():
        owner = holders.get(path)
        known, device = read_vars(owner), _find_device(owner)
        for name, value in values.items():
            if type(value) is tuple and value[:1] == _GONE:
                if name in known:
                    object.__delattr__(owner, name)
            elif value is not None:
                live, inner, packed = known.get(name), None, value
                if type(value) is tuple and value[0] == "place":
                    inner, packed = not value[1], value[2]
                again = inner and type(packed) is tuple and packed[0] == "generator"
                fresh = unpack(packed, None if again else live, device, made, inner)
                if owner is not None and (fresh is not live or name not in known):
                    object.__setattr__(owner, name, fresh)  # It may be frozen.


def _list_hashes(owner: Any) -> Iterator[tuple[str, Any, bytes]]:
    """Yield each plain attribute with its value and a hash of it."""
    for name, value in read_vars(owner).items():
        if name not in BASE:
            computed = type(value) is Tensor and value.grad_fn is not None
            if computed and type(owner).__module__.startswith("torch."):
                continue  # Such as the weight that old `weight_norm` makes in each pass.
            with contextlib.suppress(NotPlainError):
                yield name, value, hash_plain(value)


def hash_plain(value: Any, entries: int = _ITEMS_MAX, *, places: bool = True) -> bytes:
    """Return a hash of plain data; with `places`, of a tensor's place and version, too.

    A container with more than this number of `entries` is sampled.

    Raises:
        NotPlainError: it is none.
    """
    state = xxhash.xxh3_128()
    try:
        if type(value) in _SCALARS:
            return f"{type(value).__name__} {value!r}".encode()
        _feed(value, state, entries, places)
    except (RecursionError, ValueError) as error:  # It is within itself, or has too many digits.
        raise NotPlainError from error
    return state.digest()


def _feed(value: Any, state: Any, entries: int, places: bool) -> None:
    kind = type(value)
    state.update(kind.__name__.encode())
    if kind in _SCALARS:
        state.update(repr(value).encode())
    elif kind is Tensor:
        odd = value.is_inference() or value.is_nested or value.is_meta
        if odd or value.layout != torch.strided or _is_activation(value):
            raise NotPlainError
        state.update(repr((value.dtype, value.shape)).encode())
        if places:
            state.update(repr((id(value), value._version)).encode())
        small = value.device.type == "cpu" and value.nbytes <= _HASHED
        if (small or not places) and not value.is_quantized:
            plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
            state.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif kind in _DICTS or kind in _PLAIN:
        items = value.items() if kind in _DICTS else value
        state.update(repr((len(items), getattr(value, "maxlen", None))).encode())
        if kind in (set, frozenset):
            items = sorted(items, key=repr)
        if entries < len(items) <= _MARSHALLED and _is_flat(value):
            state.update(marshal.dumps(list(items), 2))  # A sample could miss what has changed.
            return
        for one in list(itertools.islice(items, 0, None, max(1, len(items) // entries))):
            _feed(one, state, entries, places)
    elif isinstance(value, enum.Enum) and _find_enum(kind.__module__, kind.__qualname__) is kind:
        state.update(repr(value.value).encode())
    elif _is_array(value):
        state.update(repr((value.dtype, value.shape)).encode())
        state.update(
            value.tobytes() if value.nbytes <= BYTES_MAX else value.ravel()[::997].tobytes()
        )
    else:
        state.update(repr(read_generator(value)).encode())


def _is_flat(value: Any) -> bool:
    """Return whether a container has scalars only."""
    keys = set(map(type, value))
    return keys <= _SCALARS and (
        not isinstance(value, dict) or set(map(type, value.values())) <= _SCALARS
    )


def read_generator(value: Any) -> Any:
    """Return the state of a generator of random numbers.

    Raises:
        NotPlainError: it is none.
    """
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    raise NotPlainError


def pack(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return plain data for torch to save: the kind of each value, and its content.

    `seen` has the number of each object that was packed before, by its id.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if seen is not None:
        if id(value) in seen:
            return "same", seen[id(value)]
        seen[id(value)] = len(seen)
    if _is_array(value):
        return value
    if kind is Tensor:
        return "tensor", value.device.type, value.detach(), value.requires_grad and value.is_leaf
    if kind in _DICTS:
        pairs = [(pack(key, seen), pack(one, seen)) for key, one in value.items()]
        return kind.__name__, pairs, getattr(getattr(value, "default_factory", 0), "__name__", "")
    if kind in _PLAIN:
        return kind.__name__, [pack(one, seen) for one in value], getattr(value, "maxlen", None)
    if isinstance(value, enum.Enum):
        return "enum", kind.__module__, kind.__qualname__, pack(value.value)
    return "generator", read_generator(value)


def unpack(
    value: Any, live: Any, device: Any, made: list[Any] | None = None, inner: bool | None = None
) -> Any:
    """Return what `pack` was given; if it can be, `live` itself with this content.

    `made` has what was unpacked before, by its number. If `inner`, `live` is left as it is; unless
    False is given for it, a tensor is.
    """
    made = [] if made is None else made
    if type(value) in _SCALARS:
        return value
    if type(value) is tuple and value[0] == "same":
        return made[value[1]]
    place = len(made)
    made.append(None)
    made[place] = _unpack(value, live, device, made, inner)
    return made[place]


def _unpack(value: Any, live: Any, device: Any, made: list[Any], inner: bool | None) -> Any:
    if type(value) is not tuple:
        alike = not inner and _is_array(value) and type(live) is type(value) and live.ndim
        if not alike or live.dtype != value.dtype or live.shape != value.shape:
            return value
        if live.flags.writeable:
            live[...] = value  # Others may hold this very array.
        return live if live.flags.writeable else value
    word, *rest = value
    if len(rest) == 1 and isinstance(rest[0], Tensor):  # As checkpoints of 0.2.0 have it.
        word, rest = "tensor", [word, rest[0], False]
    if word == "tensor":
        kind, tensor, grad = rest
        if inner is False and _is_like(live, kind, tensor):
            with torch.no_grad():
                live.copy_(tensor)  # Others may hold it, or a view.
            return live.requires_grad_(grad)
        return tensor.to(device if kind != "cpu" else kind).requires_grad_(grad)
    if word == "generator":
        return _set_generator(live, rest[0], device)
    if word == "enum":
        if (found := _find_enum(*rest[:2])) is None:
            raise LookupError(f"the script has no Enum {rest[1]}")
        return found(unpack(rest[2], None, device))
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (*_DICTS, *_PLAIN)}
    if kinds[word] in _DICTS:
        fresh = kinds[word]()
        if word == "defaultdict":
            make = getattr(live, "default_factory", None)
            fresh.default_factory = make or _FACTORIES.get("".join(rest[1:]))
        pairs = ((unpack(key, None, device, made), one) for key, one in rest[0])
        fresh.update(
            {key: unpack(one, _find_inner(live, key), device, made, True) for key, one in pairs}
        )
    else:
        items = [
            unpack(one, _find_inner(live, number), device, made, True)
            for number, one in enumerate(rest[0])
        ]
        fresh = deque(items, rest[1]) if word == "deque" else kinds[word](items)
    if inner or type(live) is not type(fresh) or type(live) in (tuple, frozenset):
        return fresh
    if isinstance(live, deque) and live.maxlen != fresh.maxlen:
        return fresh
    live.clear()  # Others may hold this very object.
    if isinstance(live, list | deque):
        live.extend(fresh)
    else:
        live.update(fresh)
    return live


def _find_inner(live: Any, key: Any) -> Any:
    """Return what a container has, or would make, at a place; None for nothing."""
    if isinstance(live, dict):
        make = getattr(live, "default_factory", None)
        return live.get(key, make and make())
    several = isinstance(live, list | tuple | deque)
    return live[key] if several and key < len(live) else None


def _is_like(live: Any, kind: str, saved: Tensor) -> bool:
    """Return whether a tensor can take a saved value in place."""
    plain = type(live) is Tensor and live.is_leaf and not live.is_inference()
    same = plain and (live.shape, live.dtype, live.device.type) == (saved.shape, saved.dtype, kind)
    return same and 0 not in live.stride()


def _find_enum(module: str, name: str) -> Any:
    """Return the Enum of this name that the script has; None for anything else."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, enum.EnumType) else None


def _set_generator(live: Any, state: Any, device: Any) -> Any:
    """Return `live`, or a new generator, with this state."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(state, tuple):
        live = live if isinstance(live, random.Random) else random.Random()
        live.setstate(state)
    elif isinstance(state, list):
        if not isinstance(live, torch.Generator):
            on_cpu = len(state) == torch.default_generator.get_state().numel()
            live = torch.Generator("cpu" if on_cpu else device)
        live.set_state(torch.tensor(state, dtype=torch.uint8))
    elif "has_gauss" in state:
        live = live if isinstance(live, numpy.random.RandomState) else numpy.random.RandomState()
        live.set_state(state)
    else:
        if not isinstance(live, numpy.random.Generator):
            live = numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())
        live.bit_generator.state = state
    return live


def _measure(value: Any) -> bool:
    """Return whether a value is small enough to be kept."""
    left, num = [value], 0
    while left:
        one = left.pop()
        num += 1
        if num > _ITEMS_MAX or (hasattr(one, "nbytes") and one.nbytes > BYTES_MAX):
            return False
        if type(one) in _DICTS:
            left += one.values()
        elif type(one) in _PLAIN:
            left += one
    return True


@functools.cache
def _may_keep(kinds: tuple[type, ...]) -> bool:
    """Return whether a class of a script, of another library, or a layer is among `kinds`.

    FSDP2 gives each module a class of torch in front of its own.
    """
    several = [str(kind.__module__) for kind in kinds]
    return any(
        name.partition(".")[0] not in _STATELESS
        or (name.startswith(_LAYERS) and name not in _ROOTS)
        for name in several
    )


@functools.cache
def is_own_class(kind: type) -> bool:
    """Return whether a class is the script's own, and not of an installed package."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_own_file(getattr(module, "__file__", None) or "")


@functools.cache
def is_own_file(path: str) -> bool:
    """Return whether a file is the script's own, and not of an installed package."""
    own = __file__.partition("/worker/")[0]
    return path.endswith(".py") and not path.startswith((*_LIBRARIES, own))


def _is_activation(value: Tensor) -> bool:
    """Return whether it is a large part of a graph, which no later step needs."""
    return value.grad_fn is not None and value.nbytes > BYTES_MAX


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    return not value.dtype.hasobject


def _find_device(owner: Any) -> Any:
    tensors = owner.parameters() if isinstance(owner, nn.Module) else ()
    return next((one.device for one in tensors), "cpu")
