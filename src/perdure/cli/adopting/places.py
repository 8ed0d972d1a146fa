"""Where in a script something is: how often it runs, what is bound there, where an import goes."""

import ast

from perdure.cli.adopting.edits import Edits, UnsureError
from perdure.cli.adopting.script import Reading

_MAIN = ("torch.distributed.elastic.multiprocessing.errors.record", "hydra.main")
"""Decorators of functions that are called once, as they are written."""


def find_last_import(reading: Reading) -> int:
    """Return the last line of the imports on top of the file; 0: there are none."""
    last = 0
    for number, node in enumerate(reading.tree.body):
        is_text = number == 0 and isinstance(node, ast.Expr)
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node.end_lineno or 0
        elif not is_text:
            break
    return last


def insert_import(reading: Reading, edits: Edits, text: str) -> None:
    """Put an import behind those on top of the file.

    Raises:
        UnsureError: there is none.
    """
    last = find_last_import(reading)
    if not last:
        raise UnsureError("it has no imports on its top", f"`{text}`, and docs/tutorial.md")
    if [node.lineno for node in reading.tree.body].count(last) > 1:
        raise UnsureError(f"line {last} has more than one statement")
    edits.insert_below_imports(last, text)


def check_once(reading: Reading, node: ast.stmt) -> None:
    """Refuse a statement that may run more than once in a process.

    A call in a function that this file does not call, such as `_mp_fn`, does not count.

    Raises:
        UnsureError: so it is, or it is not known.
    """
    for above in reading.ancestors(node):
        if isinstance(above, ast.For | ast.While | ast.AsyncFor):
            raise UnsureError(f"line {above.lineno} trains several times")
        if isinstance(above, ast.FunctionDef) and not isinstance(
            reading.parents[above], ast.ClassDef
        ):
            marks = [mark.func if isinstance(mark, ast.Call) else mark
                     for mark in above.decorator_list]  # fmt: skip
            if any(reading.name_of(mark) not in _MAIN for mark in marks):
                raise UnsureError(f"`{above.name}` has a decorator")
            users = [call for call in _list_uses(reading, above.name) if _is_run(reading, call)]
            if len(users) != 1 or not isinstance(users[0], ast.Call):
                raise UnsureError(f"`{above.name}` is not called at one place of this file")
            check_once(reading, find_statement(reading, users[0]))
            return
        if isinstance(above, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            raise UnsureError(f"how often line {node.lineno} runs is not known")


def _list_uses(reading: Reading, function: str) -> list[ast.AST]:
    """Return the calls of a function, and other nodes that have its name."""
    uses = [n for n in ast.walk(reading.tree) if isinstance(n, ast.Name) and n.id == function]
    users = [(reading.parents[use], use) for use in uses]
    return [up if isinstance(up, ast.Call) and up.func is use else use for up, use in users]


def _is_run(reading: Reading, node: ast.AST) -> bool:
    """Return whether a node is in no function, or in one that this file uses or decorates."""
    scope = reading.scope_of(node)
    if not isinstance(scope, ast.FunctionDef) or scope.decorator_list:
        return True
    return bool(_list_uses(reading, scope.name))


def find_statement(reading: Reading, call: ast.AST) -> ast.stmt:
    """Return the statement that makes a call.

    Raises:
        UnsureError: it may make it several times, or later.
    """
    for above in reading.ancestors(call):
        if isinstance(above, ast.comprehension | ast.Lambda | ast.ListComp | ast.GeneratorExp):
            break
        if isinstance(above, ast.stmt):
            return above
    line = getattr(call, "lineno", 0)
    raise UnsureError(f"line {line} is called an unknown number of times")


def list_visible(reading: Reading, node: ast.AST) -> set[str]:
    """Return the names that are bound in the function of a node, or in the module."""
    scope = reading.scope_of(node)
    found = set()
    for inner in ast.walk(reading.tree):
        if isinstance(inner, ast.arg):
            if reading.parents[reading.parents[inner]] is scope:
                found.add(inner.arg)
        elif (
            isinstance(inner, ast.Name)
            and isinstance(inner.ctx, ast.Store)
            and reading.scope_of(inner) in (scope, reading.tree)
        ):
            found.add(inner.id)
    return found


def list_bound(tree: ast.AST) -> set[str]:
    """Return every name that a file binds or takes as an argument."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                found |= set(names)
    return found


def loop_of(reading: Reading, node: ast.AST) -> ast.AST | None:
    """Return the loop that a node is directly in; None for none."""
    return next((a for a in reading.ancestors(node) if isinstance(a, ast.For | ast.While)), None)


def owner_in(call: ast.Call, names: tuple[str, ...]) -> bool:
    """Return whether a call is that of a method of one of `names`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in names


def has_keyword(call: ast.Call, name: str) -> bool:
    """Return whether a call is handed an argument by this name."""
    return any(word.arg == name for word in call.keywords)
