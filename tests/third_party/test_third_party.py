"""Libraries that perdure did not write, run unmodified; those that save resume after a SIGKILL.

The scripts beside this file only use the libraries' public interfaces. Published training scripts
were tried by hand: docs/third-party.md.
"""

import importlib.util
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.box import find_port
from tests.e2e.harness import Job
from tests.waiting import wait_until

SCRIPTS = Path(__file__).resolve().parent / "scripts"
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.torch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts a job; afterwards nothing of it may be left."""
    jobs: list[Job] = []

    def start_job(name: str, *options: str) -> Job:
        jobs.append(Job(tmp_path, name, *options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()
    assert [line for job in jobs for line in job.leftovers()] == []


def steps_of(job: Job) -> list[int]:
    return [int(step) for step in re.findall(r"^\[rank 0\] step (\d+)$", job.text(), re.MULTILINE)]


@pytest.mark.parametrize(
    ("library", "script"),
    [
        ("transformers", "hf_trainer.py"),
        pytest.param("accelerate", "use_accelerate.py", marks=pytest.mark.long),
        pytest.param("lightning", "use_lightning.py", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_librarys_own_checkpoint(
    start: Callable[..., Job], tmp_path: Path, library: str, script: str
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install -e .[thirdparty]")
    out = tmp_path / "out"
    out.mkdir()
    options = ["--out", str(out), "--steps", "60", "--hold-at", "28"]
    job = start(library, "-n", "2", str(SCRIPTS / script), *options)
    job.wait_until(lambda: 25 in steps_of(job), "step 25")
    job.kill(f"perdure rank {library} g0 r1")
    (out / "go").touch()
    assert job.wait() == 0, job.text()[-4000:]
    assert "finished at step 60" in job.text()
    steps = steps_of(job)
    (again,) = [step for before, step in pairwise(steps) if step <= before]
    assert again in (20, 21, 30, 31), f"not from a checkpoint: {steps}"
    report = job.report()
    (recovery,) = [row for row in report["recoveries"] if row["rung"] == "restart"]
    assert recovery["culprit"] == "rank 1"
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.02, report["ledger"]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """torchft's own, on a port of the system's choice."""
    program = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("torchft is not installed: pip install -e .[thirdparty]")
    port = find_port()
    process = subprocess.Popen(
        [program, "--bind", f"[::]:{port}", "--min_replicas", "2", "--join_timeout_ms", "5000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: answers(port), "lighthouse that listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_torchft_replica_groups(
    start: Callable[..., Job], lighthouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse)
    job = start("torchft", "-n", "2", str(SCRIPTS / "use_torchft.py"), "--steps", "30")
    assert job.wait() == 0, job.text()[-4000:]
    assert job.text().count("finished at step 30") == 2
