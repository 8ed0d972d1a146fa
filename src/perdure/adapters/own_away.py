"""Copies of a script's own checkpoints under `checkpoint.url`: for a machine that has none.

<url>/own-JOB/PATTERN/1795297596180/manifest.json   of one pattern, by when it was written
                                   /=FILE           a file; `/` in a name is written as %2F
                                                 /pointers        names of what named it
<url>/own-JOB/PATTERN/latest                        the newest that was read back; written last

A copy never takes the place of another one, so that the newest is whole also while the script
overwrites one file. Every call may hang as long as the storage does.
"""

import contextlib
import os
import time
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import xxhash

from perdure.adapters.checkpoints import verify_checkpoint
from perdure.files.own import (
    PARTIAL,
    OwnCheckpoint,
    examine,
    find_root,
    is_declared,
    list_files,
    name_beside,
    open_room,
)
from perdure.files.pointers import is_newest, lead, list_naming
from perdure.model.checkpoints import LATEST, MANIFEST, FileEntry, Manifest
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.input.relative import explain_unsafe

_KEPT = 2
"""Copies of each pattern that stay."""
_CHUNK = 4 << 20
_POINTERS, _LINK = "pointers", "@"


class OwnAway:
    """The copies of the checkpoints of one pattern of a job."""

    def __init__(self, url: str, job: str, pattern: str, cwd: str) -> None:
        """Name the place; nothing is asked yet."""
        self.url = f"{url.rstrip('/')}/own-{quote(job, safe='')}/{quote(pattern, safe='')}"
        self.pattern = pattern
        self._job, self._root, self._cwd = job, find_root(pattern, cwd), cwd
        self._newest: tuple[object, ...] = ()

    def upload(self, one: OwnCheckpoint) -> bool:
        """Copy a whole checkpoint, read it back, and tag it; return whether it was still to do.

        Raises:
            PlatformError: it changed during the copy, or what arrived differs.
            OSError: one of the two places does not take or give it.
        """
        links = {path: os.path.islink(path) for path in list_naming(one.path)}
        pointers = [os.path.basename(path) + _LINK * link for path, link in links.items()]
        mark = (*one.mark, *pointers)
        if mark == self._newest:
            return False
        fs, base = fsspec.core.url_to_fs(self.url)
        name = f"{one.written_s * 1000:013.0f}"
        folder, entries = f"{base}/{name}", list[FileEntry]()
        if _read_latest(fs, base) == name:
            fs.pipe_file(f"{folder}/{_POINTERS}", encode(pointers))
            self._newest = mark
            return False
        with contextlib.suppress(FileNotFoundError):
            fs.rm(folder, recursive=True)  # What an earlier try has left.
        fs.makedirs(folder, exist_ok=True)
        for inner in sorted(list_files(one.path)) if os.path.isdir(one.path) else [""]:
            path = os.path.join(one.path, inner).rstrip("/")
            if not os.path.isfile(path):
                continue  # A pipe would never end.
            key = f"={quote(inner, safe='')}"
            fs.put_file(path, f"{folder}/{key}")
            entries.append(FileEntry(key, os.stat(path).st_size, _hash(path)))
        if examine(one.path, exact=True).mark != one.mark:
            raise PlatformError(f"{one.path} changed while it was copied")
        about = {"path": os.path.relpath(one.path, self._root), "format": one.format}
        manifest = Manifest(
            step=one.step, job=self._job, world_size=0, files=tuple(entries), fingerprint=about
        )
        fs.pipe_file(f"{folder}/{MANIFEST}", encode(manifest))
        fs.invalidate_cache()
        found = verify_checkpoint(fs, folder)
        if not found.ok:
            raise PlatformError(f"{self.url}/{name}: {'; '.join(found.problems)}")
        fs.pipe_file(f"{folder}/{_POINTERS}", encode(pointers))
        fs.pipe_file(f"{base}/{LATEST}", name.encode())
        self._newest = mark
        names = sorted(row.rstrip("/").rsplit("/", 1)[-1] for row in fs.ls(base, detail=False))
        for old in [old for old in names if old.isdecimal() and old != name][: 1 - _KEPT]:
            fs.rm(f"{base}/{old}", recursive=True)
        return True

    def fetch(self, timeout_s: float) -> str:
        """Bring the newest copy here; return its path, or nothing if there is none.

        A file that is there by then stays: another node may share the folder.

        Raises:
            PlatformError: it is damaged, or names a file elsewhere.
            TimeoutError: it came late, and the script may have begun without it.
            OSError: one of the two places does not take or give it.
        """
        until_s = time.monotonic() + timeout_s
        fs, base = fsspec.core.url_to_fs(self.url)
        name = _read_latest(fs, base)
        if not name:
            return ""
        manifest: Manifest = decode(fs.cat_file(f"{base}/{name}/{MANIFEST}"), Manifest)
        relative = manifest.fingerprint.get("path", "")
        paths = {entry.path: unquote(entry.path[1:]) for entry in manifest.files}
        for path in (relative, *filter(None, paths.values())):
            if why := explain_unsafe(path):
                raise PlatformError(f"{self.url}/{name} names {path!r}, which {why}")
        target = os.path.join(self._root, relative)
        if not is_declared(target, self.pattern, self._cwd):
            raise PlatformError(
                f"{self.url}/{name} names {relative!r}, which {self.pattern} is not"
            )
        with open_room(name_beside(self._root, self._cwd, PARTIAL)) as room:
            place = os.path.join(room, os.path.basename(target))
            for entry in manifest.files:
                path = os.path.join(place, paths[entry.path]).rstrip("/")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fs.get_file(f"{base}/{name}/{entry.path}", path)
                if (os.stat(path).st_size, _hash(path)) != (entry.bytes, entry.xxh3_128):
                    raise PlatformError(f"{self.url}/{name}/{entry.path} does not match its hash")
                os.utime(path, (int(name) / 1000, int(name) / 1000))
                if time.monotonic() > until_s:
                    raise TimeoutError(f"{self.url}/{name} took more than {timeout_s:g} s")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                if os.path.lexists(target):
                    return target
                os.rename(place, target)
            except OSError:
                if not os.path.isdir(target):
                    raise
        for pointer in _read_pointers(fs, f"{base}/{name}/{_POINTERS}"):
            path = os.path.join(os.path.dirname(target), pointer.removesuffix(_LINK))
            link = pointer.endswith(_LINK)
            # A link takes the place of no file, and is no module that the script imports.
            if not link or (is_newest(path) and (os.path.islink(path) or not os.path.exists(path))):
                lead(path, target, link=link)
        return target


def _read_pointers(fs: Any, path: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProtocolError):
        names: list[str] = decode(fs.cat_file(path), list[str])
        return [name for name in names if "/" not in name and not explain_unsafe(name)]
    return []


def _read_latest(fs: Any, base: str) -> str:
    fs.invalidate_cache()
    try:
        name = fs.cat_file(f"{base}/{LATEST}").decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
    return str(name) if name.isdecimal() else ""


def _hash(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
