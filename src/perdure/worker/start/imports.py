"""Which modules the next generation's image may import beforehand.

Each rank 0 of a node notes what it imported. Only what is installed counts: a module of the
user's own is read again at each start, since it may have changed in between. Known starters of
threads and callers of CUDA stay out; the image finds the unknown ones by itself.
"""

import atexit
import contextlib
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

DENIED = frozenset({
    "apex", "bitsandbytes", "comet_ml", "cupy", "cupy_backends", "deepspeed", "flash_attn", "grpc",
    "horovod", "jax", "jaxlib", "mlflow", "mpi4py", "neptune", "nvidia", "opentelemetry",
    "pyarrow", "pynvml", "ray", "tensorboard", "tensorboardX", "tensorflow", "transformer_engine",
    "vllm", "wandb", "xformers", "__main__", "__mp_main__", "sitecustomize", "usercustomize",
    "antigravity", "torchft", "this", "idlelib", "lib2to3", "pytest", "_pytest",
})  # fmt: skip
"""Top-level names that start threads, ask a device, or belong to one process only."""

_WHEN_S = (3.0, 12.0)
"""Seconds after start, each since the one before: optimizers import more at their first use."""


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
        place = os.path.realpath(origin)
        if name.partition(".")[0] in DENIED or not place.startswith(installed):
            continue
        if not place.startswith(own):
            names.append(name)
    return names


def record_imports(path: str, script_dir: str) -> None:
    """Write them to `path` a few seconds from now, again later, and at exit.

    The thread is over when the last is done, and a child process records nothing.
    """
    pid = os.getpid()
    installed = list_installed_folders()
    lock = threading.Lock()
    written = 0

    def write() -> None:
        nonlocal written
        with lock:
            names = list_preloadable(installed, script_dir)
            if os.getpid() == pid and len(names) != written:
                write_imports(path, names)
                written = len(names)

    def run() -> None:
        for delay_s in _WHEN_S:
            if over.wait(delay_s):
                return
            write()

    over = threading.Event()
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
