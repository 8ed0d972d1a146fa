"""What one turn of a loop hands to the next by a name: no checkpoint has it.

What is only shown, such as a running mean of the loss, does not count.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence

SHOWS = ("print", "log", "info", "debug", "warning", "add_scalar", "add_scalars", "add_histogram",
         "set_postfix", "set_postfix_str", "set_description", "write", "write_scalar", "save",
         "dump", "writerow", "flush", "note", "report", "plot", "makedirs", "mkdir", "savefig",
         "save_pretrained", "log_metric", "log_metrics", "track", "warn", "error",
         "to_csv")  # fmt: skip
"""Functions and methods of which nothing comes back into training."""
_GROWS = ("append", "extend", "insert", "add", "push", "put", "update", "pop", "appendleft")
_PURE = ("min", "max", "sum", "len", "float", "int", "round", "abs", "sorted", "str", "format",
         "mean", "item", "detach", "cpu", "numpy", "tolist", "clone", "sqrt", "exp", "time", "avg",
         "perf_counter", "monotonic", "dict", "list", "tuple", "copy", "get", "state_dict",
         "isnan", "isfinite", "log10", "zip", "range", "isinstance", "join", "items", "keys",
         "values", "enumerate", "any", "all", "hasattr", "array", "tensor", "std", "dumps", "repr",
         "reversed", "stack", "median", "OrderedDict", "defaultdict", "deque", "Counter",
         "timedelta", "now", "isoformat", "strftime", "is_available", "memory_allocated",
         "max_memory_allocated", "memory_reserved", "max_memory_reserved", "numel", "size",
         "get_last_lr", "percentile", "minimum", "maximum", "DataFrame")  # fmt: skip
"""Functions and methods that only compute something."""
_LEAVES = (ast.Raise, ast.Continue, ast.Break, ast.Return)
Loop = ast.For | ast.While
Judge = Callable[[ast.AST], bool | None]
"""Says whether what an expression calls, enters, or fills has no part in training.

None says that only the words of the text can decide.
"""
_HIDES = (ast.NamedExpr, ast.Match, ast.Try, ast.FunctionDef, ast.ClassDef, ast.Lambda)
"""What may keep a value, or decide by it, where no statement shows it."""


def list_carried(loop: Loop) -> list[str]:
    """Return names that a turn reads before it has bound them, though turns bind them.

    Names of containers that a turn fills count as well.
    """
    bound = list_bound_in(loop)
    carried: list[str] = []
    seen: set[str] = set(target_names(loop.target)) if isinstance(loop, ast.For) else set()
    for statement in loop.body:
        _follow(statement, seen, bound, carried)
    for node in walk_body(loop):  # A list that grows, a buffer that is filled.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            filled: ast.AST | None = node.func.value if node.func.attr in _GROWS else None
        else:
            is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            filled = node.value if is_item and isinstance(node, ast.Subscript) else None
        if isinstance(filled, ast.Name) and filled.id not in bound:
            carried.append(filled.id)
    return list(dict.fromkeys(carried))


def list_bound_in(loop: Loop) -> set[str]:
    """Return the names that turns of a loop bind."""
    functions = [n for n in walk_body(loop) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    inside = {id(inner) for one in functions for part in one.body for inner in ast.walk(part)}
    return {one.name for one in functions} | {
        node.id
        for node in walk_body(loop)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and id(node) not in inside
    }


def _follow(node: ast.stmt, seen: set[str], bound: set[str], carried: list[str]) -> None:
    """Go through a statement as a turn would, and note what is read before it was bound.

    An inner loop has a turn at least.
    """
    if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match):
        for head in _list_heads(node):
            _read(head, seen, bound, carried)
        inner = set(seen)
        if isinstance(node, ast.For):
            inner |= set(target_names(node.target))
        ends = []
        for part in _list_parts(node):
            one = set(inner)
            for statement in part:
                _follow(statement, one, bound, carried)
            ends.append(one)
        if isinstance(node, ast.If):
            seen |= ends[0] & ends[1]
        elif isinstance(node, ast.For) or (
            isinstance(node, ast.Try)
            and all(isinstance(one.body[-1], _LEAVES) for one in node.handlers)
        ):
            seen |= ends[0]
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        _read(node, seen, bound, carried)
        seen.add(node.name)
        return
    if isinstance(node, ast.With):
        for item in node.items:
            _read(item.context_expr, seen, bound, carried)
            if item.optional_vars is not None:
                seen |= set(target_names(item.optional_vars))
        for statement in node.body:
            _follow(statement, seen, bound, carried)
        return
    if isinstance(node, ast.AugAssign):
        if isinstance(node.target, ast.Name) and node.target.id not in seen:
            carried.append(node.target.id)
        _read(node.value, seen, bound, carried)
        return
    _read(node, seen, bound, carried)
    seen |= {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def _list_heads(node: ast.stmt) -> list[ast.AST]:
    """Return what decides whether and how often a compound statement's parts run."""
    heads = [getattr(node, field, None) for field in ("test", "iter", "subject")]
    return [one for one in heads if one is not None]


