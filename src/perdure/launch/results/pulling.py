"""Results brought home from a box, with an exact roster, and looked at before anything is deleted.

The roster (names, sizes, SHA-256) is made on the box and nowhere else; what is here is compared
with it, so that a file that never arrived, arrived cut off, or lies here from elsewhere is found.
"""

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec

from perdure.failpoints import failpoint
from perdure.files import replace_file
from perdure.files.own import is_set_aside
from perdure.files.tensorfiles import (
    INDICES,
    check_config,
    is_pickle,
    list_missing_files,
    read_safetensors,
)
from perdure.launch.channel import Channel
from perdure.launch.exchange import last_line, name_first
from perdure.launch.platforms import Here
from perdure.launch.roster import (
    Roster,
    check_names,
    check_roster,
    check_target,
    has_size,
    hash_file,
    is_whole,
)
from perdure.launch.transfer import PARTIAL, locate_final
from perdure.launch.wheel import read_program
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.launching import (
    PULL_MANIFEST,
    PULL_VERIFIED,
    LaunchRecord,
    PulledFile,
    PullManifest,
    PullVerified,
)

Sources = Mapping[str, Channel]
"""Name of a box -> where its results are read."""


@contextmanager
def open_sources(record: LaunchRecord, here: Here) -> Iterator[Sources]:
    """Yield where the results of a job are, for as long as they are read.

    Raises:
        PlatformError: a pod for it cannot be made.
    """
    if record.profile.kind != "kubernetes":
        yield {box.box: Channel(box.profile.launch) for box in record.boxes}
        return
    from perdure.launch.kubernetes.client import open_pod

    with open_pod(record, here) as pod:
        yield {record.box: pod}


SKIPPED = (
    "nats", "credentials", "endpoint.json", "run.lock", "supervise.lock", "rings", "tmux", "*.whl",
    "__pycache__", PARTIAL, "report.html", "compile-cache",
)  # fmt: skip
"""Not results: the bus's own store (its journal is mirrored beside it), secrets, locks, rings, and
what torch has compiled.
Of perdure's own folders only: in a user's a folder may well be called so."""
EXCLUDED = (
    "__pycache__", "*.pyc", ".cache", ".hf", ".mypy_cache", ".ruff_cache", ".pytest_cache",
    ".ipynb_checkpoints", "node_modules", "lost+found", ".ssh", ".gnupg", ".perdure-*", PARTIAL,
)  # fmt: skip
"""What is not brought home from where nobody named it: caches, and secrets. Environments of
Python's are left out as well."""
PROJECT = "project"
"""Label, and name on a box, of the folder that was sent."""
ELSEWHERE = "elsewhere"
"""Label of what a job has written where its platform keeps nothing; named from the root."""
_GROUPS_MAX = 20
"""Folders of a label that are transferred one by one."""
_AGE_MARGIN_S = 3600.0
"""What is older than the launch by more is not the job's."""
_ROSTER_S = 3600.0
_ROSTER_BYTES = 1 << 30
"""Of some millions of files."""
_LOADABLE = (".pt", ".pth", ".ckpt")
_UNKNOWN = (
    ".bin", ".npy", ".npz", ".h5", ".hdf5", ".onnx", ".gguf", ".msgpack", ".pkl", ".pickle",
    ".joblib", ".tar", ".zip",
)  # fmt: skip
"""May hold weights, and is compared by its hash only."""


_NOTHING = PullManifest(job="", host="", roots={}, pulled_s=0.0, files=())


def build_roster(
    record: LaunchRecord,
    sources: Sources,
    *,
    leave: Sequence[str] = (),
    hashes: bool = True,
) -> PullManifest:
    """Return what is on the job's boxes now; labels of further ones begin with the box's name.

    Beside the results these are all files in the project and in the data folders. Without
    `hashes` only names, sizes and stamps are told.

    Raises:
        PlatformError: one cannot be reached, or has links among the results.
        SafetyError: one names a file that would lie elsewhere.
    """
    owners = map_owners(record)
    told = msgspec.structs.replace(
        _NOTHING,
        job=record.job,
        pulled_s=time.time(),
        leave=tuple(leave),
        host=", ".join(sources[box.box].name for box in record.boxes),
    )
    for box in record.boxes:
        mine = {label: name for label, (owner, name) in owners.items() if owner is box}
        roots = {label: box.roots[name] for label, name in mine.items() if name in box.roots}
        folders = list_areas(box)
        areas = {label: folders[name] for label, name in mine.items() if label not in roots}
        prefix = "" if box.place == record.place else f"boxes/{box.box}/"
        told = _add(told, _list_files(box, roots, areas, sources[box.box], leave, hashes), prefix)
    return told


