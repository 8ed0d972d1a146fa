"""Which objects of a script only count: meters, timers, metrics.

Such an object has plain data, and its methods reach no other object. Training depends on it only
through values that its methods return. `carried.py` follows these values.
"""

import ast
import functools
import inspect
import textwrap
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from perdure.worker.checkpoint.attributes import SPACES, is_own_class, is_own_file, read_vars

_ACTS = ("backward", "data", "grad", "load_state_dict", "manual_seed", "param_groups", "random",
         "register_hook", "seed", "step")  # fmt: skip
"""Attributes by which a method may reach training, also through a tensor that it gets."""
_ANY = ("eval", "exec", "globals", "setattr", "vars")
"""Functions by which a method may reach anything."""
_SCALARS = (int, float, complex, str, bytes, type(None))
_LIBRARY = (type, types.ModuleType, types.BuiltinFunctionType)
_TOOLS = ("_csv", "_io", "_thread", "datetime", "logging", "numpy", "pathlib", "threading")
"""Packages whose objects have no part in training."""
_ITEMS, _DEPTH_MAX = 4096, 8


def is_counting(node: ast.AST, find: Callable[[str], Any], kept: set[int]) -> bool:
    """Return whether an expression only calls or enters an object that counts.

    `find` returns the value of a name; None if it has none yet. `kept` are ids of all that a
    checkpoint has.
    """
    given = (
        [*node.args, *(one.value for one in node.keywords)] if isinstance(node, ast.Call) else []
    )
    names = (one.id for part in given for one in ast.walk(part) if isinstance(one, ast.Name))
    owner = find(find_root(node))
    return is_counter(owner, kept) and not any(_may_train(find(n), kept) for n in names)


def find_root(node: ast.AST) -> str:
    """Return the name that an expression begins with; empty if it begins with none."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_counter(value: Any, kept: set[int], depth: int = 0) -> bool:
    """Return whether an object only counts, or a container has such objects only."""
    kind: Any = type(value)
    if kind.__module__ in ("builtins", "collections") and isinstance(
        value, list | tuple | dict | set | deque
    ):
        own, parts = bool(value), list(value.values() if isinstance(value, dict) else value)
    else:
        own = kind in SPACES or (is_own_class(kind) and _is_gentle(kind))
        parts = list(read_vars(value).values()) if own else []
    return (
        own
        and depth < _DEPTH_MAX
        and not any(_may_train(one, kept, depth + 1) for one in parts[:_ITEMS])
    )


def _may_train(value: Any, kept: set[int], depth: int = 0) -> bool:
    """Return whether a method that gets this value may change training by it."""
    if isinstance(value, Tensor):
        return id(value) in kept or (value.is_leaf and value.requires_grad)
    if isinstance(value, _SCALARS) or type(value).__module__.partition(".")[0] in _TOOLS:
        return False
    if isinstance(value, _LIBRARY):
        return is_own_file(getattr(value, "__file__", None) or "")
    empty = isinstance(value, list | dict | set | deque) and not value
    return not empty and not is_counter(value, kept, depth)


@functools.cache
def _is_gentle(kind: type) -> bool:
    """Return whether the methods of a class reach only their object and their arguments."""
    return all(
        is_own_class(one) and all(map(_is_gentle_function, _list_functions(one)))
        for one in kind.__mro__[:-1]
    )


def _list_functions(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, types.FunctionType) and is_own_file(inner.__code__.co_filename):
            yield inner


def _is_gentle_function(function: types.FunctionType) -> bool:
    own = function.__code__.co_varnames[:1]
    if set(function.__code__.co_freevars) - {"__class__"}:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript):
            word = getattr(node, "attr", "")
            acts = word in _ACTS or (word[-1:] == "_" and word[-2:] != "__")
            if acts or (not isinstance(node.ctx, ast.Load) and find_root(node) not in own):
                return False
        elif isinstance(node, ast.Name):
            if node.id in _ANY or _may_train(function.__globals__.get(node.id), set()):
                return False
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            return False  # It may be a tensor that the method got.
    return True
