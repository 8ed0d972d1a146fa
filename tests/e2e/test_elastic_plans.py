"""Members of an elastic job with another plan: a newcomer, and a resume."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Job

SCRIPT = """
import os, time, torch, perdure.elastic
from pathlib import Path

class Data:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.zeros(1)

torch.manual_seed(0)
LENGTH = int(Path("length").read_text())

def note(step):
    if step.first:
        Path("step.tmp").write_text(f"{step.step} {len(step.world)}")
        os.replace("step.tmp", "step")
    time.sleep(0.05)

perdure.elastic.train(
    blocks=[torch.nn.Linear(4, WIDTH)] if SHARD else torch.nn.Linear(4, WIDTH),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    dataset=Data(),
    loss=lambda output, target: output.square().mean(),
    global_batch=8,
    micro_batch=2,
    steps=100_000,
    on_step=note,
    shard=SHARD,
)
"""


def write(
    folder: Path,
    *,
    length: int = 64,
    micro_batch: int = 2,
    width: int = 1,
    shard: int | None = None,
    steps: int = 100_000,
    optimizer: str = "SGD",
) -> None:
    (folder / "length").write_text(str(length))
    text = SCRIPT.replace("micro_batch=2", f"micro_batch={micro_batch}")
    text = text.replace("WIDTH", str(width)).replace("SHARD", str(shard))
    text = text.replace("100_000", str(steps)).replace("optim.SGD", f"optim.{optimizer}")
    (folder / "train.py").write_text(text)


def step(job: Job) -> int:
    try:
        return int((job.home / "step").read_text().split()[0])
    except (OSError, ValueError):
        return -1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            {"length": 72},
            "the length of the dataset differs: 72 here, 64 on rank 0",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"micro_batch": 4},
            "the micro-batch differs: 4 here, 2 on rank 0",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"width": 3}, "parameter weight differs: float32", marks=pytest.mark.long
        ),  # `test_elastic_slots` has a short one.
        pytest.param(
            {"steps": 3},
            "the number of steps differs: 3 here, 100000 on rank 0",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"optimizer": "Adam"}, "the optimizer differs: Adam here, SGD", marks=pytest.mark.long
        ),
    ],
)
def test_a_newcomer_with_another_plan_is_refused_and_the_others_train_on(
    start: Callable[..., Job], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    write(tmp_path)
    job = start("el", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: step(job) >= 5, "five steps")
    write(tmp_path, **change)
    os.kill(job.find("perdure rank el g0 r1")[0].pid, signal.SIGKILL)
    job.wait_until(lambda: job.state().get("empty_slots"), "the slot given up")
    assert re.search(f"ConfigError: elastic: .*{said}", job.text()), job.text()[-3000:]
    now = step(job)
    job.wait_until(lambda: step(job) > now + 5, "more steps")
    write(tmp_path)
    job.cli("node", "restore", "el", "0")
    job.wait_until(lambda: (tmp_path / "step").read_text().endswith(" 2"), "both slots training")
    assert job.state()["generation"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, pytest.param(2, marks=pytest.mark.long)])
def test_a_resume_with_another_plan_says_what_changes_and_needs_consent(
    start: Callable[..., Job], tmp_path: Path, shard: int | None
) -> None:
    write(tmp_path, shard=shard)
    job = start("el", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: step(job) >= 5, "five steps")
    job.cli("stop", "el")
    job.wait()
    made = step(job)
    write(tmp_path, micro_batch=4, length=72, shard=shard)
    refused = start("el", "-n", "2", str(tmp_path / "train.py"))
    assert refused.wait() != 0
    words = "the length of the dataset was 64, is 72; the micro-batch was 2, is 4"
    assert f"has another plan: {words}" in refused.text()
    assert "set checkpoint.allow_other_plan to go on" in refused.text()
    assert step(job) == made
    (tmp_path / "job.toml").write_text("[checkpoint]\nallow_other_plan = true\n")
    again = start("el", "-c", "job.toml", "-n", "2", str(tmp_path / "train.py"))
    again.wait_until(lambda: step(job) > made + 5, "more steps")
    assert f"not exact from here on: {words}" in again.text()
    again.cli("stop", "el")
    again.wait()
    made = step(job)
    once_more = start("el", "-n", "2", str(tmp_path / "train.py"))  # Its plan is the newest one.
    once_more.wait_until(lambda: step(job) > made + 5, "more steps")


@pytest.mark.slow
@pytest.mark.long
def test_a_generation_from_memory_compares_its_plan(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """Both ranks are killed, so that no member is left to compare with."""
    write(tmp_path, shard=2)
    job = start("el", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: step(job) >= 25, "snapshots")
    write(tmp_path, shard=2, micro_batch=4)
    for rank in job.find("perdure rank el g0 r0") + job.find("perdure rank el g0 r1"):
        os.kill(rank.pid, signal.SIGKILL)
    assert job.wait() != 0, job.text()[-3000:]
    assert "has another plan: the micro-batch was 2, is 4" in job.text(), job.text()[-3000:]
