"""What a training script is, by its text alone: nothing of it is imported or executed.

A name is followed through imports and assignments of one file. What a file takes from another, or
keeps in attributes, is not looked for: whoever proposes something has to be content with less.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from perdure.model.errors import ConfigError

BYTES_MAX = 1 << 20
"""No training script that a person has written is larger, and a parser takes 100 times as much."""
Kind = Literal[
    "perdure", "torchft", "huggingface", "lightning", "accelerate", "deepspeed", "torch", "other"
]
Role = Literal["model", "optimizer", "scheduler", "scaler", "trainer", "generator"]
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LIBRARIES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("perdure", ("perdure",)),
    ("torchft", ("torchft",)),
    ("deepspeed", ("deepspeed",)),
    ("accelerate", ("accelerate",)),
)
"""What a script that imports one of them is, the first that fits."""
_PARALLEL = {
    "torch.nn.parallel.DistributedDataParallel": "ddp",
    "torch.nn.parallel.distributed.DistributedDataParallel": "ddp",
    "torch.distributed.fsdp.FullyShardedDataParallel": "fsdp",
    "torch.distributed.fsdp.fully_shard": "fsdp2",
    "torch.distributed._composable.fsdp.fully_shard": "fsdp2",
}
_SPAWNS = ("mp.spawn", "multiprocessing.spawn", "notebook_launcher", "debug_launcher")
_GENERATORS = ("torch.Generator", "numpy.random.default_rng", "numpy.random.Generator",
               "numpy.random.RandomState", "random.Random")  # fmt: skip


class Loop(msgspec.Struct, frozen=True):
    """One loop of the script in which it trains, or around it."""

    line: int
    over: Literal["range", "data", "while"]
    text: str
    """Its first line, such as `for epoch in range(args.epochs):`."""


class Script(msgspec.Struct, frozen=True):
    """What is known of a script. Lines count from 1; names are as the script has them."""

    kind: Kind
    parallel: tuple[str, ...] = ()
    """Of `ddp`, `fsdp` and `fsdp2`, what it wraps its models in; and `process group`."""
    models: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    scalers: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    """Of Hugging Face's or Lightning's."""
    loops: tuple[Loop, ...] = ()
    """Those that train, the outermost first."""
    saves: tuple[int, ...] = ()
    """Lines at which it saves by itself."""
    loads: tuple[int, ...] = ()
    spawns: tuple[int, ...] = ()
    """Lines at which it makes processes that would train."""
    own: tuple[str, ...] = ()
    """Patterns of the checkpoints that it saves, as far as its text says where."""


class Reading:
    """A script's tree, and what its names are."""

    def __init__(self, text: str, name: str = "script") -> None:
        """Read `text`, called `name` in errors.

        Raises:
            ConfigError: it is no Python that this one can compile, or too large.
        """
        if len(text) > BYTES_MAX:
            raise ConfigError(
                f"{name}: {len(text):,} characters are no training script",
                hint=f"at most {BYTES_MAX:,}; write job.toml by hand, with `script` in it",
            )
        if not text.strip():
            raise ConfigError(f"{name} is empty", hint="name the script that trains")
        self.text, self.tree = text, parse(text, name)
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self.imports = dict(_list_imports(self.tree))
        """Local name -> what it stands for, in full."""
        self.roles: dict[str, set[Role]] = {}
        self.calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self._trainer_classes = self._find_trainer_classes()
        self._find_roles()

    def name_of(self, node: ast.AST) -> str:
        """Return the full dotted name of what an expression names; empty where it is none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, the innermost first."""
        while (above := self.parents.get(node)) is not None:
            yield above
            node = above

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, class or module that a node is directly in."""
        return next(above for above in self.ancestors(node) if isinstance(above, _SCOPES))

    def names(self, role: Role) -> tuple[str, ...]:
        """Return the names of a role, in the order in which they appear."""
        return tuple(name for name, roles in self.roles.items() if role in roles)

    def methods(self, method: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Return the calls `something.method(...)`, in the order of the text."""
        calls = self.calls if within is None else [
            node for node in ast.walk(within) if isinstance(node, ast.Call)
        ]  # fmt: skip
        found = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == method]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return ast.get_source_segment(self.text, node) or ""

    def find_training_loops(self) -> list[list[ast.For | ast.While]]:
        """Return the loops that make optimizer steps, each as all that it is in, outermost first.

        What makes a step has a backward pass beside the optimizer's step, or within a function of
        its own.
        """
        found: dict[int, list[ast.For | ast.While]] = {}
        for call in self.methods("step"):
            if not self.is_optimizer_step(call):
                continue
            loops: list[ast.For | ast.While] = []
            for above in self.ancestors(call):
                if isinstance(above, _SCOPES):
                    break
                if isinstance(above, ast.For | ast.While):
                    loops.insert(0, above)
            while loops and not self.methods("backward", loops[-1]):
                loops.pop()  # One over several optimizers.
            if loops:
                found[id(loops[-1])] = loops
        return list(found.values())

    def find_object_loops(self) -> list[ast.For | ast.While]:
        """Return the innermost loops with a backward pass and a step of an object's own optimizer.

        That is `self.optimizer.step()`: such a loop is not changed, but it is one that trains.
        """
        found = {}
        for call in self.methods("step"):
            assert isinstance(call.func, ast.Attribute)
            loop = next(
                (n for n in self.ancestors(call) if isinstance(n, ast.For | ast.While)), None
            )
            owned = isinstance(call.func.value, ast.Attribute)
            if owned and loop is not None and self.methods("backward", loop):
                found[id(loop)] = loop
        return list(found.values())

    def list_imported_files(self, folders: Iterable[Path]) -> Iterator[Path]:
        """Yield where modules that are imported may lie below `folders`, also by no whole name."""
        for folder in folders:
            for full in dict.fromkeys(self.imports.values()):
                parts = full.split(".")
                for upto in range(len(parts), 0, -1):
                    yield folder.joinpath(*parts[:upto]).with_suffix(".py")
            for node in ast.walk(self.tree):
                if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                    yield folder.joinpath(*node.module.split(".")).with_suffix(".py")

    def is_module_of(self, package: str) -> bool:
        """Return whether it takes something from its own package, by that's name or by a dot."""
        relative = any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(self.tree))
        return relative or any(full.split(".")[0] == package for full in self.imports.values())

    def is_optimizer_step(self, call: ast.Call) -> bool:
        """Return whether a call of `step` is an optimizer's, also by way of a scaler."""
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        first = call.args[0] if call.args else None
        name = owner.id if isinstance(owner, ast.Name) else ""
        if "scaler" in self.roles.get(name, ()):
            return isinstance(first, ast.Name)
        return "optimizer" in self.roles.get(name, ())

    def _find_trainer_classes(self) -> dict[str, str]:
        """Return the classes that are Trainers -> the library: imported ones, and heirs of them."""
        known = {
            "transformers.Trainer": "huggingface",
            "transformers.Seq2SeqTrainer": "huggingface",
            "lightning.Trainer": "lightning",
            "lightning.pytorch.Trainer": "lightning",
            "pytorch_lightning.Trainer": "pytorch_lightning",
        }
        trl = [full for full in self.imports.values() if re.fullmatch(r"trl\.\w+Trainer", full)]
        known |= dict.fromkeys(trl, "trl")
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if library := known.get(self.name_of(base)):
                        known[node.name] = library
        return known

    def library_of(self, call: ast.AST) -> str:
        """Return whose Trainer a call makes; empty where it makes none."""
        if not isinstance(call, ast.Call):
            return ""
        return self._trainer_classes.get(self.name_of(call.func), "")

    def _find_roles(self) -> None:
        for target, value in self.list_assignments():
            for role in self._judge_value(value):
                self.roles.setdefault(target, set()).add(role)
        for call in self.methods("zero_grad"):  # Of a function's parameter, by what it does.
            if (name := _owner(call)) and not self.roles.get(name, set()) & {"model"}:
                steps = [c for c in self.methods("step") if _owner(c) == name]
                handed = [c for c in self.methods("step") if any(_names(a, name) for a in c.args)]
                if steps or handed:
                    self.roles.setdefault(name, set()).add("optimizer")
        for method in ("parameters", "named_parameters"):
            for call in self.methods(method):
                if name := _owner(call):
                    self.roles.setdefault(name, set()).add("model")
        for call in self.methods("step"):
            if (name := _owner(call)) and "sched" in name.lower() and name not in self.roles:
                self.roles.setdefault(name, set()).add("scheduler")
        for target, value in self.list_assignments():
            wraps = self.wraps(value)
            if wraps and "model" in self.roles.get(wraps, ()):
                self.roles.setdefault(target, set()).add("model")

    def list_assignments(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield each name that is assigned to, and what it becomes."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        yield target.id, node.value
            elif (
                isinstance(node, ast.AnnAssign | ast.NamedExpr)
                and isinstance(node.target, ast.Name)
                and node.value is not None
            ):
                yield node.target.id, node.value

    def _judge_value(self, value: ast.expr) -> set[Role]:
        if isinstance(value, ast.IfExp):
            return self._judge_value(value.body) | self._judge_value(value.orelse)
        inner = value
        while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            if self.name_of(inner.func) in _GENERATORS:
                break
            if not isinstance(inner.func.value, ast.Call):
                break
            inner = inner.func.value  # torch.Generator().manual_seed(1)
        if not isinstance(inner, ast.Call):
            return set()
        name, last = self.name_of(inner.func), self.name_of(inner.func).rpartition(".")[2]
        if self.library_of(inner):
            return {"trainer"}
        if name in _GENERATORS:
            return {"generator"}
        if last == "GradScaler":
            return {"scaler"}
        if ".lr_scheduler." in name or (last.startswith("get_") and "schedule" in last):
            return {"scheduler"}
        if name.startswith("torch.optim.") and last[:1].isupper():
            return {"model"} if "swa_utils" in name and last != "SWALR" else {"optimizer"}
        return set()

    def wraps(self, value: ast.expr) -> str:
        """Return the name of the model that a value wraps (DDP, compile); empty for none."""
        if isinstance(value, ast.IfExp):
            return self.wraps(value.body) or self.wraps(value.orelse)
        if not isinstance(value, ast.Call):
            return ""
        if self.name_of(value.func) not in (*_PARALLEL, "torch.compile"):
            return ""
        handed = [*value.args, *(word.value for word in value.keywords if word.arg == "module")]
        return handed[0].id if handed and isinstance(handed[0], ast.Name) else ""

    def describe(self) -> Script:
        """Return what is known of the script."""
        named = [(self.name_of(call.func), call) for call in self.calls]
        parallel = {_PARALLEL[name] for name, _ in named if name in _PARALLEL}
        if any(name.endswith("init_process_group") for name, _ in named):
            parallel.add("process group")
        loops = {id(loop): loop for chain in self.find_training_loops() for loop in chain}
        return Script(
            kind=self._judge_kind(),
            parallel=tuple(sorted(parallel)),
            models=self.names("model"),
            optimizers=self.names("optimizer"),
            schedulers=self.names("scheduler"),
            scalers=self.names("scaler"),
            trainers=self.names("trainer"),
            loops=tuple(self._describe_loop(loop) for loop in loops.values()),
            saves=_lines(named, ("torch.save", "torch.distributed.checkpoint.save")),
            loads=_lines(named, ("torch.load", "torch.distributed.checkpoint.load")),
            spawns=tuple(sorted(c.lineno for n, c in named if n.endswith(_SPAWNS))),
        )

    def _judge_kind(self) -> Kind:
        roots = {full.split(".")[0] for full in self.imports.values()}
        made = {self.library_of(call) for call in self.calls} - {""}
        for kind, libraries in _LIBRARIES[:2]:
            if roots & set(libraries):
                return kind
        if made & {"huggingface", "trl"}:
            return "huggingface"
        if made:
            return "lightning"
        for kind, libraries in _LIBRARIES[2:]:
            if roots & set(libraries):
                return kind
        return "torch" if "torch" in roots else "other"

    def _describe_loop(self, loop: ast.For | ast.While) -> Loop:
        first = re.split(r"\r\n|\r|\n", self.text)[loop.lineno - 1].strip()
        if isinstance(loop, ast.While):
            return Loop(loop.lineno, "while", first)
        return Loop(loop.lineno, "range" if find_range(loop) else "data", first)


def parse(text: str, name: str) -> ast.Module:
    """Return the tree of a script called `name`.

    Raises:
        ConfigError: this Python cannot compile it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text, name)
    except SyntaxError as error:
        words = (error.text or "").strip()
        raise ConfigError(
            f"{name}, line {error.lineno}: {error.msg}" + (f": {words}" if words else ""),
            hint="a Python file that this Python can compile",
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{name}: not Python source: {error}", hint="name the script that trains"
        ) from None


def find_range(loop: ast.For | ast.While) -> ast.Call | None:
    """Return the `range(...)` that a loop goes over, also one within tqdm; None for none."""
    if not isinstance(loop, ast.For):
        return None
    over = loop.iter
    if isinstance(over, ast.Call) and over.args and _last(over.func) in ("tqdm", "track"):
        over = over.args[0]
    is_range = isinstance(over, ast.Call) and _names(over.func, "range")
    return over if is_range and isinstance(over, ast.Call) else None


def _list_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    (alias.asname or alias.name.split(".")[0]),
                    (alias.name if alias.asname else alias.name.split(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _lines(named: list[tuple[str, ast.Call]], names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(call.lineno for name, call in named if name in names))


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _owner(call: ast.Call) -> str:
    """Return the name whose method a call is; empty where that is no name."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    return value.id if isinstance(value, ast.Name) else ""
