"""Which objects of a script only count: meters, timers, lists of losses.

Such an object has numbers and words. Only names of one frame refer to it, and other such objects.
Its methods get numbers and words, and reach no other object. Training depends on it only through
values that its methods return. `carried.py` follows these values.
"""

import ast
import dis
import enum
import functools
import gc
import itertools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from perdure.worker.carried import find_root, find_word
from perdure.worker.checkpoint.attributes import SPACES, is_own_class, is_own_file, read_vars

_REFUSED = ("IMPORT_NAME", "KeyboardInterrupt", "STORE_GLOBAL", "StopIteration", "SystemExit",
            "__class__", "_exit", "backward", "bernoulli", "choice", "dropout", "eval", "exec",
            "exit", "globals", "grad", "kill", "manual_seed", "modules", "multinomial", "normal",
            "permutation", "rand", "rand_like", "randint", "randn", "randn_like", "random",
            "randperm", "sample", "seed", "setattr", "shuffle", "type", "uniform",
            "vars")  # fmt: skip
"""Names and instructions by which a function may reach training, or end it."""
_MAKES = ("abs", "bool", "dim", "float", "format", "get_last_lr", "int", "item", "len", "mean",
          "monotonic", "norm", "numel", "perf_counter", "round", "size", "str", "sum", "time",
          "tolist")  # fmt: skip
"""Functions and methods that return a new value."""
_SCALARS = (int, float, complex, str, bytes, enum.Enum, type(None))
_BOXES, _BOUND = (list, tuple, dict, set, deque), (functools.partial, types.MethodType)
_TOOLS = ("_csv", "_io", "_thread", "datetime", "logging", "pathlib", "threading")
"""Packages whose objects have no part in training."""
_ITEMS, _DEPTH_MAX, _VISITS_MAX = 4096, 8, 20_000
_CALLS = ("CALL", "KW_NAMES", "LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "PRECALL",
          "PUSH_NULL")  # fmt: skip
"""Beginnings of instructions that follow a class that is called or handed to a function."""
_OPEN = set[int]()
"""Ids of the functions and classes that are just looked at: one may use itself."""


class Names:
    """What the names of a frame have, and whether others have it too."""

    def __init__(
        self,
        frame: types.FrameType,
        several: Iterable[str],
        kept: set[int],
        beside: Iterable[types.FrameType] = (),
        shows_result: Callable[[], bool] = lambda: False,
    ) -> None:
        """Find what others have of `several` names; `kept` are ids of all that a checkpoint has.

        Frames `beside` this one are looked at by themselves. Their names may have the same values.
        `shows_result` returns whether its caller only shows what the frame's function returns.
        """
        self._shows_result = shows_result
        self._code, self._space = frame.f_code, frame.f_globals
        self._values, self._kept, self._known = _read_locals(frame), kept, dict[int, bool]()
        others = Counter(
            id(one)
            for other in beside
            for name, one in _read_locals(other).items()
            if _is_local(name, other.f_code, other.f_globals)
        )
        self._alone = self._find_alone(several, others)

    def _find_alone(self, several: Iterable[str], others: Counter[int]) -> set[int]:
        """Return ids of values to which only names of the frame, and such values, refer."""
        probe: list[Any] = []  # It shows how many references of a value this function makes.
        left, found = [probe, *map(self.find, several)], dict[int, Any]()
        for value in left:
            new = id(value) not in self._kept and id(value) not in found
            if new and len(left) < _VISITS_MAX and _may_change(value):
                found[id(value)] = value
                left += [one for one in _list_parts(value) if type(one) not in _SCALARS]
        del left, value
        counts = {key: sys.getrefcount(found[key]) for key in found}
        parts = {key: list(map(id, _list_parts(one))) for key, one in found.items()}
        named = Counter(
            id(one)
            for name, one in self._values.items()
            if _is_local(name, self._code, self._space)
        )
        alone, lost = set(found), {id(probe)}
        while lost:
            alone -= lost
            known = Counter(part for key in alone for part in parts[key])
            lost = {
                key
                for key in alone
                if counts[key] >= counts[id(probe)] + 2 * named[key] + others[key] + known[key]
                or any(part in found and part not in alone for part in parts[key])
            }
        return alone

    def find(self, name: str) -> Any:
        """Return the value of a name; None if it has none yet."""
        return self._values.get(name, self._space.get(name))

    def is_private(self, name: str) -> bool:
        """Return whether no function but that of the frame has a name, or what it has."""
        return isinstance(value := self.find(name), types.FunctionType) or (
            _is_local(name, self._code, self._space)
            and (id(value) in self._alone or not _may_change(value))
        )

    def judge(self, node: ast.AST) -> bool | None:
        """Return whether what an expression calls, enters, or fills only counts.

        Return None for a call of a library.
        """
        if isinstance(node, ast.Return):
            return self._shows_result()
        value = self.find(find_root(node))
        if isinstance(node, ast.Call) and (
            _reads(node, value)
            or not _is_own(value)
            or isinstance(self._resolve(getattr(node.func, "value", node)), _SCALARS[:-1])
        ):
            return None
        alone = id(value) in self._alone or isinstance(value, (types.FunctionType, *_SCALARS))
        if value is None or not alone or self._trains(value):
            return False
        named = isinstance(getattr(getattr(node, "func", None), "value", None), ast.Name)
        given = [*getattr(node, "args", []), *getattr(node, "keywords", [])]
        return (named and isinstance(value, list)) or all(map(self._is_value, given))

    def _resolve(self, node: ast.AST) -> Any:
        """Return what names and attributes lead to; None if code of the script would run."""
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            return read_vars(owner).get(node.attr) if is_own_class(owner.__class__) else None
        return self.find(node.id) if isinstance(node, ast.Name) else None

    def _is_value(self, node: ast.AST) -> bool:
        """Return whether an argument is a number or a word, or is new."""
        if isinstance(node, ast.Name):
            return (value := self.find(node.id)) is not None and not self._trains(value)
        if isinstance(node, ast.Call):
            return find_word(node) in _MAKES
        return (
            isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp | ast.UnaryOp | ast.Compare)
            or getattr(node, "attr", "") == "shape"
            or getattr(getattr(node, "slice", None), "value", "") == "lr"
            or all(map(self._is_value, ast.iter_child_nodes(node)))
        )

    def _trains(self, value: Any) -> bool:
        if id(value) not in self._known:
            self._known[id(value)] = _may_train(value, self._kept)
        return self._known[id(value)]


def _read_locals(frame: types.FrameType) -> dict[str, Any]:
    place = frame.f_locals
    found = dict(place)
    if isinstance(place, dict) and frame.f_code.co_flags & 1:  # CO_OPTIMIZED: of a function.
        place.clear()  # Before Python 3.13 it is a copy that would keep tensors alive.
    return found


def _is_local(name: str, code: types.CodeType, space: dict[str, Any]) -> bool:
    """Return whether only the code of a frame has a name."""
    if (code.co_name, code.co_filename) == ("<module>", space.get("__file__")):
        inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
        return not any(name in list_globals(one) for one in inner)
    return name in code.co_varnames and name not in code.co_cellvars


def _reads(node: ast.Call, value: Any) -> bool:
    """Return whether a call is that of torch's `state_dict`, which changes no module."""
    library = getattr(type(value), "state_dict", None) is nn.Module.state_dict
    return library and find_word(node) == "state_dict"


def _list_parts(value: Any) -> list[Any]:
    """Return what a value refers to, as far as it is looked at."""
    if type(value) in (dict, defaultdict, OrderedDict):
        return list(itertools.chain.from_iterable(itertools.islice(value.items(), _ITEMS)))
    plain = type(value) in (list, tuple, set, deque)
    return list(itertools.islice(value, _ITEMS)) if plain else gc.get_referents(value)[:_ITEMS]


def _may_change(value: Any) -> bool:
    """Return whether a value may change in place."""
    if isinstance(value, tuple):
        return any(map(_may_change, value[:_ITEMS]))
    plain = isinstance(value, (Tensor, *_BOXES, *SPACES))
    return plain or (is_own_class(value.__class__) and not isinstance(value, _SCALARS))


