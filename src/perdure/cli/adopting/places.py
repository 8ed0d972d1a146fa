"""Where in a script something is: how often it runs, what is bound there, where an import goes."""

import ast

from perdure.cli.adopting.edits import Edits, UnsureError
from perdure.cli.adopting.script import Reading

_MAIN = ("torch.distributed.elastic.multiprocessing.errors.record", "hydra.main")
"""Decorators of functions that are called once, as they are written."""


def insert_import(reading: Reading, edits: Edits, text: str) -> None:
    """Put an import behind those on top of the file.

    Raises:
        UnsureError: there is none.
    """
    last = None
    for number, node in enumerate(reading.tree.body):
        is_text = number == 0 and isinstance(node, ast.Expr)
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node
        elif not is_text:
            break
    if last is None or last.end_lineno is None:
        raise UnsureError("it has no imports on its top", f"`{text}`, and docs/tutorial.md")
    edits.insert_below_imports(last.end_lineno, text)


def check_once(reading: Reading, node: ast.stmt, by_hand: str) -> None:
    """Refuse a statement that may run more than once in a process, or of which that is not known.

    Raises:
        UnsureError: so it is.
    """
    for above in reading.ancestors(node):
        if isinstance(above, ast.For | ast.While | ast.AsyncFor):
            raise UnsureError(f"line {above.lineno} trains several times", by_hand)
        if isinstance(above, ast.ClassDef | ast.AsyncFunctionDef | ast.Lambda):
            raise UnsureError(
                f"line {node.lineno} is in a class or the like, and how often it runs is not known",
                by_hand,
            )
        if isinstance(above, ast.FunctionDef):
            marks = [mark.func if isinstance(mark, ast.Call) else mark
                     for mark in above.decorator_list]  # fmt: skip
            if any(reading.name_of(mark) not in _MAIN for mark in marks):
                raise UnsureError(f"`{above.name}` has a decorator", by_hand)
            if isinstance(reading.parents[above], ast.ClassDef):
                raise UnsureError(
                    f"line {node.lineno} is in a method, and how often it is called is not known",
                    by_hand,
                )
            uses = [n for n in ast.walk(reading.tree)
                    if isinstance(n, ast.Name) and n.id == above.name]  # fmt: skip
            user = reading.parents[uses[0]] if len(uses) == 1 else None
            if not (isinstance(user, ast.Call) and user.func is uses[0]):
                raise UnsureError(
                    f"`{above.name}` is not called at one place of this file", by_hand
                )
            check_once(reading, find_statement(reading, user, by_hand), by_hand)
            return


def find_statement(reading: Reading, call: ast.Call, by_hand: str) -> ast.stmt:
    """Return the statement that makes a call.

    Raises:
        UnsureError: it may make it several times, or later.
    """
    for above in reading.ancestors(call):
        if isinstance(above, ast.comprehension | ast.Lambda | ast.ListComp | ast.GeneratorExp):
            break
        if isinstance(above, ast.stmt):
            return above
    raise UnsureError(f"line {call.lineno} is called an unknown number of times", by_hand)


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
