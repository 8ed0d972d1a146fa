"""Who belongs to which generation, so that ending one leaves nothing behind.

The keeper is its descendants' subreaper: whatever a rank starts, and however it detaches
(`setsid`, double fork, `nohup`), stays below the keeper. So nothing is searched for outside that
tree; sessions and environments only tell *which generation* an orphan is of. After a keeper was
killed its successor has no tree to look at, and finds what survived by the marker in the
environment that every rank and everything it executes inherits.
"""

import contextlib
import os
from collections.abc import Collection, Container, Iterator, Mapping

from perdure.adapters.host import (
    Process,
    find_marked,
    read_environ,
    read_start_time,
    read_text,
)

GENERATION = "PERDURE_GENERATION"
KEEPER = "PERDURE_KEEPER"
"""Names the keeper, by pid and start time, below which a process was started."""

SHARED = "/dev/shm"
_CLEANERS = ("resource_tracker", "torch_shm_manager")


def keeper_mark(pid: int) -> str:
    """Return the value of `PERDURE_KEEPER` for what the keeper `pid` starts."""
    return f"{pid}:{read_start_time(pid)}"


def list_processes_below(
    table: Mapping[int, Process],
    keeper: int,
    roots: Mapping[int, int],
    spared: Container[int],
    upto: int,
    newer_start: int | None = None,
) -> list[int]:
    """Return the living processes below `keeper` of generations up to `upto`.

    `roots` maps pids of ranks and stores, dead ones included, to their generation: an orphan
    keeps the session of the rank it came from. `spared` are the keeper's images. An orphan that
    tells nothing belongs to the old generation if it started before the newer one's first rank
    (`newer_start`), and also where there is no newer one.
    """
    members = []
    for process in table.values():
        if process.dead:
            continue
        chain = _ancestors(process, table, keeper)
        if not chain or any(pid in spared for pid in chain):
            continue
        generation = _generation_of(process, chain, roots)
        if generation is None:
            old = newer_start is None or process.start < newer_start
            generation = upto if old else upto + 1
        if generation <= upto:
            members.append(process.pid)
    return sorted(members)


def list_strays(marks: Mapping[str, str], mark: str) -> list[int]:
    """Return living processes that have `marks` and are an earlier keeper's; `mark` is ours."""
    return sorted(p for p in find_marked(marks) if read_environ(p).get(KEEPER, mark) != mark)


def _ancestors(process: Process, table: Mapping[int, Process], keeper: int) -> list[int]:
    """Return the pids from `process` up to below `keeper`; none where it is not below it."""
    chain: list[int] = []
    at: Process | None = process
    while at is not None and at.pid != keeper and len(chain) < 4096:
        chain.append(at.pid)
        at = table.get(at.parent)
    return chain if at is not None and at.pid == keeper else []


def _generation_of(process: Process, chain: list[int], roots: Mapping[int, int]) -> int | None:
    for pid in chain:
        if pid in roots:
            return roots[pid]
    if process.session in roots:
        return roots[process.session]
    mark = read_environ(process.pid).get(GENERATION, "")
    return int(mark) if mark.isdecimal() else None


def cleans_up(pid: int) -> bool:
    """Return whether `pid` removes shared memory of processes that end: Python's, or torch's.

    Both notice by themselves that nobody uses them any more, and then exit.
    """
    command = read_text(f"/proc/{pid}/cmdline")
    return any(name in command for name in _CLEANERS)


def list_shared() -> set[str]:
    """Return the names of this user's files in shared memory."""
    with contextlib.suppress(OSError), os.scandir(SHARED) as entries:
        return {one.name for one in entries if _is_ours(one)}
    return set()


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.getuid() and not entry.is_dir()
    except OSError:
        return False


def remove_shared(names: Collection[str], ended: Container[int]) -> list[str]:
    """Remove tensors that torch shares by name, of `ended` processes; return what else is left.

    Files that a process has open or mapped are in use, and not among what is left.
    """
    left = set(names) & list_shared()
    for name in sorted(left):
        words = name.split("_")
        if words[0] == "torch" and words[1:] and words[1].isdigit() and int(words[1]) in ended:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHARED}/{name}")
            left.discard(name)
    used = set(_list_used()) if left else set()
    return sorted(left - used)


def _list_used() -> Iterator[str]:
    """Yield the names in shared memory that a process uses, as far as it can be seen."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for line in read_text(f"/proc/{pid}/maps").splitlines():
            _, found, name = line.partition(f" {SHARED}/")
            if found:
                yield name
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    _, found, name = os.readlink(f"/proc/{pid}/fd/{fd}").partition(f"{SHARED}/")
                    if found:
                        yield name
