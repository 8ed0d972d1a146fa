"""Where a node's ranks keep what torch compiles: one place a job, on a disk of the node's own.

What was compiled is found by what it was made of (code, shapes, torch, device), so that a node's
ranks, their later generations and the next run of the job may share it. Its files appear whole:
Inductor and Triton write them aside and rename them. Locks among them are why it lies in the job's
own folder only where that is no network file system; elsewhere it lies below /tmp, where torch
itself would keep it, but in a folder that nobody else can write: what is found there is executed.

A place that cannot be used is no reason to fail: torch then keeps to its own defaults. A cache that
has grown too large is emptied before a run begins, while no rank of the job lives.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from perdure.adapters.health import find_filesystem
from perdure.adapters.storage import read_free_space
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
_DROPPED = "dropped"
_DROP_S = 10.0


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
        with contextlib.suppress(OSError):
            if _make_fit(place, wanted.values()):
                return {name: str(place / folder) for name, folder in wanted.items()}
    return {}


def list_places(paths: JobPaths) -> list[Path]:
    """Return where the cache may lie, the best place first."""
    own, local = Path(paths.compile_cache), Path(paths.local_compile_cache)
    kind = find_filesystem(paths.root)
    return [local] if kind in NETWORK_KINDS or kind.startswith("fuse") else [own, local]


def limit_caches(paths: JobPaths) -> None:
    """Empty a cache that has grown too large; no rank of the job may live."""
    for place in (Path(paths.compile_cache), Path(paths.local_compile_cache)):
        with contextlib.suppress(OSError):
            if place.is_dir():
                _limit(place)


def _make_fit(place: Path, folders: Iterable[str]) -> bool:
    """Make the folders; return whether there is room, and what is put there can be executed.

    Raises:
        OSError: they cannot be made or written.
    """
    free = read_free_space(str(place))
    if free.bytes < FREE_MIN_BYTES or free.inodes in range(FILES_MIN):
        return False
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        return False
    place.chmod(0o700)
    for folder in folders:
        (place / folder).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=place / folder) as file:
            file.write(b"perdure")
    return not os.statvfs(place).f_flag & os.ST_NOEXEC


def _limit(place: Path) -> None:
    """Remove what is below `place` where it is too much; a start waits for it a bounded time."""
    total = files = 0
    for folder, folders, names in os.walk(place):
        if _DROPPED in folders and folder == str(place):
            folders.remove(_DROPPED)
        files += len(names)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
        if total > BYTES_MAX or files > FILES_MAX:
            break
    if total > BYTES_MAX or files > FILES_MAX:
        dropped = place / _DROPPED / str(time.monotonic_ns())
        dropped.mkdir(parents=True)
        for one in FOLDERS.values():
            if (place / one).exists():
                (place / one).rename(dropped / one)
    if (place / _DROPPED).exists():  # It may be what an earlier start had no time for.
        _remove(place / _DROPPED)


def _remove(folder: Path) -> None:
    """Remove `folder`; what takes longer than a start may wait goes on beside it."""
    thread = threading.Thread(target=shutil.rmtree, args=(folder, True), daemon=True)
    thread.start()
    thread.join(_DROP_S)
