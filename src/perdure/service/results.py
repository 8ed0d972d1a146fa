"""Results of drills, plans, and traces, kept for a person who looks later.

    $PERDURE_HOME/results/KIND-YYYYMMDDTHHMMSSZ-XXXXXXXX.json

Each result is one document, which is there whole or not at all. The newest `KEPT_MAX` of each kind
stay, and the newest `TOTAL_MAX` bytes of all kinds. Other files there are neither read nor removed.
"""

import contextlib
import os
import re
import stat
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import msgspec

from perdure import __version__
from perdure.files import create_file
from perdure.files.regular import read_file
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError

KEPT_MAX = 50
"""Of each kind."""
TOTAL_MAX = 32 << 20
"""Bytes of all results together: what a page can still list in a few seconds."""
SIZE_MAX = 1 << 20
"""Bytes of a document; a plan of 4,096 devices has 0.2 MB, and others have less."""
FILES_MAX = 10_000
"""Files in the folder. If it has more, perdure neither lists it nor adds to it."""
_LEFT_S = 3600.0
"""Seconds after which the beginning of a document is a leftover of a killed writer."""
_NAME = re.compile(r"[a-z]+-\d{8}T\d{6}Z-[0-9a-f]{8}")
_LEFT = re.compile(rf"\.{_NAME.pattern}\.json-[0-9a-f]{{16}}")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of each result."""

    at_s: float = 0.0
    """When it was finished, seconds since the Unix epoch."""
    version: str = ""
    """Perdure's."""


def locate_results(home: str) -> Path:
    """Return the folder of results."""
    return Path(home, "results")


class Found(NamedTuple):
    """What lies in the folder of results."""

    names: list[str]
    """Names of the results that may stay, the newest first."""
    surplus: list[str]
    """Names of older results above the limits: the next result that is kept removes them."""
    unlike: list[str]
    """Names that look like a result's but belong to a folder, a link, or a huge file."""
    others: list[str]
    """Files that are called otherwise."""


def keep_result(home: str, result: Kept) -> Path:
    """Keep a result, and remove the oldest that are too many or too much.

    The disk is not synced, so that a quick command stays quick. After a loss of power the newest
    result may be damaged, and the page says so.

    Raises:
        PlatformError: the disk is full, read-only or not ours, or it is too large.
    """
    now_s = time.time()
    data = encode(msgspec.structs.replace(result, at_s=now_s, version=__version__))
    folder, kind = locate_results(home), str(result.__struct_config__.tag)
    stamp = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    path = folder / f"{kind}-{stamp}-{token_hex(4)}.json"
    if len(data) > SIZE_MAX:
        raise PlatformError(f"a result of {len(data) / (1 << 20):.1f} MiB is too large to be kept")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        list_results(folder)  # Where it holds too many strange files, nothing is added.
        create_file(path, data, synced=False)
        _prune(folder, path.stem, now_s)
    except OSError as error:
        raise PlatformError(f"cannot keep {path}: {error.strerror}") from error
    return path


def _prune(folder: Path, newest: str, now_s: float) -> None:
    """Remove what is too much, never `newest`, and what writers that were killed have left."""
    for name in list_results(folder, newest).surplus:
        with contextlib.suppress(OSError):  # It belongs to another user, or is gone.
            (folder / f"{name}.json").unlink()
    for path in folder.glob(".*.json-*"):
        with contextlib.suppress(OSError):
            if _LEFT.fullmatch(path.name) and now_s - path.lstat().st_mtime > _LEFT_S:
                path.unlink()


def list_results(folder: Path, newest: str = "") -> Found:
    """Return what lies there; `newest` is the newest result, whatever its name says.

    A clock that was set back must not make it the oldest.

    Raises:
        OSError: the folder cannot be read.
        PlatformError: there are more than `FILES_MAX` files.
    """
    try:
        with os.scandir(folder) as entries:
            there = list(islice(entries, FILES_MAX + 1))
    except FileNotFoundError:
        there = []
    if len(there) > FILES_MAX:
        raise PlatformError(
            f"{folder} has more than {FILES_MAX:,} files", hint="remove what is not perdure's"
        )
    sizes: dict[str, int] = {}
    unlike, others = [], []
    for entry in there:
        name = entry.name.removesuffix(".json")
        if name == entry.name or not is_result(name):
            others += [] if name.startswith(".") else [entry.name]
            continue
        with contextlib.suppress(FileNotFoundError):  # It was just removed.
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and status.st_size <= SIZE_MAX:
                sizes[name] = status.st_size
            else:
                unlike.append(name)
    # Within one second the order does not matter: the rest of the name is random.
    own = sorted(sizes, key=lambda n: (n == newest, n.partition("-")[2]), reverse=True)
    names: list[str] = []
    surplus: list[str] = []
    total, many = 0, Counter[str]()
    for name in own:
        kind = name.partition("-")[0]
        many[kind] += 1
        total += sizes[name] if many[kind] <= KEPT_MAX else 0
        (names if many[kind] <= KEPT_MAX and total <= TOTAL_MAX else surplus).append(name)
    return Found(names, surplus, sorted(unlike), sorted(others))


def is_result(name: str) -> bool:
    """Return whether a result may be called like this.

    >>> is_result("drill-20261128T114500Z-0badcafe"), is_result("../jobs")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def read_result(folder: Path, name: str, type_: Any) -> Kept:
    """Return the result called `name`; `type_` is a kind of results, or a union of kinds.

    Raises:
        ProtocolError: it is damaged, or nothing that was kept.
        OSError: it cannot be read, is no regular file, or is larger than a result.
    """
    found: Kept = decode(read_file(folder / f"{name}.json", SIZE_MAX), type_)
    if not name.startswith(f"{found.__struct_config__.tag}-"):
        raise ProtocolError(f"it is a {found.__struct_config__.tag}, and not what its name says")
    return found
