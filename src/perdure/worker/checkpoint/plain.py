"""State as plain data, which torch loads without running code: NumPy's arrays and numbers as well.

An array is kept as the bytes of an `.npy` file, in a tuple with a mark.
"""

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perdure.model.errors import UnfitError

_MARK = "perdure.numpy"
_SCALARS = frozenset({int, float, bool, type(None), str, bytes, torch.dtype})


def visit(value: Any, change: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Return a state in which `change` has replaced each tensor, and `other` each other value."""
    if isinstance(value, dict):
        return {key: visit(one, change, other) for key, one in value.items()}
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        if _SCALARS.issuperset(map(type, value)):  # Such as the state of a random generator.
            return type(value)(value)
        return type(value)(visit(one, change, other) for one in value)
    return other(value)


def copy_plain(value: Any) -> Any:
    """Return a copy of a value; an array or a number of NumPy as plain data."""
    if type(value) in _SCALARS:
        return value
    numpy = sys.modules.get("numpy")
    if (
        numpy is None
        or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
        or value.dtype.hasobject
    ):
        return copy.deepcopy(value)
    file = io.BytesIO()
    numpy.save(file, value, allow_pickle=False)
    data = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
    return _MARK, isinstance(value, numpy.generic), data


def read_plain_state(value: Any) -> Any:
    """Return what was saved, with the arrays and numbers of NumPy that it had.

    Raises:
        ValueError: an array is damaged.
    """
    if isinstance(value, dict):
        return {key: read_plain_state(one) for key, one in value.items()}
    if type(value) is tuple and len(value) == 3 and value[0] == _MARK:
        import numpy

        array = numpy.load(io.BytesIO(value[2].numpy().tobytes()), allow_pickle=False)
        return array[()] if value[1] else array
    if type(value) in (list, tuple):
        return type(value)(map(read_plain_state, value))
    return value


def check_plain(what: str, state: Any) -> None:
    """Refuse a state that a checkpoint could not keep.

    Raises:
        UnfitError: torch would have to run code to load it.
    """
    file = io.BytesIO()
    try:
        torch.save(visit(state, lambda one: torch.empty(0, dtype=one.dtype), copy_plain), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise UnfitError(
            f"the state of {what} {_name_cause(file, error)}: nothing could be saved",
            hint="let state_dict() return tensors, arrays, numbers, strings, lists, and dicts, "
            "or set checkpoint.allow_pickle",
        ) from None


def _name_cause(file: io.BytesIO, error: Exception) -> str:
    try:
        file.seek(0)
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # Nothing that can be read was written.
        names = []
    if names:
        return f"holds {', '.join(names[:3])}"
    return f"cannot be pickled ({str(error).partition(chr(10))[0][:200]})"
