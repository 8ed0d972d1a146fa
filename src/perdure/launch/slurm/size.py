"""How many nodes a run has, of the range that its job has asked Slurm for.

A range is for elastic jobs, whose world begins with what there is. That a job is not elastic is
known once it has trained; it then goes on with as many nodes as it had, since its global batch and
its place in the data hang on them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from perdure.launch.runs import Run
from perdure.model.job import JobSpec
from perdure.model.platforms.slurm import count_nodes, fit_nodes


def count_given(spec: JobSpec, environ: Mapping[str, str]) -> int:
    """Return how many nodes Slurm has given to a job, of those that it asked for."""
    fewest, most = count_nodes(spec)
    told = environ.get("SLURM_JOB_NUM_NODES", "")
    return min(most, max(fewest, int(told))) if told.isdigit() else most


class Size(NamedTuple):
    """The nodes of one run of a job."""

    spec: JobSpec
    """The job as it was submitted."""
    nodes: int

    def find_fixed(self, runs: Sequence[Run]) -> int:
        """Return how many nodes a job had whose world cannot change; 0 where any number will do."""
        fewest, most = count_nodes(self.spec)
        seen = [run.nodes for run in runs if run.fixed and fewest <= run.nodes <= most]
        return seen[-1] if seen and fewest < most else 0

    def find_wanted(self, before: Sequence[Run]) -> int:
        """Return how many nodes this run has to wait for; 0 where it may begin."""
        fixed = self.find_fixed(before)
        return 0 if fixed == self.nodes else fixed

    def write(self, folder: Path, job: str) -> tuple[Path, JobSpec]:
        """Write the job's document for this run; return its path, and the job."""
        fitted = fit_nodes(self.spec, self.nodes)
        if fitted is self.spec:
            return folder / "job.json", fitted
        path = folder / f"job-{job}.json"
        path.write_bytes(msgspec.json.encode(fitted))
        return path, fitted
