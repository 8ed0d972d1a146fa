"""The compiled recorder built once for the installed torch, and found again. Imports no torch.

The library's name holds all it depends on: torch's version and commit, the machine, and a hash
of source, layout of the ring and flags. It lies in the user's cache directory, or, in a wheel
made by `scripts/build_wheel.sh`, in `prebuilt/` beside this file. Two who build at once wait for
each other; a half-written library is never seen. No start of a rank ever waits for a compiler:
what is not built yet is not used.

`status` says which recorder a rank started now would get, why, and what it costs on this machine:
measured once, kept beside the library. A process of its own (`python -m perdure.worker.native.build
LIBRARY`) makes a gloo group of one rank and all-reduces one number, in blocks with the recorder's
kernel and blocks that pass it by: a dispatch key left out in this thread is as if no kernel were
registered, so both kinds of block alternate within the same second and process.

perdure's NCCL profiler plugin is C source (what it sees: `docs/nccl.md`). Building it is one call
of the C compiler, under a second, cached by its sources. It needs neither torch nor NCCL nor CUDA:
the interface is a table of functions, and its layouts are written down in `nccl/abi.h`. A wheel may
carry the library, which then wins; otherwise it lies in the user's cache, named by what it was made
of.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from perdure.files import replace_file
from perdure.model import ring as layout
from perdure.model.errors import PlatformError

HERE = Path(__file__).parent
SOURCE = HERE / "recorder.cpp"
BUILD_TIMEOUT_S = 900.0
_MACROS = re.compile(r"^(W|C|S)_[A-Z_]+$")
_SIZES = (
    "HEADER_BYTES", "COMMS_MAX", "COMM_BYTES", "COMM_RANKS_MAX", "COMM_TEXT_AT", "COMM_RANKS_AT",
    "SPANS_AT", "SPAN_BYTES", "SPANS_MAX", "RING_BYTES",
)  # fmt: skip
_FLAGS = ("-O2", "-g0", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


class BuildError(PlatformError):
    """Raised where the library cannot be built here; the message says why."""


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
    return next(iter(list_built(name, cache_dir() / "native" / name)), None)


def list_built(name: str, cached: Path) -> list[Path]:
    """Return what was built: `name` in a wheel beside this file, `cached` in the user's cache."""
    return [path for path in (HERE / "prebuilt" / name, cached) if path.is_file()]


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
    state = SOURCE.read_bytes() + " ".join((*_FLAGS, *_macros())).encode() + torch.commit.encode()
    version = re.sub(r"[^\w.+-]", "_", torch.version)
    digest = hashlib.sha256(state).hexdigest()
    return f"recorder-torch{version}-{platform.machine()}-{digest[:12]}.so"


