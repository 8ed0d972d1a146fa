"""What the script has from step to step, and no checkpoint keeps.

A replay buffer, a generator, a mean in a closure, and an iterator over data are often registered
nowhere. A resumed script begins with fresh ones. So perdure looks at the values that the loop uses:
before the first step, after it, and before each checkpoint. It names the values that have changed.
It restores none of them, because perdure does not write into a script's variables.

The text says which names one turn of the loop hands to the next (`carried.py`).
What is only printed, logged, or saved is left out.
"""

import ast
import contextlib
import functools
import inspect
import io
import itertools
import linecache
import operator
import queue
import sys
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import queues
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from perdure.worker.carried import (
    SHOWS,
    Loop,
    find_word,
    is_only_shown,
    list_bound_in,
    list_carried,
    target_names,
    walk_body,
)
from perdure.worker.checkpoint.attributes import (
    CALLED,
    SPACES,
    NotPlainError,
    hash_plain,
    is_own_class,
    is_own_file,
    list_holders,
    read_generator,
    read_vars,
)
from perdure.worker.checkpoint.counters import Names, list_globals
from perdure.worker.checkpoint.loaders import list_open_loaders
from perdure.worker.checkpoint.modules import describe_build, list_hooks

_ITEMS = 4096
"""Entries of a container that are looked at."""
_VISITS_MAX = 20_000
_SHOWN = 5
"""Names that a reason has."""


class ScriptState:
    """Finds what changes beside the registered objects."""

    def __init__(self) -> None:
        """Have seen nothing yet."""
        self._before: dict[str, bytes] | None = None
        self._told: set[str] = set()
        self._roots: set[str] = set()
        self._place: list[int] = []

    def look(self, kept: dict[str, Any], ids: set[int], made: Iterable[str] = ()) -> str:
        """Return why what has changed since the first look is not exact; empty for nothing new.

        `kept` are objects whose plain attributes a checkpoint has, by their paths. `ids` are those
        of all that it has. `made` are paths of objects that a resumed script begins without.
        """
        found = dict.fromkeys(made, b"")
        walk = _Walk(found, ids)
        frames = list(_list_frames())
        for frame in frames:
            with contextlib.suppress(Exception):  # The script's own classes may do anything.
                walk.enter(frame, [one for one in frames if one is not frame])
        for path, owner in kept.items():
            with contextlib.suppress(Exception):
                walk.visit_rest(path, owner)
        roots, place = {path.partition(".")[0] for path in kept}, [one.f_lineno for one in frames]
        if self._before is None:
            self._roots, self._place = roots, place
            for frame in frames:  # A later look may not see that a name is only shown.
                with contextlib.suppress(Exception):
                    walk.enter(frame, [], every=True)
            self._before = found
            return ""
        fresh_roots, self._roots = roots - self._roots, roots
        moved, self._place = place != self._place, place
        for path, now in found.items():
            if path.partition(".")[0].strip() in fresh_roots or path in walk.foreign:
                self._before.setdefault(path, now)
            elif moved and path.endswith(" "):  # In another loop a name may mean something else.
                self._before[path] = now
        changed = {_shorten(path) for path in found if _differs(path, self._before, found)}
        changed |= {*list_open_loaders(ids), *_list_restarted(frames)}
        fresh = sorted(changed - self._told)
        self._told |= changed
        if not fresh:
            return ""
        more = f" and {len(fresh) - _SHOWN} more" if len(fresh) > _SHOWN else ""
        return f"the script changes what no checkpoint has: {', '.join(fresh[:_SHOWN])}{more}"


class Functions:
    """Finds what functions of the script keep from call to call."""

    def __init__(self, **values: Any) -> None:
        """Begin with what these functions and objects have now."""
        self._values = values
        self._before = self._read(set())
        self._told: set[str] = set()

    def look(self, ids: set[int]) -> list[str]:
        """Return the paths of new changes, without those of objects that have one of `ids`."""
        now = self._read(ids)
        changed = {_shorten(path) for path in now if _differs(path, self._before, now)}
        fresh = sorted(changed - self._told)
        self._told |= changed
        return fresh

    def _read(self, ids: set[int]) -> dict[str, bytes]:
        found = dict[str, bytes]()
        with contextlib.suppress(Exception):  # The script's own classes may do anything.
            walk = _Walk(found, ids)
            for name, value in self._values.items():
                walk.visit(name, value)
            for path in walk.foreign:  # A Trainer of a library counts much.
                del found[path]
        return found


def _differs(path: str, before: dict[str, bytes], now: dict[str, bytes]) -> bool:
    """Return whether the value at a path has changed. A function that is seen late has not."""
    late = path.endswith(" ") and path not in before and path[:-1] not in before
    return not late and before.get(path) != now[path]


def list_generators(name: str, value: Any) -> dict[str, Any]:
    """Return the generators that an object has, or its class or function uses, by their paths."""
    walk = _Walk({}, {id(torch.default_generator)})
    with contextlib.suppress(Exception):  # The script's own classes may do anything.
        if isinstance(value, CALLED):
            walk.visit(name, value)
        elif is_own_class(value.__class__):
            walk.visit_class(value.__class__)
    found = walk.generators
    for path, owner in list_holders({name: value}).items():
        for key, one in list(getattr(owner, "__dict__", {}).items()):
            with contextlib.suppress(NotPlainError):
                read_generator(one)
                found[f"{path}.{key}"] = one
    return found


def list_ids(model: nn.Module) -> set[int]:
    """Return the ids of a model's modules, parameters, and buffers."""
    parts = (model.modules(), model.parameters(), model.buffers())
    return {id(one) for several in parts for one in several}


def _shorten(path: str) -> str:
    return ".".join(path.split(".")[:2]).strip()


def _list_frames() -> Iterator[types.FrameType]:
    """Yield the frame of the script that asks for steps; if it is a generator, its caller's too."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_own_file(frame.f_code.co_filename):
            yield frame
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                return
        frame = frame.f_back


@functools.cache
def _find_loops(path: str, line: int) -> tuple[list[Loop], list[ast.FunctionDef]]:
    """Return the loops and the functions around a line of a file, the outermost first."""
    with contextlib.suppress(SyntaxError):
        around = [
            node
            for node in ast.walk(ast.parse("".join(linecache.getlines(path))))
            if isinstance(node, ast.For | ast.While | ast.FunctionDef)
            and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        functions = [node for node in around if isinstance(node, ast.FunctionDef)]
        return [node for node in around if not isinstance(node, ast.FunctionDef)], functions
    return [], []


@functools.cache
def _read_loop(loop: Loop) -> tuple[list[str], list[str]]:
    """Return names that turns of a loop hand on, or use and do not bind.

    Training depends on the first ones. The others may be only shown.
    """
    bound = list_bound_in(loop)
    own = set(target_names(loop.target)) if isinstance(loop, ast.For) else set()
    used = {
        node.id
        for node in walk_body(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    handed = [name for name in list_carried(loop) if name in bound - own]
    names = [*handed, *sorted(used - bound - own)]
    shown = [name for name in names if is_only_shown(loop, name, judge=_believe)]
    return [name for name in names if name not in shown], shown


def _believe(node: ast.AST) -> bool | None:
    """Return what `Names.judge` says at best; a function that only shows fills nothing."""
    return None if isinstance(node, ast.Call) and find_word(node) in SHOWS else True


class _Walk:
    """One look at what the loop can reach."""

    def __init__(self, found: dict[str, bytes], ids: set[int]) -> None:
        """Fill `found`: a hash of each value by its path; leave out what has one of `ids`."""
        self._found, self._kept = found, ids
        self._seen: dict[int, Any] = {}
        """What was visited; kept alive, so that no other object gets its id."""
        self.generators: dict[str, Any] = {}
        """Generators of random numbers that were visited, by their paths."""
        self.foreign: set[str] = set()
        """Paths of numbers and arrays that objects of other libraries have."""

    def enter(
        self, frame: types.FrameType, beside: list[types.FrameType], *, every: bool = False
    ) -> None:
        """Visit what loops of a frame use, and what their turns hand on by names.

        What is only shown is left out, unless `every` name is visited.
        """
        loops, names, is_shown = self._read(frame, beside)
        for loop in loops:
            trains, perhaps = _read_loop(loop)
            for name in (*trains, *perhaps):
                shown = False
                with contextlib.suppress(Exception):  # The script's own classes may do anything.
                    shown = not every and name in perhaps and is_shown(loop, name)
                with contextlib.suppress(Exception):
                    if not shown:
                        self.visit(name, names.find(name))

    def _read(
        self, frame: types.FrameType, beside: Iterable[types.FrameType] = ()
    ) -> tuple[list[Loop], Names, Callable[[Loop, str], bool]]:
        """Return the loops around a frame's line, its names, and whether a loop only shows one."""
        loops, functions = _find_loops(frame.f_code.co_filename, frame.f_lineno)
        several = (n for loop in loops for n in (*_read_loop(loop)[1], *list_bound_in(loop)))
        shows_result = functools.cache(functools.partial(self._shows_result, frame))
        names = Names(frame, several, self._kept, beside, shows_result)
        again = any(
            is_own_file(caller.f_code.co_filename)
            and _find_loops(caller.f_code.co_filename, line)[0]
            for caller, line in traceback.walk_stack(frame.f_back)
        )
        outer = ((again and functions) or loops[:1])[-1:]
        after = [n for one in outer for n in ast.walk(one) if isinstance(n, ast.stmt)]

        def is_shown(loop: Loop, name: str) -> bool:
            left = [one for one in after if one.lineno > (loop.end_lineno or 0)]
            judge, is_private = names.judge, names.is_private
            return is_only_shown(loop, name, judge=judge, is_private=is_private, after=left)

        return loops, names, is_shown

    def _shows_result(self, frame: types.FrameType) -> bool:
        """Return whether the loop that calls a frame's function only shows what that returns."""
        caller = frame.f_back
        while caller is not None and not is_own_file(caller.f_code.co_filename):
            caller = caller.f_back
        if caller is None:
            return False
        loops, _, is_shown = self._read(caller)
        results = [
            [one.id for one in _list_targets(node) if isinstance(one, ast.Name)]
            for node in (walk_body(loops[-1]) if loops else ())
            if isinstance(node, ast.Assign | ast.Expr)
            and node.lineno <= caller.f_lineno <= (node.end_lineno or 0)
            and _is_call(node, frame.f_code.co_name)
        ]
        return bool(results) and all(is_shown(one, n) for one in loops for n in results[0])

    def visit_rest(self, path: str, owner: Any) -> None:
        """Visit how a kept object is built, and those of its attributes that are no plain data."""
        if isinstance(owner, nn.Module):
            build = describe_build(owner, whole="." not in path)
            self._found[path] = repr(build).encode()
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    self._visit_plain(f"{path}.{name}", parameter)
        elif isinstance(owner, Optimizer):
            self._note(path, list_hooks(owner))
        self.visit_class(type(owner))
        for name, value in read_vars(owner).items():
            if name in _TORCHS or isinstance(value, _SCALARS):
                continue
            if isinstance(value, _BOXES) and not value:
                continue
            self._note_kind(f"{path}.{name}", value)
            if isinstance(value, _BOXES) and not self._note("", value):
                self._visit_all(f"{path}.{name}", value)
            elif isinstance(value, CALLED) and not self._note("", value):
                self.visit(f"{path}.{name}", value)

    def _note(self, path: str, value: Any) -> bool:
        """Note a hash of plain data; return whether it is plain."""
        try:
            now = hash_plain(value, _ITEMS)
        except NotPlainError:
            return False
        if path:
            self._found[path] = now
        return True

    def _note_kind(self, path: str, value: Any) -> None:
        """Note which function, class, or registered object a name has."""
        if isinstance(value, _NAMED):
            kind = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        elif not isinstance(value, nn.Module | Optimizer):
            return
        else:
            kind = str(id(value)) if id(value) in self._kept else type(value).__qualname__
        self._found[f"{path} "] = kind.encode()

    def visit(self, path: str, value: Any) -> None:
        """Note the hash of a value, or the hashes of its parts."""
        if isinstance(value, int | float | str | None):
            self._note(path, value)
            return
        self._note_kind(path, value)
        if id(value) in self._kept or id(value) in self._seen or len(self._seen) > _VISITS_MAX:
            return
        self._seen[id(value)] = value
        kind: Any = type(value)
        if kind.__module__.partition(".")[0] == "perdure":
            return
        box = isinstance(value, list | tuple | dict | deque)
        if box and (is_own_class(kind) or not _is_flat(value)):
            self._visit_all(path, value)
        elif self._note(path, value):
            if kind.__name__ in _GENERATORS:
                self.generators[path] = value
            return
        if isinstance(value, nn.Module):
            self._visit_tensors(path, value.parameters(), value.buffers())
            for place, module in value.named_modules():
                if id(module) not in self._kept and is_own_class(module.__class__):
                    self._visit_plain(f"{path}.{place}".rstrip("."), module)
        elif isinstance(value, Tensor):
            self._visit_tensors(path, [value])
        elif isinstance(value, Optimizer):
            self._visit_optimizer(path, value)
        elif isinstance(value, types.FunctionType) or "__wrapped__" in read_vars(value):
            self._visit_function(path, value)
        elif isinstance(value, types.MethodType):
            self.visit(path.rpartition(".")[0] or path, value.__self__)
        elif isinstance(value, functools.partial):
            self._visit_all(path, (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.ModuleType):
            if is_own_file(getattr(value, "__file__", None) or ""):
                self._visit_all(path, {k: v for k, v in vars(value).items() if k[:2] != "__"})
        elif isinstance(value, DataLoader):
            self._visit_all(path, {n: getattr(value, n) for n in _DRAWN})
            self._visit_dataset(f"{path}.dataset", value.dataset)
        elif isinstance(value, Sampler) and not is_own_class(kind):
            rest = read_vars(value)  # Most scripts set the epoch from the step.
            rest = {k: v for k, v in rest.items() if k not in ("epoch", "data_source", "dataset")}
            self._visit_all(path, rest)
        elif isinstance(value, Dataset) and not is_own_class(kind):
            self._visit_all(path, read_vars(value))
        elif isinstance(value, _READ_ON):
            self._found[path] = str(id(self._found)).encode()
        elif isinstance(value, io.IOBase):
            self._visit_file(path, value)
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            own = is_own_file(value.gi_code.co_filename)
            if not own or frame is None or not self._kept & set(map(id, frame.f_locals.values())):
                now = inspect.getgeneratorstate(value)
                again = id(self._found) if now == inspect.GEN_SUSPENDED else 0
                self._found[path] = f"{now} {again}".encode()
        elif isinstance(value, type):
            self.visit_class(value)
        elif is_own_class(kind) or isinstance(value, SPACES):
            self.visit_class(kind)
            self._visit_all(path, read_vars(value))
        elif hasattr(value, "load_state_dict"):
            self._visit_plain(path, value)
        elif hasattr(value, "__next__") and not hasattr(value, "write"):
            left = operator.length_hint(value, -1)  # Unknown: it counts as read.
            self._found[path] = str(id(self._found) if left < 0 else left).encode()
        elif not kind.__module__.startswith(_MEASURES):
            self._visit_foreign(path, value)

    def _visit_file(self, path: str, value: io.IOBase) -> None:
        """Note the place in a file that is read."""
        with contextlib.suppress(ValueError):  # It is closed.
            if value.readable():
                try:
                    place = value.tell()
                except OSError:  # A pipe, or the lines of a text.
                    place = id(self._found)
                self._found[path] = str(place).encode()

    def _visit_dataset(self, path: str, dataset: Any) -> None:
        """Visit what a dataset draws from, and the numbers that it changes; a cache is none."""
        if not is_own_class(dataset.__class__):
            if isinstance(dataset, Dataset):
                self.visit(path, dataset)
            return
        self.visit_class(dataset.__class__)
        self._visit_all(path, list_generators("", dataset))
        for name, value in read_vars(dataset).items():
            if isinstance(value, int | float | Tensor) or hasattr(value, "nbytes"):
                self._note(f"{path}.{name}", value)

    def _visit_foreign(self, path: str, value: Any) -> None:
        """Note the numbers and arrays that an object of another library has."""
        for name, one in list(getattr(value, "__dict__", {}).items()):
            numbers = isinstance(one, int | float | Tensor) or hasattr(one, "nbytes")
            if numbers and self._note(f"{path}.{name}", one):
                self.foreign.add(f"{path}.{name}")

    def _visit_all(self, path: str, values: Any) -> None:
        several = values.items() if isinstance(values, dict) else enumerate(values)
        for key, one in list(itertools.islice(several, _ITEMS)):
            self.visit(f"{path}.{key}", one)

    def _visit_plain(self, path: str, owner: Any) -> None:
        """Note the plain attributes of an object of another library, or of a module."""
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if id(value) not in self._kept:
                self._note(f"{path}.{name}", value)

    def _visit_tensors(self, path: str, *several: Iterable[Tensor]) -> None:
        state = xxhash.xxh3_128()
        for one in (tensor for tensors in several for tensor in tensors):
            if id(one) not in self._kept:
                state.update(repr((id(one), one._version)).encode())
                if one.device.type == "cpu" and one.layout == torch.strided and one.numel():
                    few = one.detach().reshape(-1)[:: max(1, one.numel() // _ITEMS)]
                    state.update(few.contiguous().view(torch.uint8).numpy().tobytes())
        self._found[path] = state.digest()

    def _visit_optimizer(self, path: str, value: Optimizer) -> None:
        for group in value.param_groups:
            self._visit_tensors(f"{path}.parameters", group["params"])
        for number, entries in enumerate(list(value.state.values())):
            if id(entries) not in self._kept and isinstance(entries, dict):
                self._note(f"{path}.state.{number}", entries)

    def _visit_function(self, path: str, value: types.FunctionType) -> None:
        """Visit what a function of the script keeps, and the globals that it uses."""
        value = inspect.unwrap(value)  # A library may decorate it.
        if not (isinstance(value, types.FunctionType) and is_own_file(value.__code__.co_filename)):
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # It is empty.
                self.visit(f"{path}.{name}", cell.cell_contents)
        self._visit_all(path, [one for one in value.__defaults__ or () if not _is_scalar(one)])
        self._visit_all(path, vars(value))
        for name in sorted(list_globals(value.__code__)):
            if name in value.__globals__:
                self.visit(name, value.__globals__[name])

    def visit_class(self, kind: Any) -> None:
        for one in kind.__mro__:
            if is_own_class(one) and id(one) not in self._seen:
                self._seen[id(one)] = one
                own = {n: v for n, v in vars(one).items() if n[:2] != "__" or callable(v)}
                self._visit_all(one.__name__, own)


def _list_targets(node: ast.Assign | ast.Expr) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else []


def _is_call(node: ast.Assign | ast.Expr, name: str) -> bool:
    """Return whether a statement calls a function, and at most binds what that returns."""
    call = node.value.value if isinstance(node.value, ast.YieldFrom) else node.value
    calls = [find_word(one) for one in ast.walk(node) if isinstance(one, ast.Call)]
    plain = all(isinstance(one, ast.Name) for one in _list_targets(node))
    direct = isinstance(call, ast.Call) and find_word(call) == name
    return plain and direct and calls.count(name) == 1


def _is_flat(value: Any) -> bool:
    """Return whether a container has scalars only, as far as it is looked at."""
    items = value.values() if isinstance(value, dict) else value
    return all(map(_is_scalar, list(itertools.islice(items, _ITEMS))))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | str | bytes | None)


def _list_restarted(frames: Iterable[types.FrameType]) -> list[str]:
    """Return what a loop counts or reads beside its steps, and a resumed one from the front."""
    found = []
    for frame in frames:
        for loop in _find_loops(frame.f_code.co_filename, frame.f_lineno)[0]:
            head = getattr(loop, "iter", None)
            asks = head is not None and head.lineno <= frame.f_lineno <= (head.end_lineno or 0)
            word = find_word(head) if asks and isinstance(head, ast.Call) else ""
            if word == "zip" or (word == "enumerate" and _uses_number(loop)):
                found.append(f"{word}() of the steps")
    return found


def _uses_number(loop: Loop) -> bool:
    """Return whether training uses the number that `enumerate` gives."""
    names = target_names(loop.target) if isinstance(loop, ast.For) else []
    return not (names and is_only_shown(loop, names[0]))


_DRAWN = ("generator", "sampler", "batch_sampler", "collate_fn")
"""Attributes of a DataLoader that may draw."""
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)
_READ_ON = (queue.Queue, queue.SimpleQueue, queues.Queue, queues.SimpleQueue, _BaseDataLoaderIter)
"""What gives another value each time."""
_GENERATORS = ("Random", "Generator", "RandomState")
_BOXES = (list, tuple, dict, deque)
_SCALARS = (int, float, str, type(None))
_TORCHS = ("_modules", "_parameters", "_buffers", "state", "param_groups")
_MEASURES = ("tqdm", "rich", "wandb", "tensorboard", "tensorboardX", "torch.utils.tensorboard",
             "torch.profiler", "torch.autograd.profiler", "logging", "threading", "time",
             "mlflow", "neptune", "comet_ml", "aim", "clearml", "swanlab", "matplotlib",
             "subprocess", "concurrent", "asyncio", "socket")  # fmt: skip
"""Packages whose objects only show or measure something."""
