"""The modules of a warm image, which a rank does not see until it asks for them.

The image notes what each module imports, reads from the environment, and changes in the process
(`ModuleLog`). A rank hides all modules that a fresh Python does not have (`ModuleStore`). If the
script imports one of them, the rank asks what a fresh import would find. The rank hands out the
stored module only if that is the same. The module, and everything that it imports, then has the
same origin and an unchanged file, and has read the same variables. All that this import would have
imported becomes visible with it, in the same order.

A package with compiled modules cannot be imported twice in one process. If such a package is asked
for and would be another one, the rank has to start cold.

Imports nothing that a Python does not have at its start, so that the log misses no module.
"""

import _frozen_importlib
import _thread
import _warnings
import builtins
import os
import sys

from perdure.worker.start.loading import Loading, find_elsewhere

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OWN = "perdure"
"""The one package that a rank sees at its first line and a fresh Python does not have."""

_READ_LATER = frozenset({"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"})
"""Variables that are read again when a rank asks for torch (`bootstrap.set_threads`)."""
_READ_IN_C = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "TORCH_CPP_", "TORCH_SHOW_CPP_",
    "TORCH_ALLOW_TF32_", "TORCH_BLAS_PREFER_", "TORCH_LINALG_PREFER_", "TORCH_ROCM_FA_PREFER_",
    "DNNL_DEFAULT_", "ONEDNN_DEFAULT_", "KINETO_USE_",
)  # fmt: skip
"""Variables that compiled parts of torch and numpy read when they are loaded."""

_USUAL = ("numpy", "torch", "torch._dynamo", "torch.distributed")
"""Modules that most scripts import: the image works out what they need."""
_REGISTRIES = ("cython_runtime", "_cython_")
"""Modules that the first compiled module of Cython makes, and each later one shares."""


class Trace:
    """What one module did at its import."""

    __slots__ = ("environ", "filters", "finders", "looks", "needs", "reads")

    def __init__(self) -> None:
        """Note nothing yet."""
        self.needs: dict[str, None] = {}
        """Modules that it asked for, in order."""
        self.looks: set[str] = set()
        """Modules that it looked for, as by `importlib.util.find_spec`, and may not have loaded."""
        self.reads: dict[str, str | None] = {}
        """Variables that it read before it set them, and their values then."""
        self.environ: dict[str, str] = {}
        """Variables that it set."""
        self.filters: list[Any] = []
        """Warning filters that it added."""
        self.finders: list[Any] = []
        """Finders that it added to `sys.meta_path`."""


class AtExit:
    """A function that a module of the image runs at exit, if the rank has imported the module."""

    def __init__(self, log: "ModuleLog", name: str, function: "Callable[..., object]") -> None:
        """Run `function` unless the rank has hidden module `name` to its end."""
        self._log, self._name, self._function = log, name, function

    def __call__(self, *args: object, **named: object) -> None:
        """Run it, unless the module is hidden."""
        if self._name not in self._log.unseen:
            self._function(*args, **named)

    def __eq__(self, other: object) -> bool:
        """Let `atexit.unregister` find it by its function."""
        return self._function == other

    __hash__ = None  # type: ignore[assignment]


