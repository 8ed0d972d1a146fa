"""Checkpoints read back without torch: roster, sizes, hashes; at a path or any fsspec URL."""

from typing import Any

import fsspec
import xxhash

from perdure.model.checkpoints import (
    MANIFEST,
    Manifest,
    VerifyResult,
    parse_checkpoint_name,
)
from perdure.model.codec import decode
from perdure.model.errors import PlatformError, ProtocolError

_CHUNK = 4 << 20


def verify_all(url: str) -> list[VerifyResult]:
    """Return a result for the checkpoint at `url`, or for each one in it, oldest first.

    Raises:
        PlatformError: the place cannot be reached.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url.rstrip("/") or "/")
        if parse_checkpoint_name(path.rsplit("/", 1)[-1]) is not None or fs.exists(
            f"{path}/{MANIFEST}"
        ):
            return [verify_checkpoint(fs, path)]
        names = sorted(row.rstrip("/") for row in fs.ls(path, detail=False))
    except (OSError, ValueError, ImportError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlatformError(f"cannot read {url}: {why}", hint="is the path right?") from error
    found = [name for name in names if parse_checkpoint_name(name.rsplit("/", 1)[-1]) is not None]
    return [verify_checkpoint(fs, name) for name in found]


def verify_checkpoint(fs: Any, path: str) -> VerifyResult:
    """Return what is wrong with one checkpoint: missing, unexpected, cut short, altered."""
    step = parse_checkpoint_name(path.rsplit("/", 1)[-1])
    try:
        manifest: Manifest = decode(fs.cat_file(f"{path}/{MANIFEST}"), Manifest)
    except (OSError, ProtocolError) as error:
        why = "no manifest" if isinstance(error, OSError) else str(error)
        return VerifyResult(path, False, -1 if step is None else step, 0, 0, (why,))
    present = {row.rstrip("/").rsplit("/", 1)[-1] for row in fs.ls(path, detail=False)}
    expected = {entry.path for entry in manifest.files} | {MANIFEST}
    problems = [
        *(() if manifest.files else ("the roster is empty",)),
        *(f"{name} is missing" for name in sorted(expected - present)),
        *(f"{name} is not in the roster" for name in sorted(present - expected)),
    ]
    total = 0
    for entry in manifest.files:
        if entry.path not in present:
            continue
        try:
            size, digest = _hash(fs, f"{path}/{entry.path}")
        except OSError as error:  # A checkpoint of a job that runs may go meanwhile.
            problems.append(f"{entry.path} cannot be read: {error.strerror or error}")
            continue
        total += size
        if size != entry.bytes:
            problems.append(f"{entry.path} has {size} bytes instead of {entry.bytes}")
        elif digest != entry.xxh3_128:
            problems.append(f"{entry.path} does not match its hash")
    if step is not None and step != manifest.step:
        problems.append(f"the manifest is of step {manifest.step}")
    return VerifyResult(
        path, not problems, manifest.step, len(manifest.files), total, tuple(problems)
    )


def _hash(fs: Any, path: str) -> tuple[int, str]:
    digest, size = xxhash.xxh3_128(), 0
    with fs.open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
