#!/usr/bin/env python3
"""Fail if a distribution has more statements than its budget in scripts/size_budget.json.

If a distribution has fewer, its budget is lowered to what it has. To raise a budget, edit the file
in a commit of its own that says what the new code replaces.

A distribution is a folder with a pyproject.toml and a src/ folder. Statements are Python statements
without docstrings.
"""

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "scripts" / "size_budget.json"


def is_docstring(node: ast.AST) -> bool:
    """Return whether `node` is a string that stands alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count_statements(path: Path) -> int:
    """Return the number of statements in a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in ast.walk(tree))


def count_all(root: Path) -> dict[str, int]:
    """Return the statements of each distribution below `root`, by its folder."""
    projects = [root / "pyproject.toml", *root.glob("*/pyproject.toml")]
    return {
        str(project.parent.relative_to(root)): sum(
            map(count_statements, (project.parent / "src").rglob("*.py"))
        )
        for project in projects
        if (project.parent / "src").is_dir()
    }


def main() -> int:
    """Compare, lower what can be lowered, and return the exit code."""
    budget: dict[str, int] = json.loads(BUDGET.read_text(encoding="utf-8"))
    counted = count_all(ROOT)
    over = {name: n for name, n in counted.items() if n > budget.get(name, 0)}
    for name, n in over.items():
        print(f"size: {name} has {n} statements, and its budget is {budget.get(name, 0)}")
        print("hint: remove code, or raise the budget in a commit of its own that says why")
    lowered = {name: min(n, budget.get(name, n)) for name, n in counted.items()} | {
        name: budget.get(name, 0) for name in over
    }
    if lowered != budget:
        BUDGET.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        print(f"size: lowered the budget; commit {BUDGET.relative_to(ROOT)}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
