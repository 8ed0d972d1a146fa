"""Fixtures of the end-to-end tests: every job is ended, and leaves no process behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job
from tests.waiting import PATIENCE_S


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a job; afterwards nothing of it may be left."""
    jobs: list[Job] = []

    def start_job(name: str, *options: str, timeout_s: float = PATIENCE_S) -> Job:
        jobs.append(Job(tmp_path, name, *options, timeout_s=timeout_s))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()
    left = [line for job in jobs for line in job.leftovers()]
    assert not left, left
