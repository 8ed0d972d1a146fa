"""A hang that is left alone for half an hour, and somebody who does not want to wait for that."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.service.jobfiles import read_mirror
from perdure.service.jobfolders import paths_of
from perdure.telemetry.verdicts import list_verdicts
from tests.e2e.harness import Job
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow
SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist, perdure
run = perdure.init()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run.register(model=model, optimizer=optimizer)
for step in run.steps(100000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    if run.rank == 1 and step == 30 and not Path("hung").exists():
        Path("hung.new").write_text(str(time.monotonic()))
        Path("hung.new").rename("hung")
        time.sleep(10_000)
"""


def hang(start: Callable[..., Job], folder: Path) -> tuple[Job, Callable[[], list[str]]]:
    """Return a job of which one rank hangs, as was found, and what tells who hangs."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.toml").write_text("[checkpoint]\nevery_steps = 10\n")
    job = start("job", "-n", "2", "-c", str(folder / "job.toml"), str(folder / "train.py"))

    job.wait_until((folder / "hung").exists, "the hang")
    hung_s = float((folder / "hung").read_text())

    def find_hangs() -> list[str]:
        entries = list(read_mirror(paths_of(str(job.home / "state"), job.name)) or ())
        found = [v for v in list_verdicts(entries) if v.kind.endswith("Hang")]
        return [str(v.culprit) for v in found if v.confirmed_s > hung_s]

    job.wait_until(find_hangs, "a verdict")
    assert job.state()["generation"] == 0, "it may be evaluating"
    return job, find_hangs


def test_how_long_a_hang_is_left_alone_is_set_while_it_lasts(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job, find_hangs = hang(start, tmp_path)
    told = json.loads(job.cli("set", "job", "detect.hang_action_s=3", "--json").stdout)
    assert told["applied_at_step"] is None, "ranks that hang come to no step"
    job.wait_until(lambda: job.state()["generation"] == 1, "another generation")
    job.wait_step(45)
    assert find_hangs()[0] == "rank 1"
    assert job.state()["settings"]["detect.hang_action_s"] == 3.0
    job.cli("stop", "job")
    assert job.wait() == 0, job.text()


@pytest.mark.long
def test_a_stop_that_waits_for_a_rank_that_hangs_says_so(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """That it hangs is said, and how to end it; what may be an evaluation is not killed for it."""
    job, find_hangs = hang(start, tmp_path)
    stop = subprocess.Popen(
        [sys.executable, "-m", "perdure", "stop", "job"],
        env=job.env, cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert stop.stderr is not None
    said = stop.stderr.readline()
    assert "rank 1: ComputeHang for " in said or "rank 1: CommHang for " in said, said
    assert "perdure stop job --now" in said
    assert job.process.poll() is None
    job.cli("stop", "job", "--now")
    assert job.wait() == 1, job.text()
    assert stop.wait(PATIENCE_S) == 0
    stop.stderr.close()
    assert find_hangs() == ["rank 1"]