def cache_dir() -> Path:
    """Return the user's directory of what was built."""
    return Path(os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache"), "perdure")


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
    folder = folder or cache_dir() / "native"
    target = folder / library_name(torch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Given up by the kernel whatever happens to us.
            if not target.is_file():
                include = torch.root / "include"
                command = [compiler, *_FLAGS, *_macros(), str(SOURCE)]
                command += [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]
                command += [f"-L{torch.root / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"]
                run_compiler(command, target)
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}") from error
    return target


def _macros() -> list[str]:
    """Return the ring's layout as the compiler's -D arguments."""
    names = sorted(name for name in vars(layout) if _MACROS.match(name)) + list(_SIZES)
    macros = [f"-D{name}={getattr(layout, name)}" for name in names]
    return [*macros, f'-DP2P_SUFFIX="{layout.P2P_SUFFIX}"']


def run_compiler(command: list[str], target: Path) -> None:
    """Have the compiler of `command` make `target`, which is there whole or not at all.

    Raises:
        BuildError: it failed, or took too long.
        OSError: there is no room.
    """
    descriptor, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    command = [*command, "-o", temporary]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise BuildError(next((line for line in lines if "error" in line), lines[-1]))
        os.chmod(temporary, 0o755)
        os.rename(temporary, target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


# --- what it costs --------------------------------------------------------------------------------

BLOCKS = 200
BLOCK = 50
_TIMEOUT_S = 120.0
_VARIABLES = ("PERDURE_RING", "PERDURE_SOCKET", "PERDURE_RECORDER", "TORCH_DISTRIBUTED_DEBUG")


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of one collective."""

    collective_us: float
    """Added by the recorder: lower quartile of blocks with it less that of blocks without.

    What else runs on the machine only ever adds, so the lower quartile is the quietest figure
    that still rests on many blocks.
    """
    spread_us: float
    """The same difference between blocks without it: below this nothing is resolved."""
    bare_us: float
    """The collective itself."""

    def __str__(self) -> str:
        """Return the figure, or that it is lost in the machine's noise."""
        if self.collective_us <= self.spread_us:
            return f"below {self.spread_us:.1f} µs a collective: not resolved on this machine"
        return f"{self.collective_us:.1f} µs a collective of {self.bare_us:.0f} µs"


def load_cost(library: Path) -> Cost | None:
    """Return what was measured when `library` was built; None where it was not built here."""
    try:
        return msgspec.json.decode(library.with_suffix(".json").read_bytes(), type=Cost)
    except (OSError, msgspec.MsgspecError):
        return None


def measure_cost(library: Path) -> Cost | str:
    """Measure `library`, a few seconds, and keep the figure; return why not where it fails."""
    environ = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    command = [sys.executable, "-P", "-m", "perdure.worker.native.build", str(library)]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its self-test took longer than {_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"its self-test ended with {done.returncode}"
    # gloo has said something on standard output before, until torch 2.11.
    cost = msgspec.json.decode(done.stdout.rstrip().rpartition("\n")[2], type=Cost)
    with contextlib.suppress(OSError):  # A wheel's directory may not be ours to write in.
        replace_file(library.with_suffix(".json"), msgspec.json.encode(cost))
    return cost


def _measure(library: str) -> Cost:
    """Measure in this process.

    Raises:
        RuntimeError: it records nothing, or something else than what was done.
    """
    import time

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from perdure.model.ring import parse_ring
    from perdure.worker.native.recorder import NativeLibrary
    from perdure.worker.ring import RingWriter

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    number = torch.ones(1)

    def time_block() -> float:
        begun = time.perf_counter()
        for _ in range(BLOCK):
            dist.all_reduce(number)
        return (time.perf_counter() - begun) / BLOCK * 1e6

    def time_bare() -> float:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return time_block()

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ring")
        RingWriter.create(path, rank=0, generation=0).close()
        native = NativeLibrary(Path(library))
        native.attach(path)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for _ in range(3):  # Warm.
            time_block()
            time_bare()
        rows = [(time_bare(), time_block(), time_bare()) for _ in range(BLOCKS)]
        found = parse_ring(Path(path).read_bytes(), 0.0).num_spans
        dist.destroy_process_group()
    expected = (BLOCKS + 3) * BLOCK
    if found != expected:
        raise RuntimeError(f"it recorded {found} of {expected} collectives")
    before, on, after = (statistics.quantiles(column, n=4)[0] for column in zip(*rows, strict=True))
    bare = (before + after) / 2
    return Cost(
        collective_us=round(on - bare, 2),
        spread_us=round(abs(before - after), 2),
        bare_us=round(bare, 1),
    )


MODES = ("auto", "compiled", "status", "off")

COSTS = {
    "compiled": "about 2 µs a collective",
    "status": "nothing a collective, 3 µs ten times a second",
    "off": "nothing",
}
"""Measured by `bench/bench_recorder.py`."""


class RecorderStatus(msgspec.Struct, frozen=True):
    """The answer for `perdure doctor`."""

    kind: str
    """`compiled`, `status`, or `off`."""
    reason: str
    cost: str
    library: str = ""
    """Path of the compiled recorder, where it is built."""
    better: str = ""
    """What would get a better one; empty where nothing would."""
    broken: bool = False
    """It is there and does not work."""


def read_mode() -> tuple[str, str]:
    """Return what `PERDURE_RECORDER` asks for, and what is wrong with it if anything."""
    mode = os.environ.get("PERDURE_RECORDER", "") or "auto"
    if mode in MODES:
        return mode, ""
    return "auto", f"PERDURE_RECORDER={mode} is none of {', '.join(MODES)}"


def status() -> RecorderStatus:
    """Return which recorder a rank would get that was started in this environment.

    Where the compiled one came without a figure of this machine (in a wheel), it is tried and
    measured now: a few seconds.
    """
    mode, wrong = read_mode()
    library = find_library()
    path = str(library) if library is not None else ""
    if mode in ("status", "off"):
        return RecorderStatus(mode, f"PERDURE_RECORDER={mode}", COSTS[mode], path)
    if library is None:
        return RecorderStatus("status", explain_missing(), COSTS["status"], better=_advise_build())
    cost = load_cost(library) or measure_cost(library)
    if isinstance(cost, str):
        reason = f"the compiled one is built but does not work: {cost}"
        return RecorderStatus("status", reason, COSTS["status"], path, broken=True)
    return RecorderStatus("compiled", wrong or "built for the installed torch", str(cost), path)


def _advise_build() -> str:
    """Return what would have the compiled recorder built here."""
    if find_torch() is None:
        return ""
    return build_command() if find_compiler() else f"install g++, then: {build_command()}"


# --- the NCCL profiler plugin ---------------------------------------------------------------------

PLUGIN_NAME = "libnccl-profiler-perdure.so"
"""In a wheel, where it lies in `prebuilt/` beside the recorder."""
_PLUGIN_SOURCES = ("plugin.c", "abi.h", "layout.h")
_PLUGIN_FLAGS = (
    *("-std=c11", "-O2", "-g", "-Wall", "-Wextra"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
)
PATH_MAX = 255
"""NCCL cuts off what is longer in NCCL_PROFILER_PLUGIN."""


def find_nccl_plugin() -> str:
    """Return the path of the library, or empty where it was not built (or NCCL could not load it).

    The path is absolute: with a bare name NCCL would search the library path.
    """
    found = map(str, list_built(PLUGIN_NAME, _cache_plugin()))
    return next((path for path in found if len(path) <= PATH_MAX), "")


def build_nccl_plugin(target: Path | None = None) -> str:
    """Build the library unless it is there, and return its path; `target` is for a wheel.

    Raises:
        PlatformError: there is no C compiler, or it failed.
    """
    if target is None and (found := find_nccl_plugin()):
        return found
    target = target or _cache_plugin()
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), "")
    if not compiler:
        raise PlatformError("no C compiler for the NCCL plugin", hint="install gcc")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        run_compiler([compiler, *_PLUGIN_FLAGS, str(HERE / "nccl" / "plugin.c")], target)
    except OSError as error:
        raise PlatformError(f"the NCCL plugin cannot be built: {error}") from error
    return str(target)


def plugin_command() -> list[str]:
    """Return the command of a process that builds the plugin, at the lowest priority.

    SIGTERM ends it and its compiler, and leaves no half-written file.
    """
    return [sys.executable, "-P", "-m", "perdure.worker.native.build"]


def _build_plugin_beside() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    os.nice(19)
    try:
        build_nccl_plugin()
    except PlatformError as error:
        sys.exit(f"{error.message} ({error.hint})")


def _cache_plugin() -> Path:
    made_of = [" ".join((platform.machine(), *_PLUGIN_FLAGS)).encode()]
    made_of += [(HERE / "nccl" / name).read_bytes() for name in _PLUGIN_SOURCES]
    digest = hashlib.sha256(b"".join(made_of)).hexdigest()
    return cache_dir() / f"libnccl-profiler-perdure-{digest[:16]}.so"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _build_plugin_beside()
        sys.exit()
    print(json.dumps(msgspec.to_builtins(_measure(sys.argv[1]))))
