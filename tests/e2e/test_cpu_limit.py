"""A rank that the CPU limit of its cgroup stops, as a pod's `resources.limits.cpu` does."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from perdure.service.jobfiles import read_mirror
from perdure.service.jobfolders import paths_of
from perdure.telemetry.verdicts import list_verdicts
from tests.e2e.harness import Job
from tests.waiting import wait_until

# Serial: the limit is a third of what the rank used before, which other work on the cores changes.
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.long]
SCRIPT = """
import time, torch, torch.distributed as dist, perdure
run = perdure.init()
dist.init_process_group("gloo")
layer = torch.nn.Linear(200, 200)
model = torch.nn.parallel.DistributedDataParallel(layer)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
batch = torch.randn(200, 200)
for step in run.steps(100000):
    until_s = time.thread_time() + 0.03
    while time.thread_time() < until_s:
        batch @ batch
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.03)
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """Return a cgroup without a limit yet."""
    folder = Path(f"/sys/fs/cgroup/cpu/perdure-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of one's own: {error}")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "end of the cgroup's processes")
    folder.rmdir()


def test_the_verdict_on_a_rank_that_its_cpu_limit_stops_names_the_limit(
    limited: Path, start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = start("job", "-n", "1", "--nodes", "2", str(tmp_path / "train.py"))
    job.wait_step(150)
    (rank,) = (p for p in job.find("perdure rank") if "r1:" in " ".join(p.cmdline()))
    began, used_s = time.monotonic(), sum(rank.cpu_times()[:2])
    time.sleep(3.0)
    share = (sum(psutil.Process(rank.pid).cpu_times()[:2]) - used_s) / (time.monotonic() - began)
    (limited / "cpu.cfs_quota_us").write_text(str(int(max(share / 3, 0.02) * 100_000)))
    (limited / "cgroup.procs").write_text(str(rank.pid))

    def said() -> list[str]:
        entries = list(read_mirror(paths_of(str(job.home / "state"), job.name)) or ())
        found = [v for v in list_verdicts(entries) if v.kind == "Straggler"]
        return [v.reason for v in found if str(v.culprit) in ("rank 1", "node 1")]

    job.wait_until(lambda: any("the CPU limit of its cgroup stopped" in r for r in said()), "word")
    job.cli("stop", "job")
    assert job.wait() == 0, job.text()
