"""Files that are there whole or not at all: who reads one finds the old content or the new one."""

import contextlib
import errno
import fcntl
import os
import stat
import threading
from pathlib import Path

from perdure.failpoints import failpoint
from perdure.files.regular import UnfitFileError, open_regular


def replace_file(
    path: str | Path, data: bytes, *, mode: int | None = None, synced: bool = False
) -> None:
    """Put `data` at `path`, in the place of what was there.

    Without a `mode` the umask says who may read it. `synced`: the data is on the disk before it has
    its name; that this has it there after a loss of power takes `sync_path` of the folder as well.

    Raises:
        OSError: the disk is full, read-only or not ours; what was there is as it was.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        _write_beside(target, temporary, data, mode=mode, synced=synced)
        os.replace(temporary, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    failpoint("file/renamed", target.name)


def create_file(path: Path, data: bytes, *, synced: bool = True, mode: int | None = None) -> bool:
    """Put `data` at `path`, whole; return False where something was there, and still is.

    `synced`: what is at `path` then is there after a loss of power.

    Raises:
        OSError: the disk is full, read-only or not ours.
    """
    # No `secrets`: it imports six modules, and every command imports this one.
    temporary = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
    made = True
    try:
        _write_beside(path, temporary, data, mode=mode, synced=synced)
        os.link(temporary, path)
        failpoint("file/renamed", path.name)
    except FileExistsError:
        made = False
    finally:
        temporary.unlink(missing_ok=True)
    if synced:
        sync_path(path.parent)
    return made


def _write_beside(
    target: Path, temporary: Path, data: bytes, *, mode: int | None, synced: bool
) -> None:
    """Write what is about to be at `target` under another name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(temporary, flags, 0o666 if mode is None else 0o600), "wb") as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(data[: failpoint("file/write", target.name)])
        if synced:
            file.flush()
            os.fsync(file.fileno())
    failpoint("file/rename", target.name)


def is_locked(path: str | Path) -> bool:
    """Return whether somebody holds the lock of the file at `path`, or it is not for us to know."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, UnfitFileError):
        return False
    except OSError:
        return True
    return False


def read_size(path: str | Path) -> int:
    """Return how many bytes are in the regular file at `path`; 0 if there is none."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def sync_path(path: str | Path) -> None:
    """Bring a file's content, or a directory's names, to the disk.

    Some network file systems sync no directories, and answer with EINVAL.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)
