"""The kernel's out-of-memory killer, for real: in a cgroup with a limit, where one can be made."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.worker.system.cgroups import Place, list_parent_cgroups
from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]
LIMIT_MIB = 2048
GREEDY = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    taken = []
    while os.environ["RANK"] == "1":
        taken.append(b"x" * (32 << 20))
    time.sleep(86_400)
"""

pytestmark = pytest.mark.skipif(
    not list_parent_cgroups(), reason="no memory cgroup that this process may make a child of"
)


@pytest.fixture
def limited() -> Iterator[Place]:
    """A cgroup with a limit, removed afterwards."""
    parent = list_parent_cgroups()[0]
    place = Place(os.path.join(parent.path, f"test-oom-{os.getpid()}"), parent.version)
    os.mkdir(place.path)
    try:
        Path(place.file("limit")).write_text(str(LIMIT_MIB << 20))
        yield place
    finally:
        for pid in Path(place.path, "cgroup.procs").read_text().split():
            Path(parent.path, "cgroup.procs").write_text(pid)
        os.rmdir(place.path)


@contextlib.contextmanager
def inside(place: Place) -> Iterator[None]:
    """Let this process start children in the cgroup `place`."""
    parent = list_parent_cgroups()[0]
    Path(place.path, "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        Path(parent.path, "cgroup.procs").write_text(str(os.getpid()))


def check(job: Job) -> None:
    """The first recovery, the verdict and the exit record all say what happened."""
    recovery = next(row for row in job.report()["recoveries"] if row["rung"] == "restart")
    assert (recovery["culprit"], recovery["cause"][:8]) == ("rank 1", "OOM kill"), recovery
    verdicts = json.loads(job.cli("diagnose", job.name, "--json").stdout)["verdicts"]
    assert verdicts[0]["evidence"]["oom"] is True
    assert "OOM kill" in verdicts[0]["reason"]
    record = json.loads((job.folder / "exits" / "g0-r1.json").read_text())
    assert (record["signal"], record["oom"]) == (9, True)


def test_a_rank_beyond_the_limit_of_the_jobs_cgroup(
    start: Start, tmp_path: Path, limited: Place
) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    with inside(limited):
        job = start("greedy", "-n", "2", "--cold", str(script))
    assert job.wait() == 0, job.text()
    check(job)


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.long)])
def test_injected_on_a_script_that_declares_no_steps(
    start: Start, tmp_path: Path, cold: bool
) -> None:
    options = ["--cold"] if cold else []
    end = tmp_path / "end"
    script = [
        str(SCRIPTS / "allreduce.py"),
        "--steps",
        "1000000",
        "--end",
        str(end),
        "--pace-s",
        "0.1",
    ]
    job = start("inject", "-n", "2", *options, *script)
    job.wait_state("running")
    keeper = job.pid_of("perdure keeper")
    answer = json.loads(job.cli("inject", "inject", "oom", "--rank", "1", "--json").stdout)
    assert answer["note"].startswith("killed by the kernel at "), answer
    job.wait_until(lambda: job.state().get("generation", 0) >= 1, "the next generation")
    end.touch()
    assert job.wait() == 0, job.text()
    check(job)
    for parent in list_parent_cgroups():
        assert list(Path(parent.path).glob(f"perdure-{keeper}-*")) == []
