"""What torch has compiled, from one node's cache to another's: the files, and the connection.

What is sent is executed by who takes it, so that little is left to chance: each piece carries a
hash with a key that came another way, names are looked at before anything is written, and nothing
is written but regular files below the cache, closed to others, whole or not at all. What is there
already stays.

Left behind is what a copy could spoil: locks, what is being written, and what torch or CUDA change
in place. So are Triton's own entries where the caches have different paths: they name each other by
them (kernels that Inductor had made are in its own entries as well).

All of it blocks, and is made in a thread.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import msgspec

from perdure.adapters.storage import read_free_space
from perdure.adapters.transfer import Wire
from perdure.files import is_locked
from perdure.files.regular import open_regular
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.relative import explain_unsafe
from perdure.model.signals.compiled import CompiledFile
from perdure.service.caches import FILES_MIN, FREE_MIN_BYTES

SENT_BYTES_MAX = 512 << 20
SENT_FILES_MAX = 4_000
"""The newest are sent where there is more."""
_ROSTER_BYTES_MAX = 8 << 20
_CHUNK = 1 << 20
_SETTLED_S = 2.0
"""A file that has changed since is left behind: a linker writes at the place itself."""
_SENT = re.compile(
    r"(inductor/(fxgraph|aotautograd|[a-z0-9]{2})|triton)(/[\w,=+@%~-][\w.,=+@%~-]*){1,6}", re.ASCII
)
_NAME_MAX = 400
_GONE = bytes(hashlib.sha256().digest_size)
"""In the place of a hash: the file has changed or gone, and what came is to be dropped."""
_HERE, _MISSING = b"+", b"-"
_IN_THE_WAY = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.ENOENT,
)
"""Why one name cannot be written, where others can."""

_Roster = msgspec.json.Decoder(list[CompiledFile])
_Wanted = msgspec.json.Decoder(list[int])


@dataclass(slots=True)
class Taken:
    """What has arrived, also where the rest does not."""

    offered: int = 0
    """Files that the other node has."""
    files: int = 0
    bytes: int = 0
    skipped: int = 0
    """Files whose names cannot be written here."""


def list_compiled(folders: Mapping[str, Path], *, sent: Collection[str]) -> list[CompiledFile]:
    """Return what there is to send of the folders named in `sent`, the newest first, within bounds.

    `folders` are those of the cache by their names.
    """
    found = sorted(_find_compiled(folders, sent), key=itemgetter(0), reverse=True)
    roster, total = list[CompiledFile](), 0
    for _, known, size in found:
        if len(roster) < SENT_FILES_MAX and total + size <= SENT_BYTES_MAX:
            roster.append(CompiledFile(known, size))
            total += size
    return roster


def has_compiled(folders: Mapping[str, Path], *, sent: Collection[str]) -> bool:
    """Return whether there is anything to send."""
    return any(True for _ in _find_compiled(folders, sent))


def send_compiled(
    wire: Wire, folders: Mapping[str, Path], key: bytes, *, sent: Collection[str]
) -> None:
    """Tell what there is, and send what is asked for.

    Raises:
        OSError: not in time, or the other end is gone.
        ProtocolError: it asks for what there is not.
    """
    roster = list_compiled(folders, sent=sent)
    _send_block(wire, key, b"roster", msgspec.json.encode(roster))
    try:
        wanted = _Wanted.decode(_receive_block(wire, key, b"wanted"))
        chosen = [(index, roster[index]) for index in wanted if index >= 0]
        if len(set(wanted)) < len(wanted):
            raise IndexError("one more than once")
    except (msgspec.MsgspecError, IndexError) as error:
        raise ProtocolError(f"not files of the roster: {error}") from error
    for index, each in chosen:
        folder, _, path = each.name.partition("/")
        _send_file(wire, folders[folder], path, each.size, hmac.new(key, b"%d:" % index, "sha256"))


def receive_compiled(wire: Wire, folders: Mapping[str, Path], key: bytes, taken: Taken) -> None:
    """Take what is not there yet; `taken` counts what has arrived.

    A file whose name cannot be written here is passed over.

    Raises:
        OSError: not in time, the other end is gone, or the disk is full. What has arrived whole
            stays.
        ProtocolError: what the other end sends may not be taken. Of a roster that is not one,
            nothing is; of one file whose hash is wrong, that one is not, and none after it.
        PlatformError: there is no room for it.
    """
    try:
        roster = _Roster.decode(_receive_block(wire, key, b"roster"))
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a roster: {error}") from error
    check_roster(roster)
    taken.offered = len(roster)
    wanted = [index for index, each in enumerate(roster) if _is_wanted(folders, each.name)]
    if wanted:
        _check_room(folders, sum(roster[index].size for index in wanted))
    _send_block(wire, key, b"wanted", msgspec.json.encode(wanted))
    for index in wanted:
        each = roster[index]
        folder, _, path = each.name.partition("/")
        if wire.receive(1) != _HERE:
            continue
        check = hmac.new(key, b"%d:" % index, "sha256")
        _receive_file(wire, folders[folder], path, each, check, taken)


def check_roster(roster: list[CompiledFile]) -> None:
    """Look at what another node offers, before anything is written.

    Raises:
        ProtocolError: a name may not be used below the cache, or it is too much.
    """
    for each in roster:
        if why := _explain_unfit(each.name):
            raise ProtocolError(f"the name {each.name[:80]!r} {why}")
        if each.size < 0:
            raise ProtocolError(f"{each.name} has {each.size} bytes")
    total = sum(each.size for each in roster)
    if total > SENT_BYTES_MAX or len(roster) > SENT_FILES_MAX:
        raise ProtocolError(f"{len(roster)} files of {total} bytes are too much")
    if len({each.name for each in roster}) != len(roster):
        raise ProtocolError("two files have one name")


def name_folder(folder: Path, boot_id: str) -> str:
    """Return a name that `folder` alone has on all machines; empty where it cannot be looked at."""
    try:
        about = folder.stat()
    except OSError:
        return ""
    return f"{boot_id}:{about.st_dev}:{about.st_ino}" if boot_id else ""


def _explain_unfit(name: str) -> str:
    """Return why `name` is none of a file that is sent; empty where it is one."""
    if unsafe := explain_unsafe(name):
        return unsafe
    if len(name) > _NAME_MAX:
        return "is too long"
    return "" if _SENT.fullmatch(name) else "is not what is sent"


def _find_compiled(
    folders: Mapping[str, Path], sent: Collection[str]
) -> Iterator[tuple[float, str, int]]:
    """Yield what may be sent, by when it was written, name and size; in no order."""
    now_s = time.time()
    for name in sorted(set(folders) & set(sent)):
        for path, about in _walk(str(folders[name])):
            known = f"{name}/{path}"
            if not (_explain_unfit(known) or 0 <= now_s - about.st_mtime < _SETTLED_S):
                yield about.st_mtime, known, about.st_size


def _walk(root: str, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files below `root` that are ours, by their paths there; follow no link."""
    with contextlib.suppress(OSError), os.scandir(os.path.join(root, below)) as entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(root, path)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if about.st_uid == os.getuid():
                        yield path, about


