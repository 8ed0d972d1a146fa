"""Tests of an object of the script: does it give back the state that it was loaded with?

Before the first step, each object's state goes through memory into a twin. After a resume, the
object's state is compared with that of the checkpoint.
"""

import copy
import io
import sys
from typing import Any

import torch
from torch import Tensor

from perdure.model.errors import UnfitError
from perdure.worker.checkpoint.copying import is_ordinary, read_bits
from perdure.worker.checkpoint.plain import copy_plain, read_plain_state, visit
from perdure.worker.rng import keep_rng, put_back_rng

BYTES_MAX = 256 << 20
"""Size of a state up to which it is compared; the copies of a larger one could fill the memory."""
_COMPARED = (bool, int, float, complex, str, bytes, type(None))


def try_twin(name: str, value: Any) -> str:
    """Return what a twin of `value` lacks after it was loaded with the state of `value`.

    The twin shares what is no plain data, such as a scheduler's optimizer. No constructor runs.
    Objects without a dict of attributes, and those that make batches, have no twin.

    Raises:
        UnfitError: it refuses this state.
    """
    known = getattr(value, "__dict__", None)
    if known is None or is_own(value):
        return ""
    kept = keep_rng()
    try:
        try:
            state = value.state_dict()
            if _count_bytes(state) > BYTES_MAX:
                return ""
            file = io.BytesIO()
            torch.save(_flatten(state), file)
            file.seek(0)
            loaded = read_plain_state(torch.load(file, weights_only=True))
            twin = copy.copy(value)
            twin.__dict__.update({key: _copy(one) for key, one in known.items()})
        except Exception:  # It allows no copy.
            return ""
        try:
            twin.load_state_dict(loaded)
        except Exception as error:
            raise UnfitError(
                f"{name} ({type(value).__name__}).load_state_dict() refuses what its state_dict() "
                f"returns: {error!r}",
                hint="let it take its own state, or register what has the state",
            ) from error
        return find_lost(name, twin, state)
    finally:
        put_back_rng(kept)


def is_own(value: Any) -> bool:
    """Return whether `value` is perdure's own, or has a state that is only read while it runs."""
    return type(value).__module__.startswith("perdure.") or hasattr(value, "__iter__")


def find_lost(name: str, value: Any, state: Any) -> str:
    """Return which part of a loaded state `value` does not give back; empty if it has all."""
    if _count_bytes(state) > BYTES_MAX:
        return ""
    place = _find_difference(_flatten(state), _flatten(value.state_dict()), "")
    if place is None:
        return ""
    return f"{name} ({type(value).__name__}) does not restore {place or 'its state'}"


def _count_bytes(state: Any) -> int:
    """Return the bytes of the tensors and arrays in a state."""
    sizes: list[int] = []
    visit(state, lambda one: sizes.append(one.nbytes), lambda one: sizes.append(_size(one)))
    return sum(sizes)


def _size(value: Any) -> int:
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _copy(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    plain = isinstance(value, (Tensor, dict, list, set)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )
    return copy.deepcopy(value) if plain else value


def _flatten(state: Any) -> Any:
    return visit(state, lambda one: one.detach().cpu(), copy_plain)


def _find_difference(one: Any, other: Any, place: str) -> str | None:
    """Return the first place where two states differ; None if they are equal, as far as known."""
    if type(one) is not type(other):
        return place
    if isinstance(one, dict):
        if lost := [key for key in one if key not in other]:
            return f"{place}.{lost[0]}".lstrip(".")
        pairs = [(f"{place}.{key}".lstrip("."), one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return place
        pairs = [(f"{place}[{n}]", *pair) for n, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor):
        if not (is_ordinary(one) and is_ordinary(other)):
            return None
        same = one.shape == other.shape and one.dtype == other.dtype
        return None if same and torch.equal(read_bits(one), read_bits(other)) else place
    else:
        differs = isinstance(one, _COMPARED) and one != other and one == one
        return place if differs else None
    found = (_find_difference(left, right, where) for where, left, right in pairs)
    return next((where for where in found if where is not None), None)
