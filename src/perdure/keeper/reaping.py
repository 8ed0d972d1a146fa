"""Who belongs to which generation, so that ending one leaves nothing behind.

The keeper is its descendants' subreaper: whatever a rank starts, and however it detaches
(`setsid`, double fork, `nohup`), stays below the keeper. So nothing is searched for outside that
tree; sessions and environments only tell *which generation* an orphan is of. After a keeper was
killed its successor has no tree to look at, and finds what survived by the marker in the
environment that every rank and everything it executes inherits.
"""

from collections.abc import Container, Mapping

from perdure.adapters.host import Process, find_marked, read_environ, read_start_time

GENERATION = "PERDURE_GENERATION"
KEEPER = "PERDURE_KEEPER"
"""Names the keeper, by pid and start time, below which a process was started."""


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
