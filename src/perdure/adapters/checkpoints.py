"""Checkpoints read back without torch: roster, sizes, hashes; at a path or any fsspec URL."""

from collections.abc import Callable
from typing import Any, BinaryIO

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem

from perdure.files.regular import DOCUMENT_BYTES_MAX, open_file
from perdure.model.checkpoints import (
    MANIFEST,
    Manifest,
    VerifyResult,
    parse_checkpoint_name,
)
from perdure.model.codec import decode
from perdure.model.errors import PlatformError, ProtocolError

_CHUNK = 4 << 20


def verify_all(
    url: str, tell: Callable[[int, int, float], None] | None = None
) -> list[VerifyResult]:
    """Return a result for the checkpoint at `url`, or for each one in it, oldest first.

    `tell` hears how many are read, of how many, and what share of the one at hand.

    Raises:
        PlatformError: the place cannot be reached.
    """
    try:
        fs, path = fsspec.core.url_to_fs(url.rstrip("/") or "/")
        if parse_checkpoint_name(path.rsplit("/", 1)[-1]) is not None or fs.exists(
            f"{path}/{MANIFEST}"
        ):
            return [verify_checkpoint(fs, path, _tell_of(tell, 0, 1))]
        names = sorted(row.rstrip("/") for row in fs.ls(path, detail=False))
    except (OSError, ValueError, ImportError) as error:
        why = getattr(error, "strerror", None) or error
        raise PlatformError(f"cannot read {url}: {why}", hint="is the path right?") from error
    found = [name for name in names if parse_checkpoint_name(name.rsplit("/", 1)[-1]) is not None]
    return [
        verify_checkpoint(fs, name, _tell_of(tell, number, len(found)))
        for number, name in enumerate(found)
    ]


def _tell_of(
    tell: Callable[[int, int, float], None] | None, number: int, of: int
) -> Callable[[float], None]:
    return lambda share: tell(number, of, share) if tell is not None else None


def verify_checkpoint(
    fs: Any, path: str, tell: Callable[[float], None] = lambda share: None
) -> VerifyResult:
    """Return what is wrong with one checkpoint: missing, unexpected, cut short, altered.

    `tell` hears which share of it was read.
    """
    step = parse_checkpoint_name(path.rsplit("/", 1)[-1])
    try:
        with _open(fs, f"{path}/{MANIFEST}") as file:
            manifest: Manifest = decode(file.read(DOCUMENT_BYTES_MAX), Manifest)
    except (OSError, ProtocolError) as error:
        why = "no manifest" if isinstance(error, FileNotFoundError) else str(error)
        return VerifyResult(path, False, -1 if step is None else step, 0, 0, (why,))
    present = {row.rstrip("/").rsplit("/", 1)[-1] for row in fs.ls(path, detail=False)}
    expected = {entry.path for entry in manifest.files} | {MANIFEST}
    problems = [
        *(() if manifest.files else ("the roster is empty",)),
        *(f"{name} is missing" for name in sorted(expected - present)),
        *(f"{name} is not in the roster" for name in sorted(present - expected)),
    ]
    total, whole = 0, sum(entry.bytes for entry in manifest.files) or 1
    for entry in manifest.files:
        tell(total / whole)
        if entry.path not in present:
            continue
        try:
            size, digest = _hash(fs, f"{path}/{entry.path}", entry.bytes)
        except OSError as error:  # A checkpoint of a job that runs may go meanwhile.
            problems.append(f"{entry.path} cannot be read: {error.strerror or error}")
            continue
        total += size
        if size != entry.bytes:
            has = f"{size} bytes" if size < entry.bytes else "more bytes"
            problems.append(f"{entry.path} has {has} instead of {entry.bytes}")
        elif digest != entry.xxh3_128:
            problems.append(f"{entry.path} does not match its hash")
    if step is not None and step != manifest.step:
        problems.append(f"the manifest is of step {manifest.step}")
    return VerifyResult(
        path, not problems, manifest.step, len(manifest.files), total, tuple(problems)
    )


def _open(fs: Any, path: str) -> BinaryIO:
    """Open a file for reading; on this machine it has to be a regular one, or lead to one."""
    if isinstance(fs, LocalFileSystem):
        return open_file(path, follow=True)
    opened: BinaryIO = fs.open(path, "rb")
    return opened


def _hash(fs: Any, path: str, bytes_max: int) -> tuple[int, str]:
    """Return size and hash of a file; of a larger one, little more than `bytes_max` is read."""
    digest, size = xxhash.xxh3_128(), 0
    with _open(fs, path) as file:
        while size <= bytes_max and (chunk := file.read(_CHUNK)):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
