"""Which modules the next generation's image may import beforehand.

The first rank of each node notes what it imported, and notes it again whenever that is more:
trainers and optimizers import at their first step, and at the first validation. Only what is
installed counts: a module of the user's own is read again at each start, since it may have changed
in between. Known starters of threads and callers of CUDA stay out; the image finds the unknown
ones by itself.
"""

import atexit
import contextlib
import functools
import json
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path

import perdure
from perdure.files import replace_file
from perdure.worker.system.forking import free_in_child

DENIED = frozenset({
    "apex", "bitsandbytes", "comet_ml", "cupy", "cupy_backends", "deepspeed", "flash_attn", "grpc",
    "horovod", "jax", "jaxlib", "mlflow", "mpi4py", "neptune", "nvidia", "opentelemetry",
    "pyarrow", "pynvml", "ray", "tensorboard", "tensorboardX", "tensorflow", "transformer_engine",
    "vllm", "wandb", "xformers", "__main__", "__mp_main__", "sitecustomize", "usercustomize",
    "antigravity", "torchft", "this", "idlelib", "lib2to3", "pytest", "_pytest",
})  # fmt: skip
"""Top-level names that start threads, ask a device, or belong to one process only."""

_LOOK_S = (1.0, 10.0)
"""Seconds between two looks while modules are imported, and once none have been for long."""
_SLOWER = 1.3
"""How much longer each time is than the one before where nothing was imported."""


@functools.cache
def list_installed_folders() -> tuple[str, ...]:
    """Return the directories of the standard library, of site-packages, and of perdure."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = {sysconfig.get_paths()[name] for name in names}
    places.update(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        places.add(site.getusersitepackages())
    places.add(os.path.dirname(os.path.dirname(perdure.__file__)))
    return tuple(sorted(os.path.realpath(place) + os.sep for place in places))


def list_preloadable(installed: Iterable[str], script_dir: str) -> list[str]:
    """Return names of the modules imported so far that an image may preload, in their order."""
    installed = tuple(installed)
    own = os.path.realpath(script_dir) + os.sep
    if any(place.startswith(own) for place in installed):
        own = os.devnull  # A virtual environment below the script tells nothing apart.
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if getattr(spec, "name", None) != name or not isinstance(origin, str):
            continue
        place = os.path.join(_resolve(os.path.dirname(origin)), "")
        if name.partition(".")[0] in DENIED or not place.startswith(installed):
            continue
        if not place.startswith(own):
            names.append(name)
    return names


@functools.cache
def _resolve(folder: str) -> str:
    """Return the real path of a folder: modules have few, and looks are many."""
    return os.path.realpath(folder)


def record_imports(path: str, script_dir: str) -> None:
    """Write them to `path` within a second, whenever there are more of them, and at exit.

    A child process records nothing.
    """
    pid = os.getpid()
    installed = list_installed_folders()
    lock = free_in_child(threading.Lock())
    looked = written = 0

    def write() -> bool:
        """Return whether something was imported since the last look."""
        nonlocal looked, written
        with lock:
            before, looked = looked, len(sys.modules)
            if os.getpid() != pid or looked == before:
                return False
            names = list_preloadable(installed, script_dir)
            if len(names) != written:
                write_imports(path, names)
                written = len(names)
            return True

    def run() -> None:
        delay_s = _LOOK_S[0]
        while not over.wait(delay_s):
            delay_s = _LOOK_S[0] if write() else min(_SLOWER * delay_s, _LOOK_S[1])

    over = free_in_child(threading.Event())
    threading.Thread(target=run, name="perdure-imports", daemon=True).start()
    atexit.register(write)
    atexit.register(over.set)


def write_imports(path: str, names: list[str]) -> None:
    """Put `names` at `path`, whole or not at all; without them the next start is slower."""
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(names).encode())


def read_imports(path: str) -> tuple[str, ...]:
    """Return the names at `path`; none where there is no such list."""
    try:
        names = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return ()
    if not isinstance(names, list):
        return ()
    return tuple(n for n in names if isinstance(n, str) and n.partition(".")[0] not in DENIED)