def _add(told: PullManifest, box: Roster, prefix: str) -> PullManifest:
    """Return a roster with that of one more box."""
    return msgspec.structs.replace(
        told,
        roots=told.roots | box.roots,
        files=(*told.files, *box.files),
        left=(*told.left, *box.left),
        excluded=(*told.excluded, *(f"{prefix}{path}" for path in box.excluded)),
        unread=(*told.unread, *(f"{prefix}{why}" for why in box.unread)),
        others=(*told.others, *(os.path.basename(path) for path in box.others)),
    )


def drop_sent(told: PullManifest, project: str, *, hashes: bool = True) -> PullManifest:
    """Return a roster without the project's files that are here, in the project, as they are there.

    Without `hashes` the same size counts, which is enough to foretell how much there will be.
    """
    if not project:
        return told

    def is_here(file: PulledFile) -> bool:
        path_there = file.path.split("/", 2)[2] if file.path.startswith("boxes/") else file.path
        label, _, name = path_there.partition("/")
        return label == PROJECT and (is_whole if hashes else has_size)(Path(project, name), file)

    files = tuple(file for file in told.files if not is_here(file))
    return msgspec.structs.replace(told, files=files, sent=len(told.files) - len(files))


def list_areas(box: LaunchRecord) -> dict[str, str]:
    """Return where a job may have left files that nobody named: label -> folder on its box.

    They are the project as it was sent, and the folders of the platform for code, data and state.
    Of a machine that goes as a whole it is also whatever the job wrote in its user's home or where
    its arguments and variables point to.
    What outlives a job's end by itself, such as a cluster's home, is looked at in the job's own
    folder only.
    """
    profile, place = box.profile, PurePosixPath(box.place)
    match profile.kind:
        case "ssh":
            home = PurePosixPath(box.home)
            durable = home.parent if home.name == "state" else home.parent.parent
            areas = {PROJECT: place / PROJECT, "data": place.parent, "durable": durable}
            if not profile.ends_by_itself:
                areas[ELSEWHERE] = PurePosixPath("/")
        case "slurm" if profile.launch.host:
            areas = {PROJECT: place / PROJECT, "folder": place}
        case "kubernetes":
            areas = {PROJECT: place / PROJECT, "folder": place}
            if not profile.kubernetes.claim:  # Else others' folders are on the volume as well.
                areas["durable"] = PurePosixPath(profile.overrides.DURABLE_DIR)
        case "notebook":
            areas = {"output": PurePosixPath(box.home)}
        case _:
            areas = {}
    found: dict[str, str] = {}
    for label, folder in areas.items():
        if label == ELSEWHERE or str(folder) not in (*found.values(), "/"):
            found[label] = str(folder)
    return found


def map_owners(record: LaunchRecord) -> dict[str, tuple[LaunchRecord, str]]:
    """Return label -> the box that has it, and what the box itself calls it."""
    return {
        label if box.place == record.place else f"boxes/{box.box}/{label}": (box, label)
        for box in record.boxes
        for label in {**list_areas(box), **box.roots}
    }


def _list_files(
    box: LaunchRecord,
    roots: dict[str, str],
    areas: dict[str, str],
    there: Channel,
    leave: Sequence[str],
    hashes: bool,
) -> Roster:
    overrides = box.profile.overrides
    scratch = overrides.SCRATCH
    skip = {
        label: (*EXCLUDED, *scratch) if "outputs/" in label else (*SKIPPED, *scratch)
        for label in roots
    }
    hidden = [box.home] if areas else []
    if overrides.HF_HOME and "$DATA_DIR" not in overrides.HF_HOME:
        hidden.append(overrides.HF_HOME)
    elsewhere = next((label for label in areas if label.split("/")[-1] == ELSEWHERE), "")
    since_s = box.billed_since_s or box.launched_s
    wanted = msgspec.json.encode(
        {
            "roots": roots,
            "skip": skip,
            "areas": {label: folder for label, folder in areas.items() if label != elsewhere},
            "elsewhere": elsewhere,
            "age_s": time.time() - since_s + _AGE_MARGIN_S,
            "exclude": (*EXCLUDED, *scratch),
            "hide": hidden,
            "home": box.home if areas else "",
            "leave": leave,
            "hash": hashes,
        }
    ).decode()
    told = there.query(
        f"{shlex.quote(there.python)} - manifest {shlex.quote(wanted)}",
        Roster,
        stdin=read_program("results.py").encode(),
        timeout_s=_ROSTER_S,
        bytes_max=_ROSTER_BYTES,
    )
    check_roster(told, roots | areas, there.name)
    if told.links:
        raise PlatformError(
            f"{told.links[0]} is a link: what it points to would not be pulled",
            hint="put the file itself there, or name its folder in launch.outputs; "
            f"--leave {shlex.quote(told.links[0])} leaves it",
        )
    return told


