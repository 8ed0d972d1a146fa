"""Where checkpoints land: how much room there is, and which ones lie there."""

import contextlib
import math
import os
from pathlib import Path

from perdure.files.regular import read_file
from perdure.model.checkpoints import MANIFEST, Manifest, parse_checkpoint_name
from perdure.model.codec import decode
from perdure.model.errors import ProtocolError
from perdure.plan.checkpoints import FreeSpace, Load, Stored


def read_free_space(place: str) -> FreeSpace:
    """Return what is free at `place`, or at its nearest parent that exists.

    Raises:
        OSError: it cannot be asked.
    """
    path = os.path.abspath(place)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    stat = os.statvfs(path)
    return FreeSpace(
        bytes=stat.f_bavail * stat.f_frsize, inodes=stat.f_favail if stat.f_files else -1
    )


def list_stored(root: Path, keep_best: str = "") -> list[Stored]:
    """Return the finished checkpoints under `root`, oldest first; sizes only, nothing is hashed."""
    found: list[tuple[Stored, float | None]] = []
    names = sorted(root.iterdir()) if root.is_dir() else []
    for path in names:
        step = parse_checkpoint_name(path.name)
        if step is None or not path.is_dir():
            continue
        sizes = {p.name: p.stat().st_size for p in path.iterdir() if p.is_file()}
        manifest: Manifest | None = None
        with contextlib.suppress(OSError, ProtocolError):
            manifest = decode(read_file(path / MANIFEST, follow=True), Manifest)
        whole = (
            manifest is not None
            and bool(manifest.files)
            and all(sizes.get(entry.path) == entry.bytes for entry in manifest.files)
        )
        metric = manifest.metrics.get(keep_best) if manifest is not None else None
        one = Stored(step=step, bytes=sum(sizes.values()), files=len(sizes) + 1, whole=whole)
        found.append((one, metric if whole else None))
    metrics = [(m, -one.step) for one, m in found if m is not None and math.isfinite(m)]
    best = -min(metrics)[1] if metrics and keep_best else -1
    return [
        Stored(step=one.step, bytes=one.bytes, files=one.files, whole=one.whole, best=True)
        if one.step == best
        else one
        for one, _ in found
    ]


def estimate_load(stored: list[Stored]) -> Load | None:
    """Return how large the next checkpoint will be, by the newest whole one; None without one."""
    whole = [one for one in stored if one.whole]
    return Load(bytes=whole[-1].bytes, files=whole[-1].files) if whole else None
