"""What a checkpoint is on disk, whoever reads it: names, manifest, roster.

<url>/owner                       name of the job that writes here; no other job may
<url>/latest                      name of the newest verified checkpoint; written last
<url>/step-00000100/manifest.json roster with sizes and hashes, step, world, metrics
                   /.metadata     torch.distributed.checkpoint's own index
                   /__R_0.distcp  tensors, written by rank R
                   /rank-R.pt     what is rank R's own: RNG, schedulers, configuration
<url>/step-00000120.g3.tmp/       being written by generation 3, or left behind by its death
"""

import re

import msgspec

MANIFEST = "manifest.json"
LATEST = "latest"
OWNER = "owner"
TEMPORARY = ".tmp"
MANIFEST_VERSION = 1
_NAME = re.compile(r"^step-(\d{8,})$")


class FileEntry(msgspec.Struct, frozen=True):
    """One file of the roster."""

    path: str
    """Relative to the checkpoint's directory."""
    bytes: int
    xxh3_128: str
    """Against decay and truncation, not malice: it runs at memory speed, SHA-256 does not."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The roster of a checkpoint, and what it is of."""

    version: int = MANIFEST_VERSION
    step: int
    job: str = ""
    """Name of the job that saved it."""
    world_size: int
    files: tuple[FileEntry, ...]
    fingerprint: dict[str, str] = {}
    metrics: dict[str, float] = {}
    reason: str = ""


class Part(msgspec.Struct, frozen=True):
    """One rank's share of a checkpoint, reported by a file when all of it is on disk."""

    rank: int
    files: tuple[FileEntry, ...]
    error: str = ""


class VerifyResult(msgspec.Struct, frozen=True):
    """What `perdure verify` found."""

    path: str
    ok: bool
    step: int
    files: int
    bytes: int
    problems: tuple[str, ...]


def name_checkpoint(step: int) -> str:
    """Return the directory name of the checkpoint of `step`.

    >>> name_checkpoint(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def parse_checkpoint_name(name: str) -> int | None:
    """Return the step of a finished checkpoint's directory name; None for any other name."""
    match = _NAME.match(name)
    return int(match.group(1)) if match else None
