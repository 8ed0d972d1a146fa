"""What one turn of a loop hands to the next by a name: no checkpoint has it.

What is only shown, such as a running mean of the loss, does not count.
"""

import ast
from collections.abc import Callable, Iterable, Iterator

SHOWS = ("print", "log", "info", "debug", "warning", "add_scalar", "add_scalars", "add_histogram",
         "set_postfix", "set_postfix_str", "set_description", "write", "write_scalar", "save",
         "dump", "writerow", "flush", "note", "report")  # fmt: skip
"""Functions and methods of which nothing comes back into training."""
_GROWS = ("append", "extend", "insert", "add", "push", "put", "update", "pop", "appendleft")
_PURE = ("min", "max", "sum", "len", "float", "int", "round", "abs", "sorted", "str", "format",
         "mean", "item", "detach", "cpu", "numpy", "tolist", "clone", "sqrt", "exp", "time", "avg",
         "perf_counter", "monotonic", "dict", "list", "tuple", "copy", "get", "state_dict",
         "isnan", "isfinite", "log10", "zip", "range", "isinstance", "join")  # fmt: skip
"""Functions and methods that only compute something."""
Loop = ast.For | ast.While
Counts = Callable[[ast.AST], bool]


def list_carried(loop: Loop, *, strict: bool = True) -> list[str]:
    """Return names that a turn reads before it has bound them, though turns bind them.

    Names of containers that a turn fills count as well. Names that are only shown do not count. If
    `strict`, only a sum or a constant is shown.
    """
    bound = list_bound_in(loop)
    carried: list[str] = []
    seen: set[str] = set(target_names(loop.target)) if isinstance(loop, ast.For) else set()
    for statement in loop.body:
        _follow(statement, seen, bound, carried, not strict)
    for node in walk_body(loop):  # A list that grows, a buffer that is filled.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            filled: ast.AST | None = node.func.value if node.func.attr in _GROWS else None
        else:
            is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
            filled = node.value if is_item and isinstance(node, ast.Subscript) else None
        if isinstance(filled, ast.Name) and filled.id not in bound:
            carried.append(filled.id)
    return [name for name in dict.fromkeys(carried) if not is_only_shown(loop, name, strict=strict)]


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


def _follow(
    node: ast.stmt, seen: set[str], bound: set[str], carried: list[str], runs: bool
) -> None:
    """Go through a statement as a turn would, and note what is read before it was bound.

    With `runs`, an inner loop has a turn at least.
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
                _follow(statement, one, bound, carried, runs)
            ends.append(one)
        if isinstance(node, ast.If):
            seen |= ends[0] & ends[1]
        elif isinstance(node, ast.For) and runs:
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
            _follow(statement, seen, bound, carried, runs)
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
    loop: Loop, name: str, *, strict: bool = False, counts: Counts = lambda node: False
) -> bool:
    """Return whether a loop only prints, logs, or saves a name and all values made of it.

    `counts` says whether an expression calls or enters an object that only counts.
    """
    tainted, before = {name}, 0
    while len(tainted) > before:
        before = len(tainted)
        ends = isinstance(loop, ast.While) and _mentions_any(loop.test, tainted)
        if ends or not all(_stays(one, tainted, False, counts) for one in loop.body):
            return False
        if strict and (len(tainted) > 1 or _is_computed(loop, name)):
            return False
    return True


def _is_computed(loop: Loop, name: str) -> bool:
    """Return whether an assignment, or a decision, uses a name."""
    return any(
        _mentions_any(part, (name,))
        for node in walk_body(loop)
        if isinstance(node, ast.stmt)
        for part in (
            [node.value] if isinstance(node, ast.Assign | ast.AugAssign) else _list_heads(node)
        )
    )


def _stays(node: ast.stmt, tainted: set[str], decided: bool, counts: Counts) -> bool:
    """Return whether a statement leaves training as it is; add names that it binds to `tainted`.

    With `decided` a tainted name decides whether it runs.
    """
    if hasattr(node, "body"):
        heads = _list_heads(node)
        inner = decided or any(_mentions_any(head, tainted) for head in heads)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.With) and not decided:
            heads = [item.context_expr for item in getattr(node, "items", [])]
            if any(_mentions_any(head, tainted) and not counts(head) for head in heads):
                return False
        if inner and isinstance(node, ast.For):
            tainted |= set(target_names(node.target))
        parts = _list_parts(node)
        return all(_stays(one, tainted, inner, counts) for part in parts for one in part)
    if not decided and not _mentions_any(node, tainted):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if _word(node.value) in SHOWS:
            return True
        fills = isinstance(function, ast.Attribute) and function.attr in _GROWS
        if not fills and not counts(node.value):
            return False
        filled = function.value if isinstance(function, ast.Attribute) else function
        return _taint(filled, tainted) and _computes(node.value, tainted, decided, counts)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if node.value is not None and not _computes(node.value, tainted, decided, counts):
            return False
        return all(_taint(target, tainted) for target in targets)
    return isinstance(node, ast.Pass | ast.Assert)


def _taint(target: ast.AST, tainted: set[str]) -> bool:
    """Add the name that a target fills; return whether it is one."""
    while isinstance(target, ast.Subscript):
        target = target.value
    if isinstance(target, ast.Name | ast.Tuple):
        tainted |= set(target_names(target))
        return not any(isinstance(n, ast.Attribute | ast.Subscript) for n in ast.walk(target))
    return False


def _computes(node: ast.AST, tainted: set[str], decided: bool, counts: Counts) -> bool:
    """Return whether calls that a tainted name goes into only compute something."""
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    known = (*_PURE, *_GROWS)
    return all(
        _word(one) in known or not (decided or _mentions_any(one, tainted)) or counts(one)
        for one in calls
    )


def _word(call: ast.Call) -> str:
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
