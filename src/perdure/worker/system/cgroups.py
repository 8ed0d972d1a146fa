"""Memory cgroups: how many processes the kernel has killed for memory, and a limit of one's own.

Both versions of cgroups are read, wherever this process happens to be. A rank that is to run out
of memory for real (`perdure inject JOB oom`) moves into a cgroup of its own with a limit; the
keeper, which looks there when the rank has ended, removes it. Nothing else is ever moved.
"""

import contextlib
import os
import re
from collections.abc import Callable
from glob import escape, glob
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"

_NAME = re.compile(r"perdure-(\d+)-(\d+)-g\d+-r\d+")


_FILES = {
    "counter": ("", "memory.oom_control", "memory.events"),
    "limit": ("", "memory.limit_in_bytes", "memory.max"),
    "swap_limit": ("", "memory.memsw.limit_in_bytes", "memory.swap.max"),
}
"""By version: the file with `oom_kill`, that with the limit in bytes, and that which keeps memory
from being swapped out instead."""


class Place(NamedTuple):
    """A memory cgroup that can be seen here."""

    path: str
    version: int

    def file(self, kind: Literal["counter", "limit", "swap_limit"]) -> str:
        """Return the path of its file of this kind."""
        return os.path.join(self.path, _FILES[kind][self.version])


def list_memory_places(own: str = OWN, root: str = ROOT) -> list[Place]:
    """Return where this process's memory may be accounted for, likeliest first."""
    places = []
    for number, controllers, path in (line.split(":", 2) for line in _read(own).splitlines()):
        path = path.lstrip("/")
        if number == "0":
            places += [Place(os.path.join(base, path), 2) for base in (root, f"{root}/unified")]
        elif "memory" in controllers.split(","):
            # Inside a container the path may be the host's, while the mount shows only ours.
            places += [Place(os.path.join(root, "memory", part), 1) for part in (path, "")]
    return [place for place in places if os.path.isdir(place.path)]


def read_oom_kills(own: str = OWN, root: str = ROOT) -> int:
    """Return how many processes of this cgroup the kernel has killed for memory; 0 if unknown.

    Where no cgroup says it, the whole machine's counter has to do.
    """
    for path in [
        *(place.file("counter") for place in list_memory_places(own, root)),
        "/proc/vmstat",
    ]:
        kills = read_counter(path)
        if kills is not None:
            return kills
    return 0


def read_counter(path: str) -> int | None:
    """Return `oom_kill` in the file `path`; None where it does not say."""
    found = re.search(r"^oom_kill (\d+)$", _read(path), re.MULTILINE)
    return int(found[1]) if found else None


# --- a cgroup of a rank's own ------------------------------------------------------------------


def rank_name(keeper_mark: str, generation: int, rank: int) -> str:
    """Return the name of a rank's own cgroup; `keeper_mark` is its `PERDURE_KEEPER`."""
    return f"perdure-{keeper_mark.replace(':', '-')}-g{generation}-r{rank}"


def list_parent_cgroups(own: str = OWN, root: str = ROOT) -> list[Place]:
    """Return the cgroups in which this process may make one with a memory limit.

    Version 2 lets no cgroup hold both processes and limited children, so a sibling has to do.
    """
    found = []
    for place in list_memory_places(own, root):
        above = [Place(os.path.dirname(place.path), 2)] if place.version == 2 else []
        for parent in (place, *above):
            writable = os.path.exists(parent.file("counter")) and os.access(parent.path, os.W_OK)
            given = _read(os.path.join(parent.path, "cgroup.subtree_control")).split()
            if writable and (parent.version == 1 or "memory" in given):
                found.append(parent)
    return found


def limit_self(name: str, limit_bytes: int, own: str = OWN, root: str = ROOT) -> str:
    """Move this process into a new cgroup `name` that may take `limit_bytes` more; its path.

    What it has taken so far stays accounted for where it was.

    Raises:
        OSError: none can be made here.
    """
    error = OSError("no memory cgroup that this process may write to")
    for parent in list_parent_cgroups(own, root):
        place = Place(os.path.join(parent.path, name), parent.version)
        try:
            os.makedirs(place.path, exist_ok=True)
            Path(place.file("limit")).write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # Not every kernel accounts for swap.
                Path(place.file("swap_limit")).write_text(
                    str(limit_bytes if place.version == 1 else 0)
                )
            Path(place.path, "cgroup.procs").write_text(str(os.getpid()))
            return place.path
        except OSError as failed:
            error = failed
            with contextlib.suppress(OSError):
                os.rmdir(place.path)
    raise error


class OomKills:
    """The keeper's account of the kernel's kills: each is some rank's, and only one rank's."""

    def __init__(self, mark: str, own: str = OWN, root: str = ROOT) -> None:
        """Count from now on; `mark` is this keeper's `PERDURE_KEEPER`."""
        self._mark, self._own, self._root = mark, own, root
        self._claimed = read_oom_kills(own, root)

    def count_of(self, generation: int, rank: int) -> int:
        """Return how many kills a rank that has ended may account for."""
        name = rank_name(self._mark, generation, rank)
        kills = 0
        for parent in list_parent_cgroups(self._own, self._root):
            place = Place(os.path.join(parent.path, name), parent.version)
            kills += read_counter(place.file("counter")) or 0
            with contextlib.suppress(OSError):
                os.rmdir(place.path)
        return kills or read_oom_kills(self._own, self._root) - self._claimed

    def claim(self) -> None:
        """Note that a rank was killed so; the shared counter need not have counted it."""
        self._claimed = min(self._claimed + 1, read_oom_kills(self._own, self._root))

    def tidy(self, is_alive: Callable[[str], bool]) -> None:
        """Remove the empty cgroups of keepers of which `is_alive(mark)` is not true."""
        for parent in list_parent_cgroups(self._own, self._root):
            for path in glob(os.path.join(escape(parent.path), "perdure-*")):
                found = _NAME.fullmatch(os.path.basename(path))
                if found and not is_alive(f"{found[1]}:{found[2]}"):
                    with contextlib.suppress(OSError):
                        os.rmdir(path)


def _read(path: str) -> str:
    """Return what a file has; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""
