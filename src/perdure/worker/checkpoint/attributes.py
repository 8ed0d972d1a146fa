"""Numbers and tensors that a module or an optimizer has as plain attributes, and changes.

A temperature that is annealed, a counter of passes, or a hidden state is in no `state_dict()`. Only
what has changed since the object was registered is kept. So a constant that you edit between two
runs has the value of the script. Classes of torch keep their state elsewhere.
"""

import functools
from typing import Any

from torch import Tensor, nn

_NUMBERS = frozenset((bool, int, float, complex))
BYTES_MAX = 64 << 20
"""Size of a tensor up to which it is kept."""
_ALWAYS = ("training",)
"""Kept by `modules.load_flags`."""

_STATELESS = ("torch", "perdure", "builtins", "abc", "typing", "collections")
"""Packages whose classes have no state in plain attributes."""
_UNKNOWN: Any = (object(), -1)
Born = dict[str, tuple[Any, int]]
"""Attribute -> its value at the registration, and the version of a tensor."""


def note_attributes(owners: dict[str, Any]) -> dict[str, Born]:
    """Return what the attributes of `owners`, by their paths, are now."""
    return {
        path: {n: (v, _read_version(v)) for n, v in vars(owner).items() if _is_plain(v)}
        for path, owner in owners.items()
        if _may_keep(type(owner).__mro__)
    }


def read_changed(owners: dict[str, Any], born: dict[str, Born]) -> dict[str, dict[str, Any]]:
    """Return the attributes that have changed, by owner and name; None if it is too large."""
    found: dict[str, dict[str, Any]] = {}
    for path, owner in owners.items():
        if not _may_keep(type(owner).__mro__):
            continue
        before = born.get(path, {})
        for name, value in vars(owner).items():
            kind = type(value)
            if (kind not in _NUMBERS and kind is not Tensor) or name in _ALWAYS:
                continue
            old, version = before.get(name, _UNKNOWN)
            if kind is not Tensor:
                if type(old) is not kind or value != old:
                    found.setdefault(path, {})[name] = value
            elif _is_plain(value) and (value is not old or value._version != version):
                kept = (value.device.type, value.detach()) if _is_small(value) else None
                found.setdefault(path, {})[name] = kept
    return found


def list_large(saved: dict[str, dict[str, Any]]) -> list[str]:
    """Return the attributes that were too large to be kept."""
    return [f"{path}.{n}" for path, values in saved.items() for n in values if values[n] is None]


def load_attributes(owners: dict[str, Any], saved: dict[str, dict[str, Any]]) -> None:
    """Put changed attributes back; a tensor of a device to that of its module."""
    for path, values in saved.items():
        owner = owners.get(path)
        if owner is None:
            continue
        for name, value in values.items():
            if isinstance(value, tuple):
                kind, value = value
                value = value.to(_find_device(owner) if kind != "cpu" else kind)
            if value is not None:
                setattr(owner, name, value)


@functools.cache
def _may_keep(kinds: tuple[type, ...]) -> bool:
    """Return whether a class of a script or of another library is among `kinds`.

    FSDP2 gives each module a class of torch in front of its own.
    """
    return any(kind.__module__.partition(".")[0] not in _STATELESS for kind in kinds)


def _is_plain(value: Any) -> bool:
    """Return whether it is a number, or a tensor that is no parameter.

    A large part of a graph is an activation that a module notes, and is needed by no later step.
    """
    if type(value) is Tensor:
        return not value.is_inference() and (value.grad_fn is None or _is_small(value))
    return type(value) in _NUMBERS


def _is_small(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() * value.itemsize <= BYTES_MAX


def _read_version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _find_device(owner: Any) -> Any:
    tensors = owner.parameters() if isinstance(owner, nn.Module) else ()
    return next((one.device for one in tensors), "cpu")
