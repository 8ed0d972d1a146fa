"""Which job a folder of checkpoints belongs to: a file in it holds the job's name."""

import contextlib
import errno
from pathlib import Path

from perdure.files import create_file, replace_file
from perdure.files.regular import read_file
from perdure.model.checkpoints import MANIFEST, OWNER, Manifest, parse_checkpoint_name
from perdure.model.codec import decode
from perdure.model.errors import ProtocolError, UnfitError

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of file systems without hard links."""


def read_owner(folder: Path) -> str:
    """Return the job that saves its checkpoints in `folder`; empty if no job does.

    Raises:
        OSError: the disk does not answer.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return read_file(folder / OWNER).decode("utf-8", "replace").strip()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            if parse_checkpoint_name(path.name) is not None:
                with contextlib.suppress(OSError, ProtocolError):
                    manifest: Manifest = decode(read_file(path / MANIFEST), Manifest)
                    if manifest.job:
                        return manifest.job
    return ""


def claim_folder(folder: Path, job: str) -> str:
    """Give `folder` to `job` if no job has it; return the job that has it.

    Raises:
        OSError: the disk does not answer, or cannot be written.
    """
    if owner := read_owner(folder):
        return owner
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if create_file(folder / OWNER, job.encode(), synced=False):
            return job
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        replace_file(folder / OWNER, job.encode())
    return read_owner(folder)


def refuse_owner(place: str, owner: str, job: str) -> None:
    """Refuse the folder of another job.

    Raises:
        UnfitError: `owner` is named, and is not `job`.
    """
    if owner and job and owner != job:
        raise UnfitError(
            f"{place} holds the checkpoints of job {owner}",
            hint="set checkpoint.url to another folder; to begin from these, set checkpoint.from",
        )
