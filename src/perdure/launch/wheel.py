"""A wheel of this very installation of perdure, so that the box runs the same code.

A wheel is a zip file with the package, its metadata and a list of hashes; nothing has to be built.
"""

import base64
import hashlib
import os
import re
import zipfile
from importlib.metadata import Distribution, distribution, version
from pathlib import Path

from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec

PACKAGE = Path(__file__).resolve().parents[1]
_LEFT_OUT = (".pyc", ".so")


def find_digest() -> str:
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
    tags = "Wheel-Version: 1.0\nGenerator: perdure\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    add(f"{info}/WHEEL", tags.encode())
    archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")


MODULES = {
    "torchft": ("torchft", "grpc"),
    "metrics": ("prometheus_client",),
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
    wanted = set()
    if spec.torchft.replicas:
        wanted.add("torchft")
    if spec.metrics.prometheus_port:
        wanted.add("metrics")
    path = Path(os.path.join(spec.launch.project, spec.cwd, spec.script))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        text = ""
    wanted |= {name for found in _USES.findall(text) for name in found if name in MODULES}
    return tuple(sorted(wanted))
