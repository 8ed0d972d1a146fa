"""Files of a checkpoint: written whole or not at all, hashed, listed, thrown away by rule.

Nothing here knows what a tensor is.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import xxhash

from perdure.files import replace_file, sync_path
from perdure.model.checkpoints import (
    LATEST,
    MANIFEST,
    TEMPORARY,
    FileEntry,
    Manifest,
    name_checkpoint,
    parse_checkpoint_name,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.job import CheckpointConfig
from perdure.model.relative import explain_unsafe

_CHUNK = 4 << 20


def hash_file(path: Path, give_way: Callable[[], object] = bool) -> str:
    """Return the xxh3-128 of a file's bytes, read from the file; `give_way` between chunks."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            give_way()
    return digest.hexdigest()


def describe_file(folder: Path, name: str, give_way: Callable[[], object] = bool) -> FileEntry:
    """Return the roster's entry of one file."""
    path = folder / name
    return FileEntry(name, path.stat().st_size, hash_file(path, give_way))


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        ProtocolError: it is not there, or no manifest.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ProtocolError(f"no manifest: {error.strerror}") from error
    manifest: Manifest = decode(data, Manifest)
    return manifest


def drop_cached(path: Path) -> None:
    """Forget what the kernel caches of a synced file, so that it is read from the disk next."""
    with open(path, "rb") as file, contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_problem(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> str:
    """Return the first thing that is wrong with a checkpoint's files; empty where all is well.

    Of several ranks each may read its own share of the files.
    """
    if not manifest.files:
        return "the roster is empty"
    for entry in manifest.files[share::shares]:
        why = explain_unsafe(entry.path)
        if why:
            return f"the roster names {entry.path!r:.80}, which {why}"
        path = folder / entry.path
        try:
            size = path.stat().st_size
        except OSError:
            return f"{entry.path} is missing"
        if size != entry.bytes:
            return f"{entry.path} has {size} bytes instead of {entry.bytes}"
        try:
            if hash_file(path) != entry.xxh3_128:
                return f"{entry.path} does not match its hash"
        except OSError as error:
            return f"{entry.path} cannot be read: {error.strerror}"
    return ""


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of the finished checkpoints, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            step = parse_checkpoint_name(path.name)
            if step is not None and path.is_dir():
                found.append((step, path))
    return sorted(found, reverse=True)


def publish(temporary: Path, root: Path, step: int, manifest: Manifest) -> Path:
    """Give a complete temporary directory its final name; return that path.

    A directory of the same step is from a generation that was rolled back to before it: it holds
    the same state, or is damaged; the new one takes its place.
    """
    replace_file(temporary / MANIFEST, encode(manifest), synced=True)
    sync_path(temporary)
    final = root / name_checkpoint(step)
    if final.exists():
        old = root / f"{final.name}.old{TEMPORARY}"
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(temporary, final)
    sync_path(root)
    return final


def tag_latest(root: Path, final: Path) -> None:
    """Name the newest verified checkpoint; the last thing that is written."""
    replace_file(root / LATEST, final.name.encode(), synced=True)
    sync_path(root)


def remove_temporaries(root: Path, before: int | None = None) -> None:
    """Remove what was left half written; with `before`, only by steps below it.

    A rank that is ahead may already be writing the next checkpoint: that one must stay.
    """
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            step = parse_checkpoint_name(path.name.split(".", 1)[0])
            if before is not None and (step is None or step >= before):
                continue
            if path.name.endswith(TEMPORARY) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)


def find_kept(
    steps: Iterable[int],
    config: CheckpointConfig,
    newest: int,
    find_metric: Callable[[int], float | None],
) -> set[int]:
    """Return the steps whose checkpoints are kept: last k, every n-th, best by metric.

    Those after `newest`, which was just saved, could not be used at the last restart: they
    neither count nor go, until training has passed them. Of equally good ones the newest is best;
    one whose metric is not finite never is.
    """
    past = sorted((step for step in steps if step <= newest), reverse=True)
    kept = set(past[: config.keep_last]) | {step for step in steps if step > newest}
    if config.keep_every_steps:
        kept |= {step for step in past if step % config.keep_every_steps == 0}
    if config.keep_best:
        values = [(find_metric(step), -step) for step in past]
        metrics = [(v, s) for v, s in values if v is not None and math.isfinite(v)]
        kept |= {-min(metrics)[1]} if metrics else set()
    return kept


def remove_surplus(
    steps: Collection[int],
    config: CheckpointConfig,
    newest: int,
    *,
    read: Callable[[int], Manifest],
    remove: Callable[[int], object],
) -> None:
    """Call `remove` with each step whose checkpoint no rule keeps; `read` returns a manifest."""

    def find_metric(step: int) -> float | None:
        with contextlib.suppress(OSError, ProtocolError):
            return read(step).metrics.get(config.keep_best)
        return None

    for step in set(steps) - find_kept(steps, config, newest, find_metric):
        remove(step)


def apply_retention(root: Path, config: CheckpointConfig, newest: int) -> None:
    """Remove finished checkpoints that no rule keeps."""
    found = dict(list_checkpoints(root))
    remove_surplus(
        found,
        config,
        newest,
        read=lambda step: read_manifest(found[step]),
        remove=lambda step: shutil.rmtree(found[step], ignore_errors=True),
    )