def pull_files(
    record: LaunchRecord,
    manifest: PullManifest,
    target: Path,
    sources: Sources,
    tell: Callable[[str], None],
    *,
    live: bool = False,
) -> PullManifest:
    """Bring the files of `manifest` to `target`, folder by folder; what is here already stays.

    Return the manifest that was written there: of a job that is `live` it has the files that have
    changed since the roster was made as they arrived, and says which.

    Raises:
        ConfigError: `target` holds something else.
        PlatformError: nothing more arrives, or files have changed, of a job that is not `live`.
        SafetyError: a file would be written through a link.
    """
    check_names((file.path for file in manifest.files), manifest.host)
    check_target(target, (file.path for file in manifest.files))
    _make_room(target, manifest, tell)
    owners = map_owners(record)
    for (label, folder), files in group_files(manifest).items():
        tell(f"{label}/{folder}: {len(files)} files")
        there = sources[owners[label][0].box]
        there.bring(manifest.roots[label], target / label, files, tell=tell)
    failpoint("pull/brought")
    if live:
        manifest = _take_as_arrived(target, manifest)
    elif lacking := [
        file.path for file in manifest.files if not has_size(target / file.path, file)
    ]:
        raise PlatformError(
            f"{describe_changed(lacking)} since the roster was made", hint="pull again"
        )
    _write(target / PULL_MANIFEST, manifest)
    return manifest


