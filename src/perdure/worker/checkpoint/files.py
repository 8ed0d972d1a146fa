"""Files of a checkpoint: written whole or not at all, hashed, listed, thrown away by rule.

Nothing here knows what a tensor is. At an fsspec URL (`Remote`) they are staged in a local
directory, uploaded, checked, tagged last. The staging directory lies beside the job and is shared
by its ranks; what it still holds need not be fetched again.
"""

import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import xxhash

from perdure.failpoints import failpoint
from perdure.files import replace_file, sync_path
from perdure.files.owner import claim_folder
from perdure.files.regular import UnfitFileError, open_file, read_file
from perdure.model.checkpoints import (
    LATEST,
    MANIFEST,
    OWNER,
    TEMPORARY,
    FileEntry,
    Manifest,
    name_checkpoint,
    parse_checkpoint_name,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.input.relative import explain_unsafe
from perdure.model.job import CheckpointConfig
from perdure.model.records import decode_record

_CHUNK = 4 << 20
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that say what is on a disk. All others say that the disk does not answer."""


class _Picture(msgspec.Struct, frozen=True):
    """The part of a job's `Snapshot` that says what was saved."""

    checkpoints: tuple[dict[str, object], ...] = ()


def hash_file(path: Path, give_way: Callable[[], object] = bool) -> str:
    """Return the xxh3-128 of a file's bytes, read from the file; `give_way` between chunks.

    Raises:
        UnfitFileError: the path leads to something else, such as a FIFO.
        OSError: the disk does not answer.
    """
    digest = xxhash.xxh3_128()
    with open_file(path, 0, follow=True) as file:
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
        OSError: the disk does not answer.
    """
    try:
        data = read_file(folder / MANIFEST, follow=True)
    except (*_ABSENT, UnfitFileError) as error:
        raise ProtocolError(f"no manifest: {error.strerror}") from error
    return decode(data, Manifest)


def drop_cached(path: Path) -> None:
    """Forget what the kernel caches of a synced file, so that it is read from the disk next."""
    with open(path, "rb") as file, contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_problem(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> str:
    """Return the first thing that is wrong with a checkpoint's files; empty where all is well.

    Of several ranks each may read its own share of the files.

    Raises:
        OSError: the disk does not answer.
    """
    if not manifest.files:
        return "the roster is empty"
    if manifest.step != parse_checkpoint_name(folder.name):
        return f"the manifest is of step {manifest.step}"
    for entry in manifest.files[share::shares]:
        why = explain_unsafe(entry.path)
        if why:
            return f"the roster names {entry.path!r:.80}, which {why}"
        path = folder / entry.path
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                return f"{entry.path} has {size} bytes instead of {entry.bytes}"
            if hash_file(path) != entry.xxh3_128:
                return f"{entry.path} does not match its hash"
        except _ABSENT:
            return f"{entry.path} is missing"
        except UnfitFileError as error:
            return f"{entry.path} cannot be read: {error.strerror}"
    return ""


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of the finished checkpoints, newest first.

    Raises:
        OSError: the disk does not answer. To find none instead would begin at step 0.
    """
    found = []
    with contextlib.suppress(*_ABSENT):
        for path in root.iterdir():
            step = parse_checkpoint_name(path.name)
            if step is not None and path.is_dir():
                found.append((step, path))
    return sorted(found, reverse=True)


def read_saved(root: Path) -> str:
    """Return the name of the newest checkpoint that this run has saved in `root`; empty if none.

    It is what the newest snapshot of the job says, on the machine of `perdure run`.
    """
    spec, picture = os.environ.get("PERDURE_SPEC", ""), _Picture()
    if spec:
        with contextlib.suppress(OSError, ProtocolError):
            picture = decode_record(read_file(Path(spec).with_name("state.json")), _Picture)
    paths = [Path(str(saved.get("path", ""))) for saved in picture.checkpoints]
    return next((path.name for path in reversed(paths) if path.parent == root), "")


def publish(temporary: Path, root: Path, step: int, manifest: Manifest) -> Path:
    """Give a complete temporary directory its final name; return that path.

    A directory of the same step is from a generation that was rolled back to before it: it holds
    the same state, or is damaged; the new one takes its place.
    """
    replace_file(temporary / MANIFEST, encode(manifest), synced=True)
    sync_path(temporary)
    final = root / name_checkpoint(step)
    old = root / f"{final.name}.old{TEMPORARY}"
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
    failpoint("checkpoint/publish")
    os.replace(temporary, final)
    failpoint("checkpoint/published")
    shutil.rmtree(old, ignore_errors=True)
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


def choose_kept_steps(
    steps: Iterable[int],
    config: CheckpointConfig,
    newest: int,
    read_metric: Callable[[int], float | None],
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
        values = [(read_metric(step), -step) for step in past]
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

    def read_metric(step: int) -> float | None:
        with contextlib.suppress(OSError, ProtocolError):
            return read(step).metrics.get(config.keep_best)
        return None

    for step in set(steps) - choose_kept_steps(steps, config, newest, read_metric):
        remove(step)


def apply_retention(root: Path, config: CheckpointConfig, newest: int) -> list[Path]:
    """Remove finished checkpoints that no rule keeps; return those that cannot be removed.

    Raises:
        OSError: the folder cannot be read.
    """
    found = dict(list_checkpoints(root))
    left: list[Path] = []

    def remove(step: int) -> None:
        shutil.rmtree(found[step], ignore_errors=True)
        if found[step].exists():
            left.append(found[step])

    remove_surplus(
        found, config, newest, read=lambda step: read_manifest(found[step]), remove=remove
    )
    return left


class Remote:
    """The remote end of a local staging directory."""

    def __init__(self, url: str) -> None:
        """Open `url`'s file system."""
        self._url = url.rstrip("/")
        self._fs: Any
        self._fs, self._path = fsspec.core.url_to_fs(self._url)

    def show(self, local: Path) -> str:
        """Return the URL of a checkpoint by its local directory."""
        return f"{self._url}/{local.name}"

    def upload(self, local: Path, manifest: Manifest) -> None:
        """Copy a checkpoint, its manifest last; check sizes; name it `latest`.

        Raises:
            PlatformError: what arrived has another size.
        """
        target = f"{self._path}/{local.name}"
        if self._fs.exists(target):  # Damaged, or cut off: no manifest may vouch for a mixture.
            self._fs.rm(target, recursive=True)
        self._fs.makedirs(target, exist_ok=True)
        for entry in manifest.files:
            failpoint("checkpoint/upload")
            self._fs.put_file(str(local / entry.path), f"{target}/{entry.path}")
            arrived = self._fs.info(f"{target}/{entry.path}")["size"]
            if arrived != entry.bytes:
                raise PlatformError(
                    f"{self.show(local)}/{entry.path} has {arrived} bytes, not {entry.bytes}"
                )
        self._fs.put_file(str(local / MANIFEST), f"{target}/{MANIFEST}")
        failpoint("checkpoint/uploaded")
        with self._fs.open(f"{self._path}/{LATEST}", "wb") as file:
            file.write(local.name.encode())

    def claim(self, job: str) -> str:
        """Give the place to `job` if no job has it; return the job that has it."""
        path = f"{self._path}/{OWNER}"
        with contextlib.suppress(FileNotFoundError):
            return str(self._fs.cat_file(path).decode("utf-8", "replace").strip())
        self._fs.makedirs(self._path, exist_ok=True)
        self._fs.pipe_file(path, job.encode())
        return job

    def list_names(self) -> list[str]:
        """Return the names of the checkpoints there.

        A place that cannot be reached raises: to begin at step 0 instead would lose the training.
        """
        self._fs.invalidate_cache()
        try:
            rows = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        names = [row.rstrip("/").rsplit("/", 1)[-1] for row in rows]
        return [name for name in names if parse_checkpoint_name(name) is not None]

    def fetch(self, root: Path, name: str) -> str:
        """Bring a checkpoint into the staging directory if it is not there; return why it cannot.

        It gets its name there when it is whole, so that two processes may both do it.
        """
        if (root / name / MANIFEST).exists():
            return ""
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(suffix=TEMPORARY, prefix="fetch-", dir=root))
        try:
            for path in self._fs.ls(f"{self._path}/{name}", detail=False):
                failpoint("checkpoint/fetch")
                self._fs.get_file(path, str(temporary / path.rsplit("/", 1)[-1]))
            shutil.rmtree(root / name, ignore_errors=True)
            os.replace(temporary, root / name)
        except OSError as error:
            if not (root / name / MANIFEST).exists():
                return f"cannot be fetched: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def apply_retention(self, config: CheckpointConfig, newest: int) -> None:
        """Remove remote checkpoints that no rule keeps."""
        steps = {parse_checkpoint_name(name) or 0: name for name in self.list_names()}

        def read(step: int) -> Manifest:
            return decode(self._fs.cat_file(f"{self._path}/{steps[step]}/{MANIFEST}"), Manifest)

        def remove(step: int) -> None:
            self._fs.rm(f"{self._path}/{steps[step]}", recursive=True)

        remove_surplus(steps, config, newest, read=read, remove=remove)


def claim_place(root: Path, remote: Remote | None, job: str) -> str:
    """Give a place of checkpoints to `job` if no job has it; return the job that has it.

    Raises:
        OSError: it cannot be read or written.
    """
    return remote.claim(job) if remote else claim_folder(root, job)


def open_place(url: str) -> tuple[Path, Remote | None]:
    """Return (local directory, remote end or None) of a checkpoint URL."""
    if "://" not in url or url.startswith("file://"):
        return Path(url.removeprefix("file://")).absolute(), None
    base = os.environ.get("PERDURE_SPEC", "")
    local = Path(base).parent if base else Path(tempfile.gettempdir())
    return local / f"staging-{sha256(url.encode()).hexdigest()[:12]}", Remote(url)