def _list_parts(node: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(node, ast.Match):
        return [case.body for case in node.cases]
    parts = [node.body, getattr(node, "orelse", [])]  # type: ignore[attr-defined]
    if isinstance(node, ast.Try):
        parts += [handler.body for handler in node.handlers] + [node.finalbody]
    return parts


def _read(node: ast.AST, seen: set[str], bound: set[str], carried: list[str]) -> None:
    own = {
        name
        for inner in ast.walk(node)
        if isinstance(inner, ast.comprehension)
        for name in target_names(inner.target)
    }
    for one in (n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.Lambda)):
        stores = (n for n in ast.walk(one) if isinstance(n, ast.Name))
        own |= {arg.arg for arg in ast.walk(one) if isinstance(arg, ast.arg)}
        own |= {n.id for n in stores if isinstance(n.ctx, ast.Store)}
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Name)
            and isinstance(inner.ctx, ast.Load)
            and inner.id in bound - seen - own
        ):
            carried.append(inner.id)


def is_only_shown(
    loop: Loop,
    name: str,
    *,
    judge: Judge = lambda node: None,
    is_private: Callable[[str], bool] = lambda name: True,
    after: Sequence[ast.stmt] = (),
) -> bool:
    """Return whether a loop only prints, logs, or saves a name and all values made of it.

    `is_private` returns whether only the code around the loop has a name and its value. `after` has
    the statements that run between two runs of the loop.
    """
    tainted, before = {name}, 0
    while len(tainted) > before:
        before = len(tainted)
        ends = isinstance(loop, ast.While) and _mentions_any(loop.test, tainted)
        stays = all(_stays(one, tainted, False, judge) for one in (*loop.body, *after))
        if ends or not stays or not all(map(is_private, tainted)):
            return False
    return True


def is_computed(loop: Loop, name: str) -> bool:
    """Return whether an assignment, or a decision, uses a name."""
    return any(
        _mentions_any(part, (name,))
        for node in walk_body(loop)
        if isinstance(node, ast.stmt)
        for part in (
            [node.value] if isinstance(node, ast.Assign | ast.AugAssign) else _list_heads(node)
        )
    )


def _stays(node: ast.stmt, tainted: set[str], decided: bool, judge: Judge) -> bool:
    """Return whether a statement leaves training as it is; add names that it binds to `tainted`.

    With `decided` a tainted name decides whether it runs.
    """
    if not decided and not _mentions_any(node, tainted):
        return True
    if any(
        isinstance(one, _HIDES) and (decided or _mentions_any(one, tainted))
        for one in ast.walk(node)
    ):
        return False
    if hasattr(node, "body"):
        heads = _list_heads(node)
        inner = decided or any(_mentions_any(head, tainted) for head in heads)
        enters = all(
            not item.optional_vars and judge(item.context_expr)
            for item in getattr(node, "items", [])
            if _mentions_any(item, tainted)
        )
        if inner and isinstance(node, ast.For):
            tainted |= set(target_names(node.target))
        return (
            enters
            and all(_computes(head, tainted, decided, judge) for head in heads)
            and all(
                _stays(one, tainted, inner, judge) for part in _list_parts(node) for one in part
            )
        )
    if not _computes(node, tainted, decided, judge):
        return False
    if isinstance(node, ast.Return):
        return not decided and judge(node) is True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        word, filled = find_word(node.value), getattr(node.value.func, "value", node.value.func)
        if judge(node.value):
            tainted.add(find_root(filled))
        elif word not in SHOWS:
            return word in _GROWS and _taint(filled, tainted, judge, True)
        return True
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(_taint(one, tainted, judge, isinstance(node, ast.AugAssign)) for one in targets)
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass | ast.Assert)


def _taint(target: ast.AST, tainted: set[str], judge: Judge, fills: bool) -> bool:
    """Add the name that a target binds or fills; return whether it is one.

    If the target fills it, it has no part in training. If that is an attribute, the text alone
    cannot tell.
    """
    opens = False
    fills |= isinstance(target, ast.Subscript)
    while isinstance(target, ast.Subscript | ast.Attribute):
        opens |= isinstance(target, ast.Attribute)
        target = target.value
    refused = (opens and not judge(target)) or (fills and judge(target) is False)
    if refused or not isinstance(target, ast.Name | ast.Tuple):
        return False
    tainted |= set(target_names(target))
    return not any(isinstance(n, ast.Attribute | ast.Subscript) for n in ast.walk(target))


def _computes(node: ast.AST, tainted: set[str], decided: bool, judge: Judge) -> bool:
    """Return whether calls that a tainted name goes into only compute or show something."""
    known = (*_PURE, *_GROWS, *SHOWS)
    calls = [
        (one, judge(one))
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and (decided or _mentions_any(one, tainted))
    ]
    return all(find_word(one) in known if says is None else says for one, says in calls)


def find_root(node: ast.AST) -> str:
    """Return the name that an expression begins with; empty if it begins with none."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def find_word(call: ast.Call) -> str:
    """Return the name of a function or method that is called."""
    word: str = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return word


def _mentions_any(node: ast.AST, names: Iterable[str]) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id in names for inner in ast.walk(node))


def walk_body(loop: Loop) -> Iterator[ast.AST]:
    """Yield what is in a loop's body, the loop itself left out."""
    for statement in loop.body:
        yield from ast.walk(statement)


def target_names(target: ast.AST) -> list[str]:
    """Return the names that an assignment's target binds."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