def _write(path: Path, document: PullManifest | PullVerified) -> None:
    """Write a document so that it is there whole, or as it was."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _take_as_arrived(target: Path, manifest: PullManifest) -> PullManifest:
    """Return a roster with what has changed meanwhile as it lies here, or without it."""
    files, changed = [], []
    for file in manifest.files:
        path = target / file.path
        if is_whole(path, file):
            files.append(file)
            continue
        changed.append(file.path)
        if path.is_file() and not path.is_symlink():
            size, digest = path.stat().st_size, hash_file(path)
            files.append(msgspec.structs.replace(file, bytes=size, sha256=digest))
    return msgspec.structs.replace(manifest, files=tuple(files), changed=tuple(changed))


def describe_changed(names: Sequence[str]) -> str:
    """Return how many files have changed, and the first of them.

    >>> describe_changed(["job/a", "job/b", "job/c", "job/d"])
    '4 files have changed or gone (job/a, job/b, job/c and 1 more)'
    """
    verb = "files have" if len(names) > 1 else "file has"
    return f"{len(names)} {verb} changed or gone ({name_first(names)})"


def group_files(manifest: PullManifest) -> dict[tuple[str, str], list[PulledFile]]:
    """Return (label, first folder) -> files, named below the label's own folder.

    Each is a transfer. A label with many folders is one by itself: `...` is said of it.
    """
    labels = sorted(manifest.roots, key=len, reverse=True)
    groups: dict[tuple[str, str], list[PulledFile]] = {}
    for file in manifest.files:
        label = next(label for label in labels if file.path.startswith(f"{label}/"))
        name = file.path[len(label) + 1 :]
        folder = name.partition("/")[0] if "/" in name else ""
        groups.setdefault((label, folder), []).append(msgspec.structs.replace(file, path=name))
    counts = Counter(label for label, _ in groups)
    joined: dict[tuple[str, str], list[PulledFile]] = {}
    for (label, folder), files in groups.items():
        key = (label, folder if counts[label] <= _GROUPS_MAX else "...")
        joined.setdefault(key, []).extend(files)
    return joined


def _make_room(target: Path, manifest: PullManifest, tell: Callable[[str], None]) -> None:
    """Refuse a directory of something else; set aside what an earlier pull has too many.

    That one may have broken off, and have left no manifest.
    """
    before = read_manifest(target)
    tops = {label.split("/")[0] for label in manifest.roots}
    others = sorted({path.name for path in target.glob("*")} - tops)
    others = [name for name in others if not is_begun(name)]
    if before is None and others:
        raise ConfigError(
            f"{target} holds something else: {others[0]}", hint="name a new or an empty directory"
        )
    if before is not None and before.job != manifest.job:
        raise ConfigError(f"{target} holds job `{before.job}`", hint="name another directory")
    (target / PULL_VERIFIED).unlink(missing_ok=True)
    (target / PULL_MANIFEST).unlink(missing_ok=True)
    wanted = {target / file.path for file in manifest.files}
    gone = [
        path
        for top in sorted(tops)
        for path in sorted((target / top).rglob("*"))
        if not path.is_dir() and not wanted & {path, locate_final(path)}
    ]
    aside = target.with_name(f"{target.name}.superseded")
    for path in gone:
        kept = aside / path.relative_to(target)
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, kept)
    if gone:
        tell(f"{len(gone)} files of the earlier pull are not on the box any more: now in {aside}")


def is_begun(name: str) -> bool:
    """Return whether a command was killed while it wrote this, a document of its own."""
    return name.startswith((f".{PULL_MANIFEST}.", f".{PULL_VERIFIED}."))


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


def compare_files(
    target: Path,
    manifest: PullManifest,
    tell: Callable[[float, float], None] = lambda done, total: None,
) -> list[str]:
    """Return what differs between `target` and its manifest; an empty roster is a difference.

    `tell` hears how many bytes were read, of how many.
    """
    problems = [] if manifest.files else ["the roster is empty: nothing was pulled"]
    expected = {file.path: file for file in manifest.files}
    done, total = 0, sum(file.bytes for file in manifest.files)
    for name, file in expected.items():
        path = target / name
        tell(done, total)
        done += file.bytes
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != file.bytes:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {file.bytes}")
        elif hash_file(path) != file.sha256:
            problems.append(f"{name} does not match its SHA-256")
    present = {
        str(PurePosixPath(path.relative_to(target)))
        for path in target.rglob("*")
        if path.is_file() or path.is_symlink()
    }
    unknown = present - {*expected, PULL_MANIFEST, PULL_VERIFIED}
    strangers = [name for name in unknown if not is_begun(name)]
    return [*problems, *(f"{name} is not in the roster" for name in sorted(strangers))]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of loading files of tensors: how many load, and what is wrong."""

    loaded: int = 0
    """Files and checkpoints that load."""
    tensors: int = 0
    problems: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Files that may well be weights and were not understood, and why."""


def look_into(target: Path, manifest: PullManifest, *, allow_pickle: bool) -> Found:
    """Return what the files of tensors among those that were pulled say of themselves.

    Raises:
        PlatformError: torch is not installed here, and some are torch's: nothing can be said.
    """
    problems: list[str] = []
    unknown: list[str] = []
    loaded = tensors = 0
    for file in manifest.files:
        path = target / file.path
        try:
            if is_set_aside(file.path):
                unknown.append(f"{file.path} (torn on the box, and moved there by perdure)")
            elif path.suffix == ".safetensors":
                tensors += len(read_safetensors(path))
                loaded += 1
            elif path.name.endswith(INDICES):
                problems += [f"{path}: {why}" for why in list_missing_files(path)]
            elif path.name == "config.json":
                check_config(path)
            elif path.suffix in _UNKNOWN and not _is_torch(path):
                unknown.append(f"{file.path} ({path.suffix})")
        except ValueError as error:
            problems.append(f"{path} does not load: {error}")
    paths = list_loadable(target, manifest)
    told = load_files(paths, allow_pickle=allow_pickle) if paths else Found()
    return Found(
        loaded=loaded + told.loaded,
        tensors=tensors + told.tensors,
        problems=(*problems, *told.problems),
        unknown=(*unknown, *told.unknown),
    )


def _is_torch(path: Path) -> bool:
    return path.suffix in _LOADABLE or (path.suffix == ".bin" and is_pickle(path))


def list_loadable(target: Path, manifest: PullManifest) -> list[str]:
    """Return torch's files with tensors, and folders of sharded checkpoints, to be loaded.

    The files of a sharded checkpoint are loaded with it, by its index.
    """
    found = set()
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if is_set_aside(file.path):
            continue
        if path.name == ".metadata":
            found.add(str(target / path.parent))
        elif path.suffix in (*_LOADABLE, ".bin") and _is_torch(target / path):
            found.add(str(target / path))
    return sorted(found)


def load_files(paths: Iterable[str], *, allow_pickle: bool) -> Found:
    """Return what loading `paths` with `weights_only` has shown.

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
        last = last_line(done.stderr.decode(errors="replace"), "?")
        raise PlatformError(
            f"checkpoints cannot be loaded here: {last}", hint="pip install 'perdure[torch]'"
        )
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Found)


def write_verified(
    target: Path,
    manifest: PullManifest,
    loaded: int,
    verified_s: float,
    *,
    tensors: int = 0,
    nothing_to_keep: bool = False,
) -> PullVerified:
    """Write down that the directory was found whole and loads."""
    verified = PullVerified(
        job=manifest.job,
        manifest_sha256=hash_file(target / PULL_MANIFEST),
        verified_s=verified_s,
        files=len(manifest.files),
        bytes=sum(file.bytes for file in manifest.files),
        loaded=loaded,
        tensors=tensors,
        nothing_to_keep=nothing_to_keep,
    )
    _write(target / PULL_VERIFIED, verified)
    return verified


def read_verified(target: Path) -> PullVerified | None:
    """Return the proof of the directory's own manifest; None where there is none, or an older."""
    try:
        verified = msgspec.json.decode((target / PULL_VERIFIED).read_bytes(), type=PullVerified)
        current = hash_file(target / PULL_MANIFEST)
    except (OSError, msgspec.DecodeError):
        return None
    return verified if verified.manifest_sha256 == current else None
