"""Where a node's ranks keep what torch compiles: one place a job, on a disk of the node's own.

What was compiled is found by what it was made of (code, shapes, torch, device), so that a node's
ranks, their later generations and the next run of the job may share it. Its files appear whole:
Inductor and Triton write them aside and rename them. Locks among them are why it lies in the job's
own folder only where that is no network file system; elsewhere it lies below /tmp, where torch
itself would keep it, but in a folder that nobody else can write: what is found there is executed.

A place that cannot be used is no reason to fail: torch then keeps to its own defaults. One is not
used whose path has a space or a quote: Inductor has the compiler's command line split. A cache that
has grown too large is emptied before a run begins, while no rank of the job lives.

So is one that another processor has filled, as where a disk was moved: Inductor has C++ compiled
for the machine it is on, and finds it by what does not name that machine.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from perdure.adapters.health import find_filesystem
from perdure.adapters.host import read_text
from perdure.adapters.storage import read_free_space
from perdure.files.private import make_private
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.model.platforms.box import NETWORK_KINDS

SWITCH = "PERDURE_COMPILE_CACHE"
"""`off`: none of the variables below is set."""

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}
"""Variable -> folder below the cache."""

_USERS = {
    "TRITON_CACHE_DIR": ("TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"),
    "CUDA_CACHE_PATH": ("CUDA_CACHE_DISABLE",),
}
"""Variable -> those by which a user has said as much: Inductor has its Triton below itself."""

FREE_MIN_BYTES, FILES_MIN = 2 << 30, 10_000
"""What a disk must have left; one that counts no files says -1."""
BYTES_MAX = 10 << 30
FILES_MAX = 200_000
_PLAIN = re.compile(r"[\w/.,:=+@%~-]+", re.ASCII)
_DROPPED = "dropped-"
_MADE_ON = "made-on"
"""A link that leads nowhere, and says for which processor: made at once, by one alone."""
_CPU = {"vendor_id", "cpu family", "model", "stepping", "flags"} | {
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features", "isa", "cpu"),
}
_LOOK_S, _DROP_S = 5.0, 2.0
"""What a start waits for at most: for a look at a cache, and for the removal of one."""


def choose_caches(spec: JobSpec, paths: JobPaths, env: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks are to find in their environment beside `env`, the agent's own.

    Nothing is set that the user has set, there or in the job's `env`, and nothing at all for a
    job that is only observed, or where no place is fit.
    """
    said = {**env, **spec.env}
    if not spec.unordered.keeps_compiled or said.get(SWITCH) == "off":
        return {}
    wanted = {
        name: folder
        for name, folder in FOLDERS.items()
        if not any(other in said for other in (name, *_USERS.get(name, ())))
    }
    for place in list_places(paths) if wanted else ():
        with contextlib.suppress(OSError, PlatformError):
            if place.parent != Path(paths.root):
                make_private(str(place.parent.parent))
                make_private(str(place.parent))
            if _make_fit(place, wanted.values()):
                return {name: str(place / folder) for name, folder in wanted.items()}
    return {}


def list_places(paths: JobPaths) -> list[Path]:
    """Return where the cache may lie, the best place first."""
    own, local = Path(paths.compile_cache), Path(paths.local_compile_cache)
    kind = find_filesystem(paths.root)
    shared = kind in NETWORK_KINDS or kind.startswith("fuse")
    return [
        place for place in ([local] if shared else [own, local]) if _PLAIN.fullmatch(str(place))
    ]


def limit_caches(paths: JobPaths) -> None:
    """Empty a cache that has grown too large; no rank of the job may live."""
    for place in (Path(paths.compile_cache), Path(paths.local_compile_cache)):
        with contextlib.suppress(OSError):
            if place.is_dir() and not place.is_symlink():
                _limit(place)


def name_cpu(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return a name that only processors have for which the same can be compiled."""
    rows = (row.partition(":") for row in read_text(cpuinfo).partition("\n\n")[0].splitlines())
    known = [f"{key.strip()}={value.strip()}" for key, _, value in rows if key.strip() in _CPU]
    return hashlib.sha256("\n".join([os.uname().machine, *known]).encode()).hexdigest()[:16]


def _make_fit(place: Path, folders: Iterable[str]) -> bool:
    """Make the folders; return whether there is room, and what is put there can be executed.

    Raises:
        OSError, PlatformError: they cannot be made or written.
    """
    free = read_free_space(str(place))
    if free.bytes < FREE_MIN_BYTES or free.inodes in range(FILES_MIN):
        return False
    make_private(str(place))
    with contextlib.suppress(FileExistsError):
        (place / _MADE_ON).symlink_to(name_cpu())
    if os.readlink(place / _MADE_ON) != name_cpu():
        return False  # A shared disk, of which the system does not say so.
    for folder in folders:
        (place / folder).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=place / folder) as file:
            file.write(b"perdure")
    return not os.statvfs(place).f_flag & os.ST_NOEXEC


def _limit(place: Path) -> None:
    """Remove what is below `place` where it is too much.

    A cache that a slow disk cannot count in time stays: free space still limits it.
    """
    total = files = 0
    give_up = time.monotonic() + _LOOK_S
    for folder, folders, names in os.walk(place):
        if folder == str(place):
            folders[:] = (one for one in folders if not one.startswith(_DROPPED))
        files += len(names)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
        if total > BYTES_MAX or files > FILES_MAX or time.monotonic() > give_up:
            break
    made_on = place / _MADE_ON
    foreign = made_on.is_symlink() and os.readlink(made_on) != name_cpu()
    if total > BYTES_MAX or files > FILES_MAX or foreign:
        for one in FOLDERS.values():
            if (place / one).exists():  # A folder to move them to would need room on a full disk.
                (place / one).rename(place / f"{_DROPPED}{one}-{time.time_ns()}")
        made_on.unlink(missing_ok=True)
    if dropped := sorted(place.glob(f"{_DROPPED}*")):  # Some an earlier start had no time for.
        _remove(dropped)


def _remove(folders: list[Path]) -> None:
    """Remove `folders`; what takes longer than a start may wait goes on beside it."""

    def remove() -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    thread.join(_DROP_S)
