"""Results brought home from a box, with an exact roster, and looked at before anything is deleted.

The roster (names, sizes, SHA-256) is made on the box and nowhere else; what is here is compared
with it, so that a file that never arrived, arrived cut off, or lies here from elsewhere is found.
"""

import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import msgspec

from perdure.launch.roster import Roster, check_names, check_roster, check_target
from perdure.launch.sources import Source, Sources
from perdure.launch.ssh import results
from perdure.launch.transfer import PARTIAL, find_final
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.launching import (
    PULL_MANIFEST,
    PULL_VERIFIED,
    LaunchRecord,
    PulledFile,
    PullManifest,
    PullVerified,
)

SKIPPED = (
    "nats", "credentials", "endpoint.json", "run.lock", "supervise.lock", "rings", "tmux", "*.whl",
    "__pycache__", PARTIAL, "report.html",
)  # fmt: skip
"""Not results: the bus's own store (its journal is mirrored beside it), secrets, locks, rings."""
_ROSTER_S = 3600.0
_LOADABLE = (".pt", ".pth", ".ckpt")
_CHUNK = 4 << 20


def find_roster(record: LaunchRecord, sources: Sources) -> PullManifest:
    """Return what is on the job's boxes now; labels of further ones begin with the box's name.

    Raises:
        PlatformError: one cannot be reached, or has links among the results.
        SafetyError: one names a file that would lie elsewhere.
    """
    owners = find_owners(record)
    roots: dict[str, str] = {}
    files: list[PulledFile] = []
    for box in record.boxes:
        mine = {label: box.roots[name] for label, (owner, name) in owners.items() if owner is box}
        told = _list_files(box, mine, sources[box.box])
        roots |= told.roots
        files += told.files
    return PullManifest(
        job=record.job,
        host=", ".join(sources[box.box].channel.name for box in record.boxes),
        roots=roots,
        pulled_s=time.time(),
        files=tuple(files),
    )


def find_owners(record: LaunchRecord) -> dict[str, tuple[LaunchRecord, str]]:
    """Return label -> the box that has it, and what the box itself calls it."""
    return {
        label if box.place == record.place else f"boxes/{box.box}/{label}": (box, label)
        for box in record.boxes
        for label in box.roots
    }


def _list_files(box: LaunchRecord, roots: dict[str, str], there: Source) -> Roster:
    skip = (*SKIPPED, *box.profile.overrides.SCRATCH)
    wanted = msgspec.json.encode({"roots": roots, "skip": skip}).decode()
    told: Roster = there.channel.query(
        f"{shlex.quote(there.python)} - manifest {shlex.quote(wanted)}",
        Roster,
        stdin=Path(results.__file__).read_bytes(),
        timeout_s=_ROSTER_S,
    )
    check_roster(told, roots, there.channel.name)
    if told.links:
        raise PlatformError(
            f"{told.links[0]} is a link: what it points to would not be pulled",
            hint="put the file itself there, or name its folder in launch.outputs",
        )
    return told


def pull_files(
    record: LaunchRecord,
    manifest: PullManifest,
    target: Path,
    sources: Sources,
    tell: Callable[[str], None],
) -> None:
    """Bring the files of `manifest` to `target`, folder by folder; what is here already stays.

    Raises:
        ConfigError: `target` holds something else.
        PlatformError: nothing more arrives.
        SafetyError: a file would be written through a link.
    """
    check_names((file.path for file in manifest.files), manifest.host)
    check_target(target, (file.path for file in manifest.files))
    _make_room(target, manifest, tell)
    owners = find_owners(record)
    for (label, folder), files in group_files(manifest).items():
        tell(f"{label}/{folder}: {len(files)} files")
        there = sources[owners[label][0].box]
        there.bring(manifest.roots[label], target / label, files, tell=tell)
    document = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
    temporary = target / f".{PULL_MANIFEST}"
    temporary.write_bytes(document)
    os.replace(temporary, target / PULL_MANIFEST)


def group_files(manifest: PullManifest) -> dict[tuple[str, str], list[PulledFile]]:
    """Return (label, first folder) -> files, named below the label's own folder."""
    labels = sorted(manifest.roots, key=len, reverse=True)
    groups: dict[tuple[str, str], list[PulledFile]] = {}
    for file in manifest.files:
        label = next(label for label in labels if file.path.startswith(f"{label}/"))
        name = file.path[len(label) + 1 :]
        folder = name.partition("/")[0] if "/" in name else ""
        groups.setdefault((label, folder), []).append(msgspec.structs.replace(file, path=name))
    return groups


