"""Private folders of this user in /tmp and /dev/shm, which every user can write to.

If another user has taken the usual name, this user cannot remove the folder there. perdure then
uses the first free number behind the name. Links are refused.
"""

import contextlib
import glob
import itertools
import os
import stat
from functools import cache

from perdure.model.errors import PlatformError
from perdure.model.paths import JobPaths, job_paths


@cache  # A process that has found its folder keeps to it.
def find_private(root: str) -> str:
    """Return the path of this user's folder below `root`; of one that can be made if there is none.

    All processes of a user find the same one, by its owner: no record of it can be lost. If
    this user cannot write to /tmp, as in many pods, the folder is in /dev/shm.
    """
    if root == "/tmp" and not os.access(root, os.W_OK):
        return find_private("/dev/shm")
    first = f"{root}/perdure-{os.getuid()}"
    there = sorted(glob.glob(f"{first}-*"), key=lambda path: (len(path), path))
    ours = next((path for path in (first, *there) if _is_ours(path)), "")
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return ours or next(name for name in names if not os.path.lexists(name))


def locate_job(home: str, job: str) -> JobPaths:
    """Return the paths of this user's `job`."""
    return job_paths(home, job, find_private("/tmp"), find_private("/dev/shm"))


def make_private(path: str) -> None:
    """Make the folder `path`, and close it to other users.

    Raises:
        PlatformError: it belongs to another user, is a link, or cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if not _is_ours(path):
            raise PlatformError(
                f"{path} belongs to another user, or is no folder",
                hint="run the command again: it chooses another folder",
            )
        if stat.S_IMODE(os.lstat(path).st_mode) != 0o700:
            os.chmod(path, 0o700)
    except OSError as error:
        raise PlatformError(
            f"cannot make {path}: {error.strerror}",
            hint="mount a tmpfs that you can write to at /tmp or /dev/shm",
        ) from error


def check_owner(path: str | os.PathLike[str]) -> None:
    """Refuse what another user owns: it may name a command to run, or a place to send secrets to.

    Raises:
        PlatformError: `path`, or the link there, belongs to another user.
        OSError: there is no such path.
    """
    if os.lstat(path).st_uid != os.geteuid():
        raise PlatformError(
            f"{os.fspath(path)} belongs to another user", hint="run the command as that user"
        )


def _is_ours(path: str) -> bool:
    """Return whether `path` is a folder of this user, and not a link to one."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
