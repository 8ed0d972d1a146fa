"""A hang that is left alone for half an hour, and somebody who says that it shall not be."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.service.jobfiles import read_mirror
from perdure.service.jobfolders import paths_of
from perdure.telemetry.verdicts import list_verdicts
from tests.e2e.harness import Job

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
        Path("hung").touch()
        time.sleep(10_000)
"""


def test_how_long_a_hang_is_left_alone_is_set_while_it_lasts(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text("[checkpoint]\nevery_steps = 10\n")
    job = start("job", "-n", "2", "-c", str(tmp_path / "job.toml"), str(tmp_path / "train.py"))

    def find_hangs() -> list[str]:
        entries = list(read_mirror(paths_of(str(job.home / "state"), job.name)) or ())
        found = [v for v in list_verdicts(entries) if v.kind.endswith("Hang")]
        return [str(v.culprit) for v in found]

    job.wait_until(find_hangs, "a verdict")
    assert job.state()["generation"] == 0, "it may be evaluating"
    began_s = time.monotonic()
    told = json.loads(job.cli("set", "job", "detect.hang_action_s=3", "--json").stdout)
    assert time.monotonic() - began_s < 20.0
    assert told["applied_at_step"] is None, "ranks that hang come to no step"
    job.wait_until(lambda: job.state()["generation"] == 1, "another generation")
    job.wait_step(45)
    assert find_hangs()[0] == "rank 1"
    assert job.state()["settings"]["detect.hang_action_s"] == 3.0
    job.cli("stop", "job")
    assert job.wait() == 0, job.text()
