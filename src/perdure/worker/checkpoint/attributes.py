"""What modules, optimizers, and objects of the script have as plain attributes, and change.

A temperature that is annealed, a hidden state, a memory of features in a list, or a generator is in
no `state_dict()`. Only what has changed since the object was registered is kept. So a constant that
you edit between two runs has the value of the script. Classes of torch keep their state elsewhere.
"""

import functools
import random
import sys
import sysconfig
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
_HASHED = 1 << 20
"""Bytes of a tensor up to which they are compared; torch counts the changes of a larger one."""
_BASE = frozenset(
    {*vars(nn.Module()), *vars(Optimizer([nn.Parameter()], {})), "training", "_forward_module"}
)
"""Attributes that torch's own classes keep, or that have a place of their own in a checkpoint."""
_STATELESS = ("torch", "perdure", "builtins", "abc", "typing", "collections", "numpy", "random")
"""Packages whose classes have no state in plain attributes."""
_LIBRARIES = tuple(
    sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
Born = dict[str, bytes]
"""Attribute -> a hash of its value at the registration."""


class NotPlainError(Exception):
    """A value that is no plain data."""


def list_holders(roots: dict[str, Any]) -> dict[str, Any]:
    """Return `roots` and the objects of the script's own classes that they have, by their paths."""
    found = {path: one for path, one in roots.items() if _may_keep(type(one).__mro__)}
    seen = set(map(id, roots.values()))
    left = list(found.items())
    while left:
        path, owner = left.pop()
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if name in _BASE:
                continue
            for place, one in _list_entries(value):
                if id(one) not in seen and is_own_class(one.__class__) and hasattr(one, "__dict__"):
                    seen.add(id(one))
                    inner = f"{path}.{name}{place}".lstrip(".")
                    found[inner] = one
                    left.append((inner, one))
    return found


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
    return {path: dict(_list_hashes(one)) for path, one in list_holders(owners).items()}


def read_changed(owners: dict[str, Any], born: dict[str, Born]) -> dict[str, dict[str, Any]]:
    """Return the attributes that have changed, by owner and name; None if it is too large."""
    found: dict[str, dict[str, Any]] = {}
    for path, owner in list_holders(owners).items():
        before = born.get(path, {})
        for name, now in _list_hashes(owner):
            if before.get(name) != now:
                value = vars(owner)[name]
                found.setdefault(path, {})[name] = pack(value) if _measure(value) else None
    return found


def list_large(saved: dict[str, dict[str, Any]]) -> list[str]:
    """Return the attributes that were too large to be kept."""
    return [f"{path}.{n}" for path, values in saved.items() for n in values if values[n] is None]


def load_attributes(owners: dict[str, Any], saved: dict[str, dict[str, Any]]) -> None:
    """Put changed attributes back; a tensor of a device to that of its module."""
    holders = list_holders(owners)
    for path, values in saved.items():
        owner = holders.get(path)
        if owner is None:
            continue
        for name, value in values.items():
            if value is not None:
                live = getattr(owner, "__dict__", {}).get(name)
                fresh = unpack(value, live, _find_device(owner))
                if fresh is not live:
                    setattr(owner, name, fresh)


def _list_hashes(owner: Any) -> Iterator[tuple[str, bytes]]:
    """Yield each plain attribute with a hash of its value."""
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if name not in _BASE:
            try:
                yield name, hash_plain(value)
            except NotPlainError:
                continue


def hash_plain(value: Any, entries: int = _ITEMS_MAX, *, places: bool = True) -> bytes:
    """Return a hash of plain data; with `places`, of a tensor's place and version, too.

    A container with more than this number of `entries` is sampled.

    Raises:
        NotPlainError: it is none.
    """
    state = xxhash.xxh3_128()
    _feed(value, state, entries, places)
    return state.digest()


def _feed(value: Any, state: Any, entries: int, places: bool) -> None:
    kind = type(value)
    state.update(kind.__name__.encode())
    if kind in _SCALARS:
        state.update(repr(value).encode())
    elif kind is Tensor:
        if value.is_inference() or value.layout != torch.strided or _is_activation(value):
            raise NotPlainError
        state.update(repr((value.dtype, value.shape)).encode())
        if places:
            state.update(repr((id(value), value._version)).encode())
        small = value.device.type == "cpu" and value.nbytes <= _HASHED
        if (small or not places) and not value.is_quantized:
            plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
            state.update(plain.reshape(-1).view(torch.uint8).numpy())
    elif kind in _DICTS or kind in _PLAIN:
        items = list(value.items()) if kind in _DICTS else list(value)
        state.update(repr((len(items), getattr(value, "maxlen", None))).encode())
        if kind in (set, frozenset):
            items = sorted(items, key=repr)
        for place in range(0, len(items), max(1, len(items) // entries)):
            _feed(items[place], state, entries, places)
    elif _is_array(value):
        state.update(repr((value.dtype, value.shape)).encode())
        state.update(
            value.tobytes() if value.nbytes <= BYTES_MAX else value.ravel()[::997].tobytes()
        )
    else:
        state.update(repr(read_generator(value)).encode())


def read_generator(value: Any) -> Any:
    """Return the state of a generator of random numbers.

    Raises:
        NotPlainError: it is none.
    """
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    raise NotPlainError


def pack(value: Any) -> Any:
    """Return plain data for torch to save: the kind of each value, and its content."""
    kind = type(value)
    if kind in _SCALARS or _is_array(value):
        return value
    if kind is Tensor:
        return "tensor", value.device.type, value.detach(), value.requires_grad and value.is_leaf
    if kind in _DICTS:
        return kind.__name__, [(pack(key), pack(one)) for key, one in value.items()]
    if kind in _PLAIN:
        return kind.__name__, [pack(one) for one in value], getattr(value, "maxlen", None)
    return "generator", read_generator(value)


def unpack(value: Any, live: Any, device: Any) -> Any:
    """Return what `pack` was given; if it can be, `live` itself with this content."""
    if type(value) is not tuple:
        alike = _is_array(value) and type(live) is type(value) and live.dtype == value.dtype
        if not alike or live.shape != value.shape or not live.ndim or not live.flags.writeable:
            return value
        live[...] = value  # Others may hold this very array.
        return live
    word, *rest = value
    if len(rest) == 1 and isinstance(rest[0], Tensor):  # As checkpoints of 0.2.0 have it.
        word, rest = "tensor", [word, rest[0], False]
    if word == "tensor":
        kind, tensor, grad = rest
        return tensor.to(device if kind != "cpu" else kind).requires_grad_(grad)
    if word == "generator":
        return _set_generator(live, rest[0])
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (*_DICTS, *_PLAIN)}
    if kinds[word] in _DICTS:
        pairs = [(unpack(key, None, device), unpack(one, None, device)) for key, one in rest[0]]
        fresh = kinds[word]()
        fresh.update(dict(pairs))
    else:
        items = [unpack(one, None, device) for one in rest[0]]
        fresh = deque(items, rest[1]) if word == "deque" else kinds[word](items)
    if type(live) is not type(fresh) or type(live) in (tuple, frozenset):
        return fresh
    if isinstance(live, deque) and live.maxlen != fresh.maxlen:
        return fresh
    live.clear()  # Others may hold this very object.
    if isinstance(live, list | deque):
        live.extend(fresh)
    else:
        live.update(fresh)
    return live


def _set_generator(live: Any, state: Any) -> Any:
    if isinstance(live, random.Random):
        live.setstate(state)
    elif isinstance(live, torch.Generator):
        live.set_state(torch.tensor(state, dtype=torch.uint8))
    elif hasattr(live, "bit_generator"):
        live.bit_generator.state = state
    elif live is not None:
        live.set_state(state)
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
    """Return whether a class of a script or of another library is among `kinds`.

    FSDP2 gives each module a class of torch in front of its own.
    """
    return any(kind.__module__.partition(".")[0] not in _STATELESS for kind in kinds)


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
