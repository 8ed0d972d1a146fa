"""What of perdure itself goes to a box: a wheel of this very installation, extras, programs.

A wheel is a zip file with the package, its metadata and a list of hashes; nothing has to be built.
The programs are asked of any Python from 3.6 on: RHEL 8 and its kin have that as `python3`, which
perdure itself does not run on; but the box has to be asked before that can be said.
"""

import ast
import base64
import hashlib
import os
import re
import zipfile
from functools import cache
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec

PACKAGE = Path(__file__).resolve().parents[1]
_LEFT_OUT = (".pyc", ".so")


def compute_digest() -> str:
    """Return the digest of this installation, as `results.py digest` finds it on a box."""
    from perdure.launch.ssh.results import digest_package  # Whose room imports this module.

    return digest_package(str(PACKAGE))


def name_wheel() -> str:
    """Return the file name of the wheel."""
    return f"perdure-{version('perdure')}-py3-none-any.whl"


def write_wheel(folder: Path) -> Path:
    """Write the wheel into `folder`; return its path.

    Raises:
        PlatformError: perdure is not installed here but only on the path, or the disk is full.
    """
    try:
        known = distribution("perdure")
        path = folder / name_wheel()
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            _fill(archive, known)
    except (ModuleNotFoundError, OSError) as error:
        raise PlatformError(f"cannot make a wheel of perdure: {error}") from error
    return path


def _fill(archive: zipfile.ZipFile, known: Distribution) -> None:
    info = f"perdure-{version('perdure')}.dist-info"
    rows: list[str] = []

    def add(name: str, data: bytes) -> None:
        archive.writestr(name, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")

    for source in sorted(PACKAGE.rglob("*")):
        skipped = source.suffix in _LEFT_OUT or "__pycache__" in source.parts
        if source.is_file() and not skipped:
            add(f"perdure/{source.relative_to(PACKAGE)}", source.read_bytes())
    add(f"{info}/METADATA", (known.read_text("METADATA") or "").encode())
    add(f"{info}/entry_points.txt", (known.read_text("entry_points.txt") or "").encode())
    add(
        f"{info}/WHEEL",
        b"Wheel-Version: 1.0\nGenerator: perdure\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    )
    archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")


MODULES = {
    "torchft": ("torchft", "grpc"),
    "metrics": ("prometheus_client",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "huggingface": ("transformers", "accelerate"),
    "lightning": ("lightning",),
}
"""Extra -> modules that it brings."""
_USES = re.compile(
    r"^\s*(?:from\s+perdure\.(\w+)\s+import|import\s+perdure\.(\w+)|from\s+perdure\s+import\s+(\w+))",
    re.MULTILINE,
)


def choose_extras(spec: JobSpec) -> tuple[str, ...]:
    """Return the extras of a job, by its fields and by what its script imports of perdure.

    Only the script itself is read, where it can be; what else a project needs stands in
    `launch.packages` or `launch.requirements`.
    """
    by_field = {"torchft": spec.groups, "metrics": spec.metrics.prometheus_port}
    by_field |= dict.fromkeys(spec.tracking.targets, True)
    url = spec.checkpoint.url
    by_field |= {"s3": url.startswith("s3://"), "gcs": url.startswith(("gs://", "gcs://"))}
    path = Path(os.path.join(spec.launch.project, spec.cwd, spec.script))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        text = ""
    imported = {name for found in _USES.findall(text) for name in found if name in MODULES}
    return tuple(sorted(imported | {name for name, asked in by_field.items() if asked}))


_PROGRAMS = Path(__file__).resolve().parent / "ssh"
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
    """Return the source of a program such as `box.py`, beside it by path, without annotations.

    What 3.6 cannot read is annotations, and nobody needs them there.
    """
    tree = _Plain().visit(ast.parse((_PROGRAMS / name).read_text(encoding="utf-8")))
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
