"""perdure's NCCL profiler plugin: C source, and how it is built. What it sees: `docs/nccl.md`.

Building it is one call of the C compiler, under a second, cached by its sources. It needs neither
torch nor NCCL nor CUDA: the interface is a table of functions, and its layouts are written down in
`abi.h`. A wheel may carry the library, which then wins; otherwise it lies in the user's cache,
named by what it was made of.
"""

import hashlib
import platform
import shutil
from pathlib import Path

from perdure.model.errors import PlatformError
from perdure.worker.native.build import cache_dir, list_built, run_compiler

PLUGIN_NAME = "libnccl-profiler-perdure.so"
"""In a wheel, where it lies in `prebuilt/` beside the recorder."""
_HERE = Path(__file__).parent
_SOURCES = ("plugin.c", "abi.h", "layout.h")
_FLAGS = (
    *("-std=c11", "-O2", "-g", "-Wall", "-Wextra"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)
PATH_MAX = 255
"""NCCL cuts off what is longer in NCCL_PROFILER_PLUGIN."""


def find_nccl_plugin() -> str:
    """Return the path of the library, or empty where it was not built (or NCCL could not load it).

    The path is absolute: with a bare name NCCL would search the library path.
    """
    found = map(str, list_built(PLUGIN_NAME, _cached()))
    return next((path for path in found if len(path) <= PATH_MAX), "")


def build_nccl_plugin(target: Path | None = None) -> str:
    """Build the library unless it is there, and return its path; `target` is for a wheel.

    Raises:
        PlatformError: there is no C compiler, or it failed.
    """
    if target is None and (found := find_nccl_plugin()):
        return found
    target = target or _cached()
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "")
    if not compiler:
        raise PlatformError("no C compiler for the NCCL plugin", hint="install gcc")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        run_compiler([compiler, *_FLAGS, str(_HERE / "plugin.c")], target)
    except OSError as error:
        raise PlatformError(f"the NCCL plugin cannot be built: {error}") from error
    return str(target)


def _cached() -> Path:
    made_of = [" ".join((platform.machine(), *_FLAGS)).encode()]
    made_of += [(_HERE / name).read_bytes() for name in _SOURCES]
    digest = hashlib.sha256(b"".join(made_of)).hexdigest()
    return cache_dir() / f"libnccl-profiler-perdure-{digest[:16]}.so"
