"""The output of this node's ranks, and its own parts' logs, kept to a bounded size.

One file is cut once it is large (`files/rotation.py`). All of this node's ranks together, over all
generations, may have `NODE_BYTES`: beyond that the oldest generations are thinned first, down to
the beginning of each file, and then left out; of the first generation and of the newest two nothing
is taken away.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from perdure.files.rotation import list_parts, list_streams_by_age, rotate_file
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths

log = logging.getLogger("perdure.agent")

NODE_BYTES = 4 << 30
LOOK_S = 5.0
_WEIGH_EVERY = 12
"""Looks between two of the size of everything."""
_NEWEST = 2


def cut_logs(folder: str, output: str = "") -> None:
    """Cut what has become too large of the logs of a job's parts that are no node's.

    `output` is a file to which `perdure run` itself writes, where it is to be cut as well.
    """
    paths = [output] if output else []
    with contextlib.suppress(OSError):  # Its disk is away: the next call may find it.
        logs = Path(folder).glob("*.log")
        paths += [str(path) for path in logs if not path.name.startswith(("agent-", "keeper-"))]
    for path in paths:
        with contextlib.suppress(OSError):  # It goes on as it is.
            rotate_file(path)


class LogWatch:
    """Looks at the files of one node; every method runs in a thread."""

    def __init__(self, spec: JobSpec, paths: JobPaths, node: int) -> None:
        """Look at what the ranks of `node` write."""
        self._folder = Path(spec.log_dir or os.path.join(paths.logs, "ranks"))
        self._parts = [paths.log(f"{part}-{node}") for part in ("agent", "keeper")]
        self._stream: Callable[[int, int, str], str] = lambda generation, rank, name: paths.stream(
            generation, rank, name, spec.log_dir
        )
        self._looks = 0
        self._unable: set[str] = set()

    def look(self, generation: int, ranks: Iterable[int]) -> None:
        """Cut what has become too large of `ranks`, which run in `generation`."""
        ranks = sorted(ranks)
        streams = [self._stream(generation, r, name) for r in ranks for name in ("out", "err")]
        for path in (*streams, *self._parts):
            try:
                rotate_file(path)
            except OSError as error:
                if path not in self._unable and not isinstance(error, FileNotFoundError):
                    self._unable.add(path)
                    log.warning("%s grows: it cannot be cut: %s", path, error.strerror)
        self._looks += 1
        if self._looks % _WEIGH_EVERY == 1:
            with contextlib.suppress(OSError):  # Its disk is away: a later look may find it.
                self.thin(ranks)

    def thin(self, ranks: Iterable[int], bytes_max: int = NODE_BYTES) -> None:
        """Have all that `ranks` have ever written take no more than `bytes_max`."""
        names = [f"rank-{rank}.{name}" for rank in ranks for name in ("out", "err")]
        found = [
            [parts for name in names if (parts := list_parts(str(folder / name)))[-1].end]
            for _, folder in list_streams_by_age(self._folder)
        ]
        before = sum(p.end - p.begin for files in found for parts in files for p in parts)
        older = [parts for files in found[1:-_NEWEST] for parts in files]
        size = before
        for part in (*(p for parts in older for p in parts[1:]), *(parts[0] for parts in older)):
            if size > bytes_max:
                size -= part.end - part.begin
                with contextlib.suppress(OSError):
                    os.unlink(part.path)
        if size < before:
            log.warning("%d bytes of older generations' output are not kept", before - size)
