"""Nodes of a job of this machine that are kept away: all that they have is killed.

The agent is killed first, because it would tell of its keeper. The supervisor starts nothing of a
node while the node's file is locked (`JobPaths.kept_away`). If the process that keeps nodes away is
killed, the kernel frees its locks, and the nodes come back.
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterable, Sequence

from perdure.adapters.host import read_environ
from perdure.model.errors import ConfigError
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import load_parts, on_disk
from perdure.service.jobfolders import paths_of
from perdure.service.processes import find_by_title, list_living_descendants

_DRIVEN = "driven"
"""A file beside those of nodes: locked while a trace is played."""


class Gates:
    """Which nodes of a job are kept away; none at first."""

    def __init__(self, paths: JobPaths) -> None:
        """Keep none away yet."""
        self._paths = paths
        self._held: dict[str, int] = {}

    def claim(self) -> None:
        """Be the only one who takes this job's nodes.

        Raises:
            ConfigError: another play does.
        """
        path = os.path.join(self._paths.away, _DRIVEN)
        if path in self._held:
            return
        try:
            self._lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = os.path.basename(self._paths.root)
            raise ConfigError(
                f"a trace is being played against job `{name}`", hint="wait, or end it by Ctrl-C"
            ) from None

    def shut(self, nodes: Iterable[int]) -> None:
        """Let nothing of these nodes start. What runs is not stopped."""
        for node in nodes:
            path = self._paths.kept_away(node)
            if path not in self._held:
                self._lock(path, fcntl.LOCK_EX)

    def open(self, nodes: Iterable[int]) -> None:
        """Let these nodes start."""
        for node in nodes:
            self._free(self._paths.kept_away(node))

    def free(self) -> None:
        """Keep no node away any more, and leave nothing behind."""
        for path in list(self._held):
            self._free(path)
        with contextlib.suppress(OSError):
            os.rmdir(self._paths.away)

    def _lock(self, path: str, how: int) -> None:
        with on_disk(f"keep nodes away by {path}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
        except BaseException:
            os.close(fd)
            raise
        self._held[path] = fd

    def _free(self, path: str) -> None:
        if path in self._held:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(self._held.pop(path))


def kill_nodes(job: str, home: str, nodes: Sequence[int]) -> int:
    """Kill all that these nodes have, agents first; return how many processes that were."""
    parts = load_parts(paths_of(home, job))
    agents = [parts.agents[node] for node in nodes if parts and node in parts.agents]
    keepers = [pid for node in nodes for pid in find_by_title(f"perdure keeper {job} {node}")]
    agents, keepers = (
        [pid for pid in pids if _is_of(pid, job, home)] for pids in (agents, keepers)
    )
    ranks = [pid for root in (*agents, *keepers) for pid in list_living_descendants(root)]
    # An agent would tell of its keeper.
    return kill_all(dict.fromkeys((*agents, *keepers, *ranks)))


def _is_of(pid: int, job: str, home: str) -> bool:
    """Return whether a process is this job's: below another home a job may have the same name.

    An agent that was killed before may have left its number to a stranger.
    """
    marks = read_environ(pid)
    same_home = os.path.realpath(marks.get("PERDURE_HOME", "")) == os.path.realpath(home)
    return marks.get("PERDURE_JOB") == job and same_home


def kill_all(pids: Iterable[int]) -> int:
    """Kill processes in this order; return how many were there."""
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed
