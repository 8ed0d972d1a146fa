"""Change the decision core and the checkpoint code in small ways, and see whether a test fails.

usage: python -m tests.mutants [--count 30] [--seed 1] [--old REVISION]

Each mutant changes one comparison, operator, or truth value, drawn from a seed. It lives in
a copy of the repository. The tests of its room run first and then the core. A mutant that no test
catches runs against the tests of REVISION too. The command goes on until `--count` are caught.

Exit code 1 if a mutant is caught by the tests of REVISION only.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.sweep import sweep_after_me

from tests.suite import AT_ONCE, CORE, ROOT, SHORT

ROOMS = {
    **{room: (f"tests/unit/{room}",) for room in ("agent", "control", "detect", "plan", "policy")},
    "worker/checkpoint": ("tests/unit/worker",),
}
"""Rooms of `src/perdure`, and the tests that know each best."""
LIMIT_S = 1800.0
SWAPPED: dict[type, type] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one node of a file."""

    room: str
    path: str
    line: int
    index: int
    """Place of the node among those that can change."""


def list_changeable(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that `change` can change, in a fixed order."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[op, *_]) | ast.BoolOp(op=op) | ast.BinOp(op=op):
                if type(op) in SWAPPED:
                    yield node
            case ast.Constant(value=bool()):
                yield node


def change(node: ast.AST) -> None:
    """Negate a comparison or a truth value, or swap an operator."""
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        node.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value


def draw(seed: int) -> Iterator[Mutant]:
    """Yield mutants without end, the same for the same seed and source."""
    source = ROOT / "src" / "perdure"
    every = []
    for room in ROOMS:
        for path in sorted((source / room).rglob("*.py")):
            nodes = list_changeable(ast.parse(path.read_text(encoding="utf-8")))
            name = str(path.relative_to(ROOT))
            every.append(
                [Mutant(room, name, getattr(n, "lineno", 0), i) for i, n in enumerate(nodes)]
            )
    chance = random.Random(seed)
    # A file first, so that a long file is not drawn more often than a short one.
    files = [file for file in every if file]
    while True:
        yield chance.choice(chance.choice(files))


def render(mutant: Mutant) -> tuple[str, str]:
    """Return the file's text with the change, and the changed line."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    node = list(list_changeable(tree))[mutant.index]
    before = ast.unparse(node)
    change(node)
    return ast.unparse(tree), f"{before} -> {ast.unparse(node)}"


def copy_tree(into: Path, revision: str | None) -> Path:
    """Copy source, tests, and what they read; tests are those of `revision` if it is given."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    if revision:
        shutil.rmtree(into / "tests")
        archive = subprocess.run(
            ["git", "archive", revision, "tests"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x"], cwd=into, check=True, input=archive)
    return into


def is_caught(tree: Path, mutant: Mutant, text: str | None) -> bool:
    """Return whether a test in `tree` fails with the changed file; None changes nothing."""
    path = tree / mutant.path
    original = path.read_bytes()
    path.write_bytes(original if text is None else text.encode())
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tree / "src", tree / "lab/src", tree)))
    }
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", *SHORT, *AT_ONCE]
    try:
        for tests in (ROOMS[mutant.room], CORE):
            command = [sys.executable, "-m", "pytest", *options, *tests]
            try:
                done = subprocess.run(
                    command, cwd=tree, env=env, capture_output=True, timeout=LIMIT_S, check=False
                )
            except subprocess.TimeoutExpired:
                return True
            if done.returncode != 0:
                return True
        return False
    finally:
        path.write_bytes(original)


def main() -> int:
    """Draw and run mutants; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30, help="mutants to catch (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: 1)")
    parser.add_argument("--old", metavar="REVISION", help="tests to compare with")
    options = parser.parse_args()
    sweep_after_me()
    if options.old:
        verify = ["git", "rev-parse", "--verify", "--quiet", f"{options.old}^{{commit}}"]
        if subprocess.run(verify, cwd=ROOT, capture_output=True).returncode != 0:
            parser.error(f"unknown revision {options.old}")
    caught, lost = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        now = copy_tree(Path(folder) / "now", None)
        old = copy_tree(Path(folder) / "old", options.old) if options.old else None
        if is_caught(now, next(draw(options.seed)), None):
            print("mutants: a test fails without a mutant; run `make test` first")
            return 1
        for mutant in draw(options.seed):
            if caught + lost >= options.count:
                break
            text, changed = render(mutant)
            found = is_caught(now, mutant, text)
            found_before = not found and old is not None and is_caught(old, mutant, text)
            caught += found
            lost += found_before
            verdict = "caught" if found else "LOST" if found_before else "not caught"
            row = {"at": f"{mutant.path}:{mutant.line}", "change": changed, "verdict": verdict}
            print(json.dumps(row), flush=True)
    print(f"mutants: {caught} caught, {lost} caught by the old tests only")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