def _send_file(wire: Wire, folder: Path, path: str, size: int, check: "hmac.HMAC") -> None:
    """Send one file of the roster as it was when that was made, or say that it is so no more."""
    try:
        fd = open_regular(folder / path)
    except OSError:
        wire.send(_MISSING)
        return
    with open(fd, "rb", buffering=0) as file:
        before = os.fstat(fd)
        lock = folder / "locks" / f"{os.path.basename(path).partition('.')[0]}.lock"
        if before.st_size != size or is_locked(lock):
            wire.send(_MISSING)
            return
        wire.send(_HERE)
        left = size
        while left:
            data = file.read(min(left, _CHUNK)) or bytes(min(left, _CHUNK))
            check.update(data)
            wire.send(data)
            left -= len(data)
        after = os.fstat(fd)
    same = (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    wire.send(check.digest() if same else _GONE)


def _receive_file(
    wire: Wire, folder: Path, path: str, expected: CompiledFile, check: "hmac.HMAC", taken: Taken
) -> None:
    """Write one file beside its place, and give it its name once it is what was sent.

    Where its name cannot be written, what is sent of it is read all the same, and dropped.
    """
    *parents, name = path.split("/")
    temporary = f".{os.getpid()}.{threading.get_ident()}.tmp"
    with contextlib.ExitStack() as opened:
        try:
            at = opened.enter_context(_open_folder(folder, parents))
            file = opened.enter_context(_open_temporary(temporary, at))
        except OSError as error:
            _check_in_the_way(error)
            at, file = -1, opened.enter_context(open(os.devnull, "wb"))
        left, buffer = expected.size, memoryview(bytearray(min(_CHUNK, expected.size)))
        while left:
            count = wire.receive_into(buffer[: min(left, len(buffer))])
            check.update(buffer[:count])
            file.write(buffer[:count])
            left -= count
        told = wire.receive(len(_GONE))
        if told == _GONE:
            return
        if not hmac.compare_digest(told, check.digest()):
            raise ProtocolError(f"the hash of {expected.name} is wrong")
        file.flush()
        try:
            if at >= 0:
                os.link(temporary, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError as error:
            _check_in_the_way(error)
            at = -1
    if at < 0:
        taken.skipped += 1
    else:
        taken.files += 1
        taken.bytes += expected.size


def _check_in_the_way(error: OSError) -> None:
    """Raise `error` where it is not about one name alone."""
    if error.errno not in _IN_THE_WAY:
        raise error


@contextlib.contextmanager
def _open_temporary(name: str, at: int) -> Iterator[BinaryIO]:
    """Give a new file in the folder `at`, which is gone afterwards by this name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(name, flags, 0o600, dir_fd=at), "wb") as file:
            yield file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)


@contextlib.contextmanager
def _open_folder(root: Path, parents: list[str]) -> Iterator[int]:
    """Give a descriptor of the folder `parents` below `root`, made where it is missing.

    Raises:
        OSError: it cannot be made, or something on the way is a link or no folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    at = os.open(root, flags)
    try:
        for segment in parents:
            with contextlib.suppress(FileExistsError):
                os.mkdir(segment, 0o700, dir_fd=at)
            below = os.open(segment, flags, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _is_wanted(folders: Mapping[str, Path], name: str) -> bool:
    folder, _, path = name.partition("/")
    return folder in folders and not os.path.lexists(folders[folder] / path)


def _check_room(folders: Mapping[str, Path], size: int) -> None:
    free = read_free_space(str(next(iter(folders.values()))))
    if free.bytes - size < FREE_MIN_BYTES or free.inodes in range(FILES_MIN + SENT_FILES_MAX):
        raise PlatformError(f"{size} bytes would leave too little room on the disk")


def _send_block(wire: Wire, key: bytes, what: bytes, data: bytes) -> None:
    wire.send(len(data).to_bytes(4, "big") + data + hmac.digest(key, what + b":" + data, "sha256"))


def _receive_block(wire: Wire, key: bytes, what: bytes) -> bytes:
    size = int.from_bytes(wire.receive(4), "big")
    if size > _ROSTER_BYTES_MAX:
        raise ProtocolError(f"a {what.decode()} of {size} bytes")
    data = wire.receive(size)
    told = wire.receive(hashlib.sha256().digest_size)
    if not hmac.compare_digest(told, hmac.digest(key, what + b":" + data, "sha256")):
        raise ProtocolError(f"the hash of the {what.decode()} is wrong")
    return data