def _make_room(target: Path, manifest: PullManifest, tell: Callable[[str], None]) -> None:
    """Refuse a directory of something else; set aside what an earlier pull has too many.

    That one may have broken off, and have left no manifest.
    """
    before = read_manifest(target)
    tops = {label.split("/")[0] for label in manifest.roots}
    others = sorted({path.name for path in target.glob("*")} - tops)
    if before is None and others:
        raise ConfigError(f"{target} holds something else: {others[0]}",
                          hint="name a new or an empty directory")  # fmt: skip
    if before is not None and before.job != manifest.job:
        raise ConfigError(f"{target} holds job `{before.job}`", hint="name another directory")
    (target / PULL_VERIFIED).unlink(missing_ok=True)
    (target / PULL_MANIFEST).unlink(missing_ok=True)
    wanted = {target / file.path for file in manifest.files}
    gone = [
        path
        for top in sorted(tops)
        for path in sorted((target / top).rglob("*"))
        if not path.is_dir() and not wanted & {path, find_final(path)}
    ]
    aside = target.with_name(f"{target.name}.superseded")
    for path in gone:
        kept = aside / path.relative_to(target)
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, kept)
    if gone:
        tell(f"{len(gone)} files of the earlier pull are not on the box any more: now in {aside}")


def read_manifest(target: Path) -> PullManifest | None:
    """Return the manifest of a pulled directory; None where there is none.

    Raises:
        PlatformError: there is one, and it is damaged.
        SafetyError: it names a file elsewhere.
    """
    try:
        manifest = msgspec.json.decode((target / PULL_MANIFEST).read_bytes(), type=PullManifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise PlatformError(f"{target / PULL_MANIFEST}: {error}", hint="pull again") from error
    check_names((file.path for file in manifest.files), str(target / PULL_MANIFEST))
    return manifest


def compare_files(target: Path, manifest: PullManifest, *, hashes: bool = True) -> list[str]:
    """Return what differs between `target` and its manifest; an empty roster is a difference."""
    problems = [] if manifest.files else ["the roster is empty: nothing was pulled"]
    expected = {file.path: file for file in manifest.files}
    for name, file in expected.items():
        path = target / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != file.bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {file.bytes}")
        elif hashes and _hash(path) != file.sha256:
            problems.append(f"{name} does not match its SHA-256")
    present = {
        str(PurePosixPath(path.relative_to(target)))
        for path in target.rglob("*")
        if path.is_file() or path.is_symlink()
    }
    own = {PULL_MANIFEST, PULL_VERIFIED}
    problems += [f"{name} is not in the roster" for name in sorted(present - set(expected) - own)]
    return problems


def find_loadable(target: Path, manifest: PullManifest) -> list[str]:
    """Return files with tensors, and folders of sharded checkpoints, that are to be loaded."""
    found = set()
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if path.name == ".metadata":
            found.add(str(target / path.parent))
        elif path.suffix in _LOADABLE or path.match("pytorch_model*.bin"):
            found.add(str(target / path))
    return sorted(found)


def load_files(paths: Iterable[str], *, allow_pickle: bool) -> tuple[int, list[str]]:
    """Return how many of `paths` were loaded with `weights_only`, and what could not be.

    `allow_pickle` lets what is no plain data run the code that it names.

    Raises:
        PlatformError: torch is not installed here: nothing can be said.
    """
    document = msgspec.json.encode({"paths": list(paths), "allow_pickle": allow_pickle})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "perdure.worker.checkpoint.loading"],
        input=document,
        capture_output=True,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["?"]
        raise PlatformError(
            f"checkpoints cannot be loaded here: {lines[-1]}", hint="pip install 'perdure[torch]'"
        )
    told = msgspec.json.decode(done.stdout.splitlines()[-1])
    return told["loaded"], told["problems"]


def write_verified(
    target: Path, manifest: PullManifest, loaded: int, verified_s: float
) -> PullVerified:
    """Write down that the directory was found whole and loads."""
    verified = PullVerified(
        job=manifest.job,
        manifest_sha256=_hash(target / PULL_MANIFEST),
        verified_s=verified_s,
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        loaded=loaded,
    )
    temporary = target / f".{PULL_VERIFIED}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(verified)) + b"\n")
    os.replace(temporary, target / PULL_VERIFIED)
    return verified


def read_verified(target: Path) -> PullVerified | None:
    """Return the proof of the directory's own manifest; None where there is none, or an older."""
    try:
        verified = msgspec.json.decode((target / PULL_VERIFIED).read_bytes(), type=PullVerified)
        current = _hash(target / PULL_MANIFEST)
    except (OSError, msgspec.DecodeError):
        return None
    return verified if verified.manifest_sha256 == current else None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
