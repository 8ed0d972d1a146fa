"""Places for emulated nodes: a node's processes are killed together, or let start.

A place without a machine is a locked file. What `perdure run` starts as the node's agent first
waits for that lock, so that a node that was killed comes back when its place is opened, and not
when its supervisor would like it to.
"""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from perdure.service.jobfiles import load_parts, paths_of
from perdure.service.placement import Placement
from perdure.service.processes import find_by_title, find_descendants

_WAIT = (
    "import fcntl, os, sys; place = open(sys.argv[1]); fcntl.flock(place, fcntl.LOCK_SH); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""The lock goes with the descriptor, which does not outlive the exec."""


class Gates:
    """Which places have a machine; all have one at first."""

    def __init__(self, folder: Path, count: int) -> None:
        """Make a file for each of `count` places in `folder`."""
        self._folder = folder
        self._held: dict[int, int] = {}
        for place in range(count):
            (folder / f"place{place}").touch()

    def placement(self) -> Placement:
        """Return what has a node's agent wait for its place."""
        path = str(self._folder / "place{node}")
        return Placement(command=(sys.executable, "-I", "-S", "-c", _WAIT, path))

    def shut(self, places: Sequence[int]) -> None:
        """Let nobody start there. Who has started is not stopped."""
        for place in places:
            if place not in self._held:
                fd = os.open(self._folder / f"place{place}", os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX)
                self._held[place] = fd

    def open(self, places: Sequence[int]) -> None:
        """Let the nodes start."""
        for place in places:
            if place in self._held:
                os.close(self._held.pop(place))


def kill_nodes(job: str, home: str, places: Sequence[int]) -> int:
    """SIGKILL all that these nodes have, agents first; return how many processes that were."""
    parts = load_parts(paths_of(home, job))
    agents = [parts.agents[place] for place in places if parts and place in parts.agents]
    keepers = [pid for place in places for pid in find_by_title(f"perdure keeper {job} {place}")]
    ranks = [pid for root in (*agents, *keepers) for pid in find_descendants(root)]
    killed = 0
    for pid in dict.fromkeys((*agents, *keepers, *ranks)):  # An agent would tell of its keeper.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all of its descendants."""
    for each in (pid, *find_descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