class ModuleLog:
    """An image's log of its imports: use as a context manager around them."""

    def __init__(self) -> None:
        """Begin. So far there is nothing but perdure's that a Python has not at its start."""
        self.fresh = frozenset(name for name in sys.modules if not is_own(name))
        self.filters = list(_warnings.filters)
        self.finders = list(sys.meta_path)
        self.path = list(sys.path)
        self.cpus = os.sched_getaffinity(0)
        """CPUs before an import of torch has bound this process to one, by OMP_PROC_BIND."""
        self.traces: dict[str, Trace] = {}
        self.first: frozenset[str] = frozenset()
        """Modules of every image; `note_first` sets it."""
        self.found: set[str] = set()
        """Modules that a finder has found, and that no other module has put there."""
        self.missing: set[str] = set()
        """Modules that no finder has found."""
        self.read: set[str] = set()
        """Variables that imports have read since `_preload` last cleared the set."""
        self.unseen: frozenset[str] = frozenset()
        """Modules that a rank had not imported when it ended."""
        self._stack: list[str] = []
        self._seen = self._look()

    def __enter__(self) -> "ModuleLog":
        """Log imports from now on."""
        self._import, self._gcd_import = builtins.__import__, _frozen_importlib._gcd_import  # type: ignore[attr-defined]
        self._environ = os.environ.__class__
        builtins.__import__ = self._note_import
        _frozen_importlib._gcd_import = self._note_gcd_import  # type: ignore[attr-defined]
        os.environ.__class__ = self._make_environ()
        sys.meta_path.insert(0, self)
        import atexit  # It is logged as well.

        self._register, atexit.register = atexit.register, self._note_exit  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        """Log no more."""
        import atexit

        atexit.register = self._register
        sys.meta_path.remove(self)
        os.environ.__class__ = self._environ
        _frozen_importlib._gcd_import = self._gcd_import  # type: ignore[attr-defined]
        builtins.__import__ = self._import

    def note_first(self) -> None:
        """Say that every image has the modules that are there now."""
        self.first = frozenset(sys.modules)

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a module as the others do, and log what its import does."""
        self.found.add(fullname)
        spec = find_elsewhere(self, fullname, path, target)
        if spec is None:
            self.missing.add(fullname)
        elif spec.loader is not None:
            spec.loader = Loading(spec.loader, self._run)  # type: ignore[assignment]
            if self._stack:
                self._top().looks.add(fullname)
            return spec
        self._need(fullname)
        return spec

    def _run(self, exec_module: "Callable[[ModuleType], None]", module: "ModuleType") -> None:
        self._settle()
        self._need(module.__name__)
        before = [*sys.modules]
        self._stack.append(module.__name__)
        try:
            exec_module(module)
        finally:
            self._settle()
            # Filters of `catch_warnings` are gone by now.
            self._top().filters = [one for one in self._top().filters if one in _warnings.filters]
            # New ones come last, unless some were removed.
            now, count = [*sys.modules], len(before)
            for name in now[count:] if now[:count] == before else sorted({*now} - {*before}):
                self._need(name)  # Also what it has put there by itself.
            self._stack.pop()

    def _note_exit(
        self, function: "Callable[..., object]", *args: object, **named: object
    ) -> "Callable[..., object]":
        if self._stack and self.first:  # perdure needs what torch does at exit.
            self._register(AtExit(self, self._stack[-1], function), *args, **named)
        else:
            self._register(function, *args, **named)
        return function

    def _top(self) -> Trace:
        name = self._stack[-1] if self._stack else ""
        return self.traces.get(name) or self.traces.setdefault(name, Trace())

    def _need(self, name: str) -> None:
        if self._stack and name != self._stack[-1]:
            self._top().needs.setdefault(name)

    def _note_import(
        self,
        name: str,
        globals: "Mapping[str, object] | None" = None,
        locals: "Mapping[str, object] | None" = None,
        fromlist: "Sequence[str] | None" = (),
        level: int = 0,
    ) -> "ModuleType":
        if self._stack:
            whole = name
            if level:
                package = _frozen_importlib._calc___package__(globals or {})  # type: ignore[attr-defined]
                whole = _frozen_importlib._resolve_name(name, package, level)  # type: ignore[attr-defined]
            for parent in _list_parents(whole):
                if parent in sys.modules:
                    self._need(parent)
        found = self._import(name, globals, locals, fromlist, level)
        if self._stack and fromlist:
            self._need_parts(sys.modules.get(whole), fromlist)
        return found

    def _need_parts(self, module: "ModuleType | None", names: "Sequence[str]") -> None:
        """Note the submodules among `names`, which an import has taken from `module`."""
        parts = getattr(module, "__dict__", {})
        if "*" in names:
            names = (*names, *parts.get("__all__", ()))
        for name in names:
            whole = f"{parts.get('__name__')}.{name}"
            if whole in sys.modules and parts.get(name) is sys.modules[whole]:
                self._need(whole)

    def _note_gcd_import(
        self, name: str, package: str | None = None, level: int = 0
    ) -> "ModuleType":
        module: ModuleType = self._gcd_import(name, package, level)
        for parent in _list_parents(module.__name__):
            self._need(parent)
        return module

    def _make_environ(self) -> type:
        log = self

        class Watched(os._Environ):  # type: ignore[type-arg]
            def __getitem__(self, key: "Any") -> "Any":
                value = self._data.get(self.encodekey(key))  # type: ignore[attr-defined]
                if key != self.__dict__.get("yielded"):
                    log.note_read(key, None if value is None else self.decodevalue(value))
                return super().__getitem__(key)

            def __iter__(self) -> "Iterator[str]":
                log.note_read("*", None)
                for key in super().__iter__():
                    self.__dict__["yielded"] = key
                    yield key
                self.__dict__.pop("yielded", None)

        return Watched

    def note_read(self, name: str, value: str | None) -> None:
        """Note that the module that is being imported has read a variable."""
        self.read.add(name)
        if self._stack:
            self._settle()
            if name not in self._top().environ:
                self._top().reads.setdefault(name, value)

    def _look(self) -> "tuple[list[Any], list[Any], dict[bytes, bytes]]":
        filters: list[Any] = _warnings.filters
        return list(filters), list(sys.meta_path), dict(os.environ._data)  # type: ignore[attr-defined]

    def _settle(self) -> None:
        """Lay what has changed in the process since the last time to the module of now."""
        before, self._seen = self._seen, self._look()
        if self._seen == before:
            return
        trace, (filters, finders, environ) = self._top(), self._seen
        trace.filters += _list_put_first(before[0], filters)
        trace.finders += [one for one in finders if one not in before[1] and one is not self]
        changed = (name for name in environ if environ[name] != before[2].get(name))
        trace.environ |= {os.fsdecode(name): os.fsdecode(environ[name]) for name in changed}


def _list_put_first(before: "list[Any]", filters: "list[Any]") -> "list[Any]":
    """Return the filters that were added or moved to the front, the last of them first.

    >>> _list_put_first(["a", "b", "c"], ["b", "new", "a", "c"])
    ['new', 'b']
    """
    left, put = list(before), []
    for one in reversed(filters):
        if one not in left:
            put.append(one)
        while one in left:
            left.pop()
    return put


def is_own(name: str) -> bool:
    """Return whether a module is perdure's, which every rank sees."""
    return name.partition(".")[0] == OWN