def _is_own(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return is_own_file(getattr(value, "__file__", None) or "")
    kind: Any = value if isinstance(value, type | types.FunctionType) else type(value)
    return is_own_class(kind) or isinstance(value, (*_BOXES, *SPACES, *_BOUND))


def _may_train(value: Any, kept: set[int], depth: int = 0) -> bool:
    """Return whether a method that has this value may change training by it."""
    kind: Any = type(value)
    if isinstance(value, Tensor) or kind.__module__ == "numpy":
        several = getattr(value, "nbytes", 0) != getattr(value, "itemsize", 1)
        return several or id(value) in kept or getattr(value, "requires_grad", False)
    if kind.__module__ in ("builtins", "collections") and isinstance(value, _BOXES):
        parts = list(itertools.islice(value.values() if isinstance(value, dict) else value, _ITEMS))
    elif kind in SPACES or (is_own_class(kind) and _is_counter(kind)):
        parts = list(read_vars(value).values())
    else:
        return not _is_tool(value) and not (kind is types.FunctionType and _is_gentle(value))
    return depth == _DEPTH_MAX or any(_may_train(one, kept, depth + 1) for one in parts[:_ITEMS])


def _is_tool(value: Any) -> bool:
    """Return whether it is a number, a word, or a part of a library without a part in training."""
    return (
        isinstance(value, (enum.EnumType, *_SCALARS))
        or (
            isinstance(
                value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
            )
            and not _is_own(value)
        )
        or type(value).__module__.partition(".")[0] in _TOOLS
    )


@functools.cache
def _is_counter(kind: type) -> bool:
    """Return whether methods of a class reach only their object and what they get."""
    several = [one for each in kind.__mro__[:-1] for one in vars(each).items()]
    return all(map(is_own_class, kind.__mro__[:-1])) and all(
        isinstance(one, (types.MemberDescriptorType, *_SCALARS))
        or (type(one) in (types.FunctionType, property, staticmethod) and _is_gentle(one))
        for name, one in several
        if name[:2] != "__" or callable(one)
    )


def _is_gentle(value: Any) -> bool:
    """Return whether a function of the script reaches only what it gets."""
    function = getattr(value, "fget", getattr(value, "__func__", value))
    code = function.__code__
    return code.co_filename.endswith(("<string>", "/dataclasses.py")) or (
        not any(word in _REFUSED for pair in _list_used(code) for word in pair)
        and set(code.co_freevars) <= {"__class__"}
        and not getattr(value, "fset", None)
        and all(map(_is_tool, function.__defaults__ or ()))
        and all(map(_is_tool, (function.__kwdefaults__ or {}).values()))
        and all(_is_part(function, name) for name in list_globals(code))
    )


def _is_part(function: types.FunctionType, name: str) -> bool:
    """Return whether a global that a function uses has no part in training."""
    value = function.__globals__.get(name)
    if _is_tool(value):
        return True
    if id(value) in _OPEN or name in _list_opened(function.__code__):
        return False
    _OPEN.add(id(value))
    try:
        if isinstance(value, type):
            return _is_counter(value)
        return type(value) is types.FunctionType and _is_gentle(value)
    finally:
        _OPEN.discard(id(value))


@functools.cache
def _list_opened(code: types.CodeType) -> set[str]:
    """Return the names of globals that a function does more with than to call them."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    opened = {
        one.argval
        for one, after in pairs
        if one.opname == "LOAD_GLOBAL" and not after.opname.startswith(_CALLS)
    }
    return opened.union(*map(_list_opened, inner))


@functools.cache
def _list_used(code: types.CodeType) -> set[tuple[str, str]]:
    """Return the instructions of a function, and of functions in it, that have a name.

    A word such as `type(self).__name__` is left out.
    """
    several = [one for one in dis.get_instructions(code) if one.opcode in dis.hasname]
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return {
        (one.opname, one.argval)
        for one, after in itertools.pairwise([*several, None])
        if one and (one.argval != "type" or after is None or after.argval != "__name__")
    }.union(*map(_list_used, inner))


@functools.cache
def list_globals(code: types.CodeType) -> set[str]:
    """Return the names of globals that a function uses, and functions in it."""
    return {name for op, name in _list_used(code) if "GLOBAL" in op or op == "LOAD_NAME"}
