"""The import contracts of pyproject.toml hold: rooms import downwards, doors stay single."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from perdure.failpoints.points import POINTS
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
TOP = ("docs", "src", "lab", "tests", "bench", "examples", "scripts")
SOURCES = (".py", ".c", ".cpp", ".h", ".sh", ".toml")


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_is_in_the_contract_and_in_the_map() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in config["contracts"] if c["type"] == "layers")["layers"]
    named = {room.strip() for layer in layers for room in layer.split("|")}
    rooms = {
        path.name
        for path in (ROOT / "src" / "perdure").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert rooms == named
    text = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = re.findall(r"^    (\w+) {2,}\w", text.partition("## The rooms")[2], re.MULTILINE)
    assert sorted(drawn) == sorted(rooms)


FOREIGN = {
    *("PGTransport", "Tuner", "xpu", "train_runtime", "_per_second"),
    *("on_train_end", "on_train_epoch_end", "on_train_epoch_start"),
}
"""Names of others' libraries that documents speak of and no source does."""
OURS = re.compile(r"(?!perdure_|PERDURE_|_INBOX|[0-9a-f]{7}$)[A-Za-z_][\w.]*(?<!json)(?<!jsonl)")
"""Not a metric, a subject of the bus, a commit or a file of a job."""


def test_programs_that_are_text_import_what_there_is() -> None:
    """They run on another machine or in a pod; neither mypy nor ruff looks into them."""
    missing, seen = [], 0
    for path in (p for name in ("src", "lab/src") for p in sorted((ROOT / name).rglob("*.py"))):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
        for text in texts:
            for name, wanted in _IMPORT.findall(text):
                seen += 1
                module = importlib.import_module(name)
                names = [word.split(" as ")[0].strip() for word in wanted.split(",")]
                missing += [
                    f"{path.relative_to(ROOT)}: {name}.{word}"
                    for word in names
                    if not hasattr(module, word)
                ]
    assert missing == []
    assert seen >= 3


_IMPORT = re.compile(r"\bfrom (perdure[\w.]*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)")


def test_paths_modules_and_functions_that_documents_name_exist() -> None:
    package = ROOT / "src" / "perdure"
    rooms = {path.name for path in package.iterdir() if path.is_dir()}
    sources = [p for name in TOP for p in (ROOT / name).rglob("*") if p.suffix in SOURCES]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    files, gone = {path.name for path in sources}, []
    for document in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]:
        if document.name == "CHANGELOG.md":
            continue
        for name in re.findall(r"`([\w./-]*\w/?)(?:\([^`]*\))?`", document.read_text()):
            first, *rest = name.rstrip("/").split("/")
            dotted = name.removeprefix("perdure.").split(".")
            if rest and first in TOP:
                known = (ROOT / name).exists()
            elif name in POINTS:
                continue
            elif rest and first in rooms and Path(name).suffix in ("", ".py"):
                known = (package / name).exists() or (package / f"{name}.py").exists()
            elif rest or not OURS.fullmatch(name):
                continue
            elif name.endswith(".py"):
                known = name in files or document.parent != ROOT
            elif dotted[0] in rooms and (name.startswith("perdure.") or len(dotted) > 2):
                known = has_module(package, dotted)
            else:
                known = set(name.split(".")) <= words | FOREIGN
            if not known:
                gone.append(f"{document.name}: {name}")
    assert gone == []


def has_module(package: Path, dotted: list[str]) -> bool:
    """Return whether `room.module` is there, and has the names that follow."""
    for part in range(len(dotted), 0, -1):
        path = package.joinpath(*dotted[:part])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                names = set(re.findall(r"\w+", file.read_text()))
                return part > 1 and set(dotted[part:]) <= names
    return False
