"""What traces, simulations, plays, plans and drills have shown, kept for who looks later.

    $PERDURE_HOME/results/KIND-YYYYMMDDTHHMMSSZ-XXXXXXXX.json

Each is one document, there whole or not at all; of each kind the newest `KEPT_MAX` stay, and of
all kinds together the newest `TOTAL_MAX` bytes. What somebody else has put there is neither read as
one nor removed.
"""

import contextlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec

from perdure import __version__
from perdure.dash.svg import fold_stairs
from perdure.files import create_file
from perdure.files.regular import read_file
from perdure.drill.card import Card
from perdure_lab.report import Comparison, DriveResult, ReplayResult
from perdure_lab.traces.figures import Availability
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.plan.worlds.planner import Plan

KEPT_MAX = 50
"""Of each kind."""
TOTAL_MAX = 32 << 20
"""Bytes of all results together: what a page can still list in a few seconds."""
SIZE_MAX = 1 << 20
"""Bytes of a document; a plan of 4,096 devices has 0.2 MB, and others have less."""
FILES_MAX = 10_000
"""Files in the folder; where somebody has put more, it is neither listed nor added to."""
_LEFT_S = 3600.0
"""After so long nobody writes a document any more whose beginning was left."""
_NAME = re.compile(r"(trace|simulation|replay|drive|plan|drill)-\d{8}T\d{6}Z-[0-9a-f]{8}")
_LEFT = re.compile(rf"\.{_NAME.pattern}\.json-[0-9a-f]{{16}}")

Stairs = tuple[tuple[float, float], ...]
"""(seconds, value from then on)."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of each result."""

    at_s: float = 0.0
    """When it was finished, seconds since the Unix epoch."""
    version: str = ""
    """Perdure's."""


class KeptTrace(Kept, frozen=True, kw_only=True, tag="trace"):
    """`perdure trace show`."""

    figures: Availability
    counts: Stairs


class KeptSimulation(Kept, frozen=True, kw_only=True, tag="simulation"):
    """`perdure trace simulate`."""

    comparison: Comparison
    counts: Stairs
    rates: dict[str, Stairs]
    """By policy, and U1: samples a second."""


class KeptReplay(Kept, frozen=True, kw_only=True, tag="replay"):
    """`perdure trace replay`."""

    result: ReplayResult


class KeptDrive(Kept, frozen=True, kw_only=True, tag="drive"):
    """`perdure trace drive`."""

    result: DriveResult


class KeptPlan(Kept, frozen=True, kw_only=True, tag="plan"):
    """`perdure plan`."""

    profile: str
    """Name of the profile's file."""
    fingerprint: str
    devices: int
    per_node: int
    memory_bytes: int
    """Of a device."""
    global_batch: int
    plan: Plan


class KeptDrill(Kept, frozen=True, kw_only=True, tag="drill"):
    """`perdure drill`."""

    card: Card


Result = KeptTrace | KeptSimulation | KeptReplay | KeptDrive | KeptPlan | KeptDrill


def locate_results(home: str) -> Path:
    """Return the folder of results."""
    return Path(home, "results")


def fold_counts(counts: Sequence[tuple[float, float]], end_s: float) -> Stairs:
    """Return what a plot shows of a staircase, which may have very many steps."""
    return tuple(fold_stairs(counts, end_s))


class Found(NamedTuple):
    """What lies in the folder of results."""

    names: list[str]
    """Of the results that may stay, the newest first."""
    surplus: list[str]
    """Of older ones, which are too many or too much: the next result that is kept removes them."""
    unlike: list[str]
    """Of what is called as a result is, and can be none: a folder, a link, a huge file."""
    others: list[str]
    """Files that are called otherwise."""


def keep_result(home: str, result: Result) -> Path:
    """Keep a result, and remove the oldest that are too many or too much.

    It is not waited for the disk: after a loss of power the newest may be damaged, which the page
    says, and a command that answers at once stays one.

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
        with contextlib.suppress(OSError):  # Of another user, or just removed.
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
    # Of one second, whichever: the rest of the name is drawn.
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


def read_result(folder: Path, name: str) -> Result:
    """Return the result called `name`.

    Raises:
        ProtocolError: it is damaged, or nothing that was kept.
        OSError: it cannot be read, is no regular file, or is larger than a result.
    """
    found: Result = decode(read_file(folder / f"{name}.json", SIZE_MAX), Result)
    if not name.startswith(f"{found.__struct_config__.tag}-"):
        raise ProtocolError(f"it is a {found.__struct_config__.tag}, and not what its name says")
    return found
