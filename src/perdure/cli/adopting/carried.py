"""What one turn of a loop hands to the next by a name: no checkpoint has it.

What is only shown, such as a running mean of the loss, does not count.
"""

import ast

from perdure.cli.adopting.places import mentions, target_names, walk_body

SHOWS = ("print", "log", "info", "debug", "warning", "add_scalar", "add_scalars", "set_postfix",
          "set_description", "write", "write_scalar")  # fmt: skip
"""Functions and methods of which nothing comes back into training."""
_GROWS = ("append", "extend", "insert", "add", "push", "put", "update", "pop", "appendleft")


def list_carried(loop: ast.For) -> list[str]:
    """Return names that a turn reads before it has bound them, though turns bind them.

    What is only shown (a running mean of the loss) does not count.
    """
    bound = {
        node.id
        for node in walk_body(loop)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    carried: list[str] = []
    seen: set[str] = set(target_names(loop.target))
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
    return [name for name in dict.fromkeys(carried) if not _is_only_shown(loop, name)]


def _follow(node: ast.stmt, seen: set[str], bound: set[str], carried: list[str]) -> None:
    """Go through a statement as a turn would, and note what is read before it was bound."""
    if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.Match):
        for field in ("test", "iter", "subject"):
            if (head := getattr(node, field, None)) is not None:
                _read(head, seen, bound, carried)
        inner = set(seen)
        if isinstance(node, ast.For):
            inner |= set(target_names(node.target))
        if isinstance(node, ast.Match):
            parts = [case.body for case in node.cases]
        else:
            parts = [node.body, node.orelse]
        if isinstance(node, ast.Try):
            parts += [handler.body for handler in node.handlers] + [node.finalbody]
        ends = []
        for part in parts:
            one = set(inner)
            for statement in part:
                _follow(statement, one, bound, carried)
            ends.append(one)
        if isinstance(node, ast.If):
            seen |= ends[0] & ends[1]
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


def _read(node: ast.AST, seen: set[str], bound: set[str], carried: list[str]) -> None:
    own = {
        name
        for inner in ast.walk(node)
        if isinstance(inner, ast.comprehension)
        for name in target_names(inner.target)
    }
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Name)
            and isinstance(inner.ctx, ast.Load)
            and inner.id in bound - seen - own
        ):
            carried.append(inner.id)


def _is_only_shown(loop: ast.For, name: str) -> bool:
    """Return whether a name only adds up, begins anew with a constant, or is printed."""

    def allows(node: ast.stmt) -> bool:
        if isinstance(node, ast.AugAssign):
            mine = isinstance(node.target, ast.Name) and node.target.id == name
            return (mine or not mentions(node, name)) and not mentions(node.value, name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            word = getattr(function, "attr", getattr(function, "id", ""))
            mine = isinstance(function, ast.Attribute) and mentions(function.value, name)
            if word in SHOWS or (mine and word in _GROWS):
                return not mine or not any(mentions(one, name) for one in node.value.args)
        return not mentions(node, name)

    for node in walk_body(loop):
        if not isinstance(node, ast.stmt):
            continue
        if hasattr(node, "body"):
            heads = [getattr(node, field, None) for field in ("test", "iter", "subject")]
            if any(head is not None and mentions(head, name) for head in heads):
                return False
        elif not allows(node):
            return False
    return True
