"""Who belongs to which generation, so that ending one leaves nothing behind.

The keeper is its descendants' subreaper: whatever a rank starts, and however it detaches
(`setsid`, double fork, `nohup`), stays below the keeper. So nothing is searched for outside that
tree; sessions and environments only tell *which generation* an orphan is of. After a keeper was
killed its successor has no tree to look at, and finds what survived by the marker in the
environment that every rank and everything it executes inherits.
"""

import os
from collections.abc import Container, Mapping
from typing import NamedTuple

GENERATION = "PERDURE_GENERATION"
KEEPER = "PERDURE_KEEPER"
"""Names the keeper, by pid and start time, below which a process was started."""


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    state: str
    start: int
    """Clock ticks since boot."""

    @property
    def dead(self) -> bool:
        """Whether only its exit status is left."""
        return self.state in "ZXx"


def scan_processes(proc: str = "/proc") -> dict[int, Process]:
    """Return every process that can be seen, by pid."""
    table = {}
    for name in os.listdir(proc):
        if name.isdigit():
            process = read_process(int(name), proc)
            if process is not None:
                table[process.pid] = process
    return table


def read_process(pid: int, proc: str = "/proc") -> Process | None:
    """Return process `pid`; None where it is gone."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold brackets and spaces.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]))


def read_environ(pid: int, proc: str = "/proc") -> dict[str, str]:
    """Return the environment that `pid` was executed with; empty where it may not be read."""
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def keeper_mark(pid: int) -> str:
    """Return the value of `PERDURE_KEEPER` for what the keeper `pid` starts."""
    process = read_process(pid)
    return f"{pid}:{process.start if process else 0}"


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
        if chain is None or any(pid in spared for pid in chain):
            continue
        generation = _generation_of(process, chain, roots)
        if generation is None:
            old = newer_start is None or process.start < newer_start
            generation = upto if old else upto + 1
        if generation <= upto:
            members.append(process.pid)
    return sorted(members)


def list_strays(
    table: Mapping[int, Process], marks: Mapping[str, str], proc: str = "/proc"
) -> list[int]:
    """Return living processes of an earlier keeper of the same node.

    `marks` holds this keeper's `PERDURE_KEEPER`, and what else must be equal.
    """
    strays = []
    for process in table.values():
        if process.dead or process.pid == os.getpid():
            continue
        environ = read_environ(process.pid, proc)
        mine = environ.get(KEEPER, marks[KEEPER]) == marks[KEEPER]
        if not mine and all(environ.get(k) == v for k, v in marks.items() if k != KEEPER):
            strays.append(process.pid)
    return sorted(strays)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal; False where there is no such process (any more)."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _ancestors(
    process: Process, table: Mapping[int, Process], keeper: int
) -> tuple[int, ...] | None:
    """Return the pids from `process` up to below `keeper`; None where it is not below it."""
    chain: list[int] = []
    at: Process | None = process
    while at is not None and at.pid != keeper and len(chain) < 4096:
        chain.append(at.pid)
        at = table.get(at.parent)
    if at is None or at.pid != keeper or not chain:
        return None
    return tuple(chain)


def _generation_of(
    process: Process, chain: tuple[int, ...], roots: Mapping[int, int]
) -> int | None:
    for pid in chain:
        if pid in roots:
            return roots[pid]
    if process.session in roots:
        return roots[process.session]
    mark = read_environ(process.pid).get(GENERATION, "")
    return int(mark) if mark.isdecimal() else None