def _list_parents(name: str) -> "Iterator[str]":
    """Yield `a`, `a.b`, and `a.b.c` for the last one.

    >>> list(_list_parents("a.b.c"))
    ['a', 'a.b', 'a.b.c']
    """
    end = -1
    while (end := name.find(".", end + 1)) > 0:
        yield name[:end]
    yield name


class ModuleStore:
    """A rank's finder of the modules that it has hidden."""

    def __init__(self, log: ModuleLog) -> None:
        """Work out in the image, once, what is the same for all ranks; hide nothing yet."""
        self._log = log
        self.cpus, self.bound = log.cpus, os.sched_getaffinity(0)
        """CPUs of the image before its imports, and now."""
        self.counts = {name: os.environ.get(name, "") for name in _READ_LATER}
        """Variables of numbers of threads, and their values in the image."""
        self._ready = False
        """Whether a rank has hidden the modules."""
        self._checked = set[str]()
        self._showing = 0
        """How many modules are being shown, one for the other; what they need was checked."""
        self._on_visible: Callable[[str], None] = lambda name: None
        self._on_unequal: Callable[[str], None] = lambda reason: None
        self._logger: Any = None
        """A logger that the script does not know: disabled if it disables all that there are."""
        self._hidden: dict[str, ModuleType] = {}
        self._whole = dict(sys.modules)
        self._missing = log.missing - self._whole.keys()
        """Modules that a fresh import looks for, and that the image has not found."""
        self._stamps = {
            name: _stamp(module)
            for name, module in self._whole.items()
            if "." not in name or name not in log.first
        }
        """Files as they were; of what each image has, only those of the packages themselves."""
        self._paths = {name: list(getattr(self._whole[name], "__path__", ())) for name in log.found
                       if name in self._whole}  # fmt: skip
        """Where submodules lie: without an `__init__`, the visible parent says it."""
        self._asking = 0
        """The thread that asks a finder of the script, which may ask all others."""
        self._path_hooks, self._import = list(sys.path_hooks), builtins.__import__
        self._environ: dict[str, str] = {}
        self._listed: dict[str, tuple[int, frozenset[str]]] = {}
        self._compiled = {
            name.partition(".")[0]
            for name, module in self._whole.items()
            if str(getattr(spec := getattr(module, "__spec__", None), "origin", "")).endswith(".so")
            and getattr(spec, "name", "") == name  # Else it is another package's, by another name.
        } - set(sys.stdlib_module_names)
        looks = {name: trace.looks - trace.needs.keys() for name, trace in log.traces.items()}
        self._looks = {name: found for name, found in looks.items() if found}
        self._needed = self._list_tops(self._close(*self._compiled, visible=False))
        self._hideable = [name for name in self._whole if self._may_hide(name)]
        usual = {name: self._close(name, visible=False) for name in _USUAL if name in self._whole}
        self._usual = {name: (names, self._list_tops(names)) for name, names in usual.items()}
        self._reads = {name: trace for name, trace in log.traces.items() if trace.reads}
        self._added = {id(one) for trace in log.traces.values() for one in trace.finders}
        used = self._close(*(name for name in self._whole if is_own(name)), visible=False)
        self._parts = list(self._list_parts(used))
        """Attributes of packages that a rank does not see: what perdure uses, it may use at any
        time.
        """

    def find_unequal(self, first: str) -> str:
        """Return why no rank may be forked for a script in the folder `first`; empty: it may."""
        path, sys.path = sys.path, [*([] if sys.flags.safe_path else [first]), *sys.path]
        try:
            return self._find_other_origin(self._needed)
        finally:
            sys.path = path

    def stow(self, kept: "frozenset[str]") -> None:
        """Hide all modules but `kept` in the image: each rank would copy their pages of memory.

        Until a rank calls `hide`, whoever imports one of them gets it as it is.
        """
        for name in self._hideable:
            if name not in kept:
                self._hidden[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """Undo `stow`."""
        sys.modules.update(self._hidden)
        self._hidden.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def hide(
        self,
        *,
        on_visible: "Callable[[str], None]" = lambda name: None,
        on_unequal: "Callable[[str], None]" = lambda reason: None,
    ) -> None:
        """Make `sys.modules`, warning filters, and finders those of a fresh Python.

        The store calls `on_visible` with each module that the script gets. It calls `on_unequal`
        with the reason if a fresh Python would import another package with compiled modules. If
        `on_unequal` returns, the script gets the stored package.
        """
        import atexit

        self._environ = dict(os.environ)
        if "logging" in self._whole:
            self._logger = self._whole["logging"].getLogger(OWN)
        self._on_visible, self._on_unequal = on_visible, on_unequal
        for name in filter(self._may_hide, list(sys.modules)):
            self._hidden[name] = sys.modules.pop(name)
            self._whole.setdefault(name, self._hidden[name])
        for attributes, child in self._parts:
            del attributes[child]
        atexit.register(self._show_all)  # What torch does at the end needs all of torch.
        _warnings.filters[:] = self._log.filters
        _warnings._filters_mutated()  # type: ignore[attr-defined]
        kept = [one for one in sys.meta_path if one is not self and id(one) not in self._added]
        known = [index for index, one in enumerate(kept) if one in self._log.finders]
        kept.insert(min(known, default=0), self)
        sys.meta_path[:] = kept
        self._ready = True

    def _may_hide(self, name: str) -> bool:
        return not (name in self._log.fresh or is_own(name) or name == "__main__")

    def _list_parts(self, used: set[str]) -> "Iterator[tuple[dict[str, Any], str]]":
        for name in self._hideable:
            parent, _, child = name.rpartition(".")
            names = getattr(self._whole.get(parent), "__dict__", {})
            known = name in self._log.found and name not in used
            if known and names.get(child) is self._whole[name]:
                yield names, child

    def _show_all(self) -> None:
        self._log.unseen = frozenset(self._hidden)
        for name, module in self._hidden.items():
            sys.modules.setdefault(name, module)
            self._set_part(name, module)
        self._hidden.clear()

    def _set_part(self, name: str, module: "ModuleType") -> None:
        parent, _, child = name.rpartition(".")
        if parent and name in self._log.found:
            self._whole[parent].__dict__.setdefault(child, module)

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Find a hidden module if a fresh import would find the same."""
        module = self._hidden.get(fullname)
        spec = getattr(module, "__spec__", None)
        if module is None or spec is None or target is not None:
            return None
        if self._asking == _thread.get_ident():
            return None
        parent = fullname.rpartition(".")[0]
        if self._ready and parent and list(path or ()) != self._paths.get(parent):
            return None
        reason = self._find_difference(fullname) if self._ready else ""
        if reason:
            top = fullname.partition(".")[0]
            if top not in self._compiled or self._whole.get(top) is not sys.modules.get(
                top, self._whole.get(top)
            ):
                return None
            self._on_unequal(f"{fullname}: {reason}")
        copy = _frozen_importlib.ModuleSpec(
            fullname,
            Stored(spec.loader, self, module, spec),  # type: ignore[arg-type]
            origin=spec.origin,
        )
        copy.submodule_search_locations = spec.submodule_search_locations
        copy.has_location, copy.cached = spec.has_location, spec.cached
        return copy

    def show(self, name: str) -> None:
        """Do what the import of `name` would do, but for running it again."""
        place = sys.meta_path.index(self) if self in sys.meta_path else 0
        own: list[Any] = [one for one in sys.meta_path[:place] if hasattr(one, "concerns")]
        trace = self._log.traces.get(name, Trace())
        for need in trace.needs:
            if need in sys.modules or need not in self._hidden:
                continue
            if need in self._log.found and any(one.concerns(need) for one in own):
                __import__(need)
                continue
            module = self._hidden.pop(need)
            if need == "__mp_main__":  # What the name means is for `multiprocessing` to say.
                module = self._whole[need] = sys.modules["__main__"]
            sys.modules[need] = module
            self.show(need)
            sys.modules[need] = sys.modules.pop(need, module)  # It comes after what it needs.
            self._set_part(need, module)
        for one in trace.filters:
            if one in _warnings.filters:
                _warnings.filters.remove(one)
            _warnings.filters.insert(0, one)
        if trace.filters:
            _warnings._filters_mutated()  # type: ignore[attr-defined]
        sys.meta_path.extend(one for one in trace.finders if one not in sys.meta_path)
        for variable, value in trace.environ.items():
            now = os.environ.get(variable)
            if trace.reads.get(variable, now) == now:
                os.environ[variable] = value
        if self._logger is not None and self._logger.disabled:
            self._enable_loggers(name)
        self._on_visible(name)

    def _enable_loggers(self, name: str) -> None:
        """Enable the loggers of a module: by a fresh import they would be new."""
        known = self._logger.manager.loggerDict
        for one in (known.get(name), *getattr(self._whole[name], "__dict__", {}).values()):
            if issubclass(type(one), self._whole["logging"].Logger):  # A proxy may lie.
                one.disabled &= one.name != name and one.name in sys.modules

    def take(self, name: str) -> None:
        """Hand out `name`, once: a second import of it is the script's own."""
        self._hidden.pop(name, None)
        if self._ready:
            self._showing += 1
            try:
                self.show(name)
            finally:
                self._showing -= 1

    def _find_difference(self, name: str) -> str:
        """Return what a fresh import of `name` would do otherwise; an empty string if nothing."""
        if self._showing and name in self._checked:
            return ""
        names, tops = self._usual.get(name, (set[str](), set[str]()))
        if not names:
            names = self._close(name, visible=True)
            tops = self._list_tops(names)
        self._checked = names
        for each in sys.modules.keys() & names:
            if each.startswith(_REGISTRIES):
                continue
            if sys.modules[each] is not self._whole.get(each):
                return f"{each} is another module"
        for each in sorted(self._stamps.keys() & names & self._hidden.keys()):
            if _stamp(self._whole[each]) != self._stamps[each]:
                return f"the file of {each} has changed"
        return (
            self._find_other_variable(names)
            or self._find_hook(name)
            or self._find_other_origin(tops)
        )

    def _close(self, *names: str, visible: bool) -> set[str]:
        """Return `names` and what they need; if `visible`, nothing beyond what the script has."""
        found, left = set(names), list(names)
        while left:
            each = left.pop()
            trace = self._log.traces.get(each)
            for need in (*(trace.needs if trace else ()), each.rpartition(".")[0]):
                if not need or need in found or need not in self._whole:
                    found |= {need} & self._missing
                    continue
                found.add(need)
                if not visible or need in self._hidden:
                    left.append(need)
        return found

    def _find_other_variable(self, names: set[str]) -> str:
        changed = {
            key
            for key in self._environ.keys() | os.environ.keys()
            if self._environ.get(key) != os.environ.get(key)
        } - _READ_LATER
        hidden = names & self._hidden.keys()
        for name in self._reads.keys() & hidden:
            for variable, value in self._reads[name].reads.items():
                if variable == "*":  # It may look for variables that bear its name.
                    own = name.partition(".")[0].upper()
                    differs = any(key.startswith(own) for key in changed)
                else:
                    later = name in self._log.first or variable in _READ_LATER
                    differs = os.environ.get(variable) != value
                    differs &= variable in changed or not later
                if differs and not self._is_set(hidden, variable, value):
                    return f"{name} has read {variable}"
        if changed and any(name.partition(".")[0] in self._compiled for name in names):
            for key in sorted(changed):
                values = f"{self._environ.get(key)} {os.environ.get(key)}"
                allocator = key.endswith("_ALLOC_CONF") and "backend:" in values
                if allocator or key.startswith(_READ_IN_C):
                    return f"it reads {key}"
        return ""

    def _is_set(self, names: set[str], variable: str, value: str | None) -> bool:
        """Return whether the import of one of `names` gives `value` to a variable."""
        traces = self._log.traces
        setters = (traces[name].environ for name in names & traces.keys())
        return value is not None and any(each.get(variable) == value for each in setters)

    def _find_hook(self, name: str) -> str:
        """Return how the script changes the import of `name`; an empty string if it does not.

        Each finder of the script is asked once, in the order of a fresh import.
        """
        if sys.path_hooks != self._path_hooks:
            return "sys.path_hooks has changed"
        if builtins.__import__ is not self._import:
            return "builtins.__import__ has changed"
        if all(map(self._is_known, sys.meta_path)):
            return ""
        self._asking, asking = _thread.get_ident(), self._asking
        try:
            return self._ask_finders(name, {name})
        except Exception as error:  # As an import would raise it.
            return f"{type(error).__name__}: {error}"
        finally:
            self._asking = asking

    def _ask_finders(self, name: str, asked: set[str]) -> str:
        """Return which finder of the script finds what the import of `name` needs."""
        trace = self._log.traces.get(name, Trace())
        for need in (*trace.needs, *sorted(self._looks.get(name, ()))):
            missing, look = need in self._missing, need not in trace.needs
            if need in asked or need in sys.modules:
                continue
            if not (missing or look or need in self._hidden):
                continue
            asked.add(need)
            path = self._paths.get(need.rpartition(".")[0])
            for finder in sys.meta_path if need in self._log.found else ():
                if finder is self and not missing:
                    break
                if not self._is_known(finder) and finder.find_spec(need, path) is not None:
                    return f"{type(finder).__name__} finds {need}"
            if reason := "" if look else self._ask_finders(need, asked):
                return reason
        return ""

    def _is_known(self, finder: object) -> bool:
        """Return whether a fresh Python, an import of the image, or perdure has made `finder`."""
        return (
            finder is self
            or finder in self._log.finders
            or id(finder) in self._added
            or hasattr(finder, "concerns")
            or not hasattr(finder, "find_spec")
        )

    def _list_tops(self, names: set[str]) -> set[str]:
        """Return the packages of `names` that a path may find elsewhere.

        Modules that another one has made have no place on it.
        """
        looks = (self._looks[name] for name in self._looks.keys() & names)
        tops = {name.partition(".")[0] for name in names.union(*looks)} & self._log.found
        return tops - self._log.fresh - {OWN, *sys.builtin_module_names}

    def _find_other_origin(self, tops: set[str]) -> str:
        """Return the first package that the path of now finds elsewhere.

        Only names that lie in an added folder are looked up, unless the path has lost or moved
        another one. The script's own folder may be on it twice, as by PYTHONPATH=. is usual.
        """
        left, added = list(self._log.path), []
        for folder in sys.path:
            if folder in left[:1]:
                del left[0]
            else:
                added.append(folder)
        if not left:
            listed = [self._list(folder) for folder in added]
            if None not in listed:
                tops = tops & frozenset().union(*filter(None, listed))
        for top in sorted(tops):
            spec = getattr(self._whole.get(top), "__spec__", None)
            if spec is None and top not in self._missing:
                continue
            found = self._find(top)
            if spec is None and (found is None or _holds_data(found)):
                continue
            if found is None or spec is None or _describe(found) != _describe(spec):
                place = found and _describe(found)
                return f"{top} is {place or 'missing'}"
        return ""

    def _find(self, name: str) -> "ModuleSpec | None":
        """Return what the finders that know nothing of the store find."""
        for finder in sys.meta_path:
            if finder is self or hasattr(finder, "concerns") or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, None)
            if spec is not None:
                return spec
        return None

    def _list(self, folder: str) -> frozenset[str] | None:
        """Return the names that a folder may have modules of; None if it is no folder."""
        try:
            changed_ns = os.stat(folder or ".").st_mtime_ns
            known = self._listed.get(folder)
            if known is None or known[0] != changed_ns:
                names = frozenset(name.partition(".")[0] for name in os.listdir(folder or "."))
                known = self._listed[folder] = changed_ns, names
        except FileNotFoundError:
            return frozenset()
        except (OSError, TypeError, ValueError):
            return None
        return known[1]


