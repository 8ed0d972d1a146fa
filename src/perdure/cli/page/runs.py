"""What tells one run of a job from the next of its name, and the newest picture of each.

No journal is read here, so that a list of jobs, or a key of a screen, is there at once.
"""

import os
from typing import Any

from perdure.cli.jobs import Job
from perdure.model.report import Snapshot


class Snapshots:
    """The newest picture of each job; of one that does not run it is made once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._still: dict[str, tuple[Any, Snapshot]] = {}

    def take(self, job: Job) -> Snapshot:
        """Return a job's newest picture."""
        if job.alive:
            self._still.pop(job.name, None)
            return job.snapshot()
        paths = (job.paths.spec, job.paths.snapshot, job.paths.journal)
        files = tuple(identify(path) for path in paths)
        known = self._still.get(job.name)
        if known is None or known[0] != files:
            known = self._still[job.name] = (files, job.snapshot())
        return known[1]


def name_run(job: Job) -> str:
    """Return what tells a job from another one that has begun under its name."""
    return "-".join(map(str, identify(job.paths.spec)))


def identify(path: str) -> tuple[int, int]:
    """Return what tells a file from another one at the same path, or from none."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns
