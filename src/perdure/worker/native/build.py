"""The compiled recorder built once for the installed torch, and found again. Imports no torch.

The library's name holds all it depends on: torch's version and commit, the machine, and a hash
of source, layout of the ring and flags. It lies in the user's cache directory, or, in a wheel
made by `scripts/build_wheel.sh`, in `prebuilt/` beside this file. Two who build at once wait for
each other; a half-written library is never seen. No start of a rank ever waits for a compiler:
what is not built yet is not used.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from perdure.model import ring as layout

HERE = Path(__file__).parent
SOURCE = HERE / "recorder.cpp"
BUILD_TIMEOUT_S = 900.0
_MACROS = re.compile(r"^(W|C|S)_[A-Z_]+$")
_SIZES = (
    "HEADER_BYTES", "COMMS_MAX", "COMM_BYTES", "COMM_RANKS_MAX", "COMM_TEXT_AT", "COMM_RANKS_AT",
    "SPANS_AT", "SPAN_BYTES", "SPANS_MAX", "RING_BYTES",
)  # fmt: skip
_FLAGS = ("-O2", "-g0", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


class BuildError(Exception):
    """It cannot be built here; the message says why."""


class Torch(msgspec.Struct, frozen=True):
    """The installed torch, as its files say."""

    version: str
    commit: str
    root: Path


def find_torch() -> Torch | None:
    """Return the installed torch without importing it; None where there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (root / "version.py").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(__version__|git_version)\s*=\s*'([^']*)'", text, re.MULTILINE))
    return Torch(found.get("__version__", "?"), found.get("git_version", "?"), root)


def find_library() -> Path | None:
    """Return the library built for the installed torch and this source; None for none."""
    torch = find_torch()
    if torch is None:
        return None
    name = library_name(torch)
    for folder in (HERE / "prebuilt", cache_dir()):
        if (folder / name).is_file():
            return folder / name
    return None


def explain_missing() -> str:
    """Return why there is no library, or could not be one."""
    torch = find_torch()
    if torch is None:
        return "torch is not installed"
    if not (torch.root / "include" / "torch" / "library.h").is_file():
        return f"torch {torch.version} came without its C++ headers"
    if find_compiler() is None:
        return "it is not built and there is no C++ compiler (g++ or $CXX)"
    return f"it is not built yet for torch {torch.version}"


def build_command() -> str:
    """Return what a person types to build it."""
    return f"{os.path.basename(sys.executable)} -m perdure.worker.native"


def library_name(torch: Torch) -> str:
    """Return the file name of the library for `torch`; different where anything differs."""
    state = hashlib.sha256()
    for part in (SOURCE.read_bytes(), " ".join((*_FLAGS, *_macros())).encode()):
        state.update(part)
    state.update(torch.commit.encode())
    version = re.sub(r"[^\w.+-]", "_", torch.version)
    return f"recorder-torch{version}-{platform.machine()}-{state.hexdigest()[:12]}.so"


def cache_dir() -> Path:
    """Return the directory of built libraries."""
    base = os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")
    return Path(base) / "perdure" / "native"


def find_compiler() -> str | None:
    """Return a C++ compiler."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build(folder: Path | None = None) -> Path:
    """Build the library into `folder` (default: the cache), unless it is there; return its path.

    Raises:
        BuildError: there is no torch, no compiler, no room, or the compiler failed.
    """
    torch = find_torch()
    compiler = find_compiler()
    if torch is None or compiler is None:
        raise BuildError(explain_missing())
    folder = folder or cache_dir()
    target = folder / library_name(torch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Given up by the kernel whatever happens to us.
            if not target.is_file():
                _compile(compiler, torch, target)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    return target


def _macros() -> list[str]:
    """Return the ring's layout as the compiler's -D arguments."""
    names = sorted(name for name in vars(layout) if _MACROS.match(name)) + list(_SIZES)
    macros = [f"-D{name}={getattr(layout, name)}" for name in names]
    return [*macros, f'-DP2P_SUFFIX="{layout.P2P_SUFFIX}"']


def _compile(compiler: str, torch: Torch, target: Path) -> None:
    include = torch.root / "include"
    descriptor, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    command = [compiler, *_FLAGS, *_macros(), str(SOURCE), "-o", temporary]
    command += [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]
    command += [f"-L{torch.root / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise BuildError(_find_error(done.stderr))
        os.chmod(temporary, 0o755)
        os.rename(temporary, target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took longer than {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _find_error(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