def _stamp(module: "ModuleType") -> object:
    """Return what changes with a module's file; None if it has none."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    try:
        found = os.stat(origin)  # type: ignore[arg-type]
    except (OSError, TypeError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _describe(spec: "ModuleSpec") -> object:
    return spec.origin or list(spec.submodule_search_locations or ())


def _holds_data(spec: "ModuleSpec") -> bool:
    """Return whether a package is only a folder, and no module lies in it."""
    folders = list(spec.submodule_search_locations or ()) if spec.origin is None else []
    names = [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]
    return bool(folders) and not any(name.endswith((".py", ".pyc", ".so")) for name in names)


class Stored:
    """The loader of a module that was loaded in the image."""

    def __init__(
        self, loader: "Any", store: ModuleStore, module: "ModuleType", spec: "ModuleSpec"
    ) -> None:
        """Hand out `module`, which `loader` has loaded by `spec`."""
        self._loader, self._store, self._module, self._spec = loader, store, module, spec

    def __getattr__(self, name: str) -> "Any":
        """Look like the loader that has loaded it."""
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        """Return the module as it is."""
        del spec
        return self._module

    def exec_module(self, module: "ModuleType") -> None:
        """Show what else its import would have shown; until then, other threads wait for it."""
        try:
            self._store.take(module.__name__)
        finally:
            self._spec.loader = self._loader  # `Loading` may have put this one there.
            module.__dict__["__spec__"] = self._spec
            if isinstance(module.__dict__.get("__loader__"), Stored):
                module.__dict__["__loader__"] = self._loader
