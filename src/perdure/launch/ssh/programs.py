"""The programs that run on a box, as they are sent: any Python from 3.6 on can read them.

RHEL 8 and its kin have 3.6 as `python3`, which perdure itself does not run on; but the box has to
be asked before that can be said. What 3.6 cannot read is annotations, and nobody needs them there.
"""

import ast
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent
OLDEST = (3, 6)
ASK = (
    "command -v python3 >/dev/null 2>&1 || "
    "{{ echo 'there is no python3 on the box' >&2; exit 127; }}; "
    "python3 -c 'import sys; sys.exit(sys.version_info < ({0}, {1}))' || "
    '{{ echo "python3 on the box is $(python3 -V 2>&1): {0}.{1} or newer is needed" >&2; '
    "exit 69; }}; "
).format(*OLDEST)
"""Shell that ends with one clear line where no Python there could read a program of ours."""


@cache
def read_program(name: str) -> str:
    """Return the source of `box.py`, `door.py` or `results.py`, without its annotations."""
    tree = _Plain().visit(ast.parse((_HERE / name).read_text(encoding="utf-8")))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


class _Plain(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Take the types of arguments and of the answer away."""
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Take an argument's type away."""
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """Make a plain assignment of it; without a value it says nothing."""
        if node.value is None:
            return None
        return ast.Assign(targets=[node.target], value=node.value, type_comment=None)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        """Leave out what only annotations need."""
        return None if node.module in ("__future__", "typing", "collections.abc") else node
