"""What this machine remembers of the jobs that it launched: one file a job, replaced atomically."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from perdure.files import replace_file
from perdure.files.private import check_owner
from perdure.files.regular import read_file
from perdure.model.errors import PlatformError

if TYPE_CHECKING:
    from perdure.model.platforms.launching import LaunchRecord


def _path(home: str, job: str) -> Path:
    return Path(home, "launches", f"{job}.json")


def write_record(home: str, record: "LaunchRecord") -> None:
    """Remember `record`.

    Raises:
        PlatformError: the disk is full, read-only or not ours.
    """
    path = _path(home, record.job)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror}") from error


def forget_record(home: str, job: str, at_s: float) -> Path:
    """Set the record of `job` aside, so that its name is free; return where it is.

    Raises:
        PlatformError: the disk is full, read-only or not ours.
    """
    path = _path(home, job)
    aside = path.parent / "forgotten" / f"{job}-{at_s:.0f}.json"
    try:
        aside.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(path, aside)
    except OSError as error:
        raise PlatformError(f"cannot move {path}: {error.strerror}") from error
    return aside


def read_record(home: str, job: str) -> "LaunchRecord | None":
    """Return what is remembered of `job`; None where it was never launched from here."""
    try:
        data = read_file(_path(home, job))
        check_owner(_path(home, job))  # It says which program reaches the box.
        from perdure.model.platforms.launching import LaunchRecord  # Most jobs have no record.

        return msgspec.json.decode(data, type=LaunchRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise PlatformError(f"cannot read {_path(home, job)}: {error}") from error


def read_remote(home: str, job: str) -> "LaunchRecord | None":
    """Return the record of a job that lives elsewhere; None for one of this machine."""
    record = read_record(home, job) or _read_task(home, job)
    return None if record is None or record.profile.kind == "local" else record


def _read_task(home: str, job: str) -> "LaunchRecord | None":
    """Return the record of a task of a Slurm array, which was launched as part of it."""
    name, _, task = job.rpartition("-")
    array = read_record(home, name) if task.isdigit() else None
    if array is None:
        return None
    from perdure.model.platforms.slurm import list_tasks

    if task not in list_tasks(array.profile.slurm.array):
        return None
    return msgspec.structs.replace(
        array, job=job, id=f"{array.id}_{task}", roots={"job": f"{array.home}/jobs/{job}"}
    )


def list_records(home: str, say: Callable[[str], None] | None = None) -> "list[LaunchRecord]":
    """Return all records, by name; pass those that cannot be read to `say`.

    Raises:
        PlatformError: one cannot be read, and there is no `say`.
    """
    found = []
    for path in sorted(Path(home, "launches").glob("*.json")):
        try:
            record = read_record(home, path.stem)
        except PlatformError as error:
            if say is None:
                raise
            say(error.message)
            continue
        found += [record] if record is not None else []
    return found
