"""States of an elastic job that torch does not load as data: NumPy's numbers, and an open file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job

SCRIPT = """
import io, os, time, numpy, torch, perdure.elastic
from pathlib import Path

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.zeros(1)

class Model(torch.nn.Linear):
    def get_extra_state(self):
        return EXTRA

    def set_extra_state(self, state):
        pass

def note(step):
    if step.first:
        Path("step.tmp").write_text(f"{step.step} {len(step.world)}")
        os.replace("step.tmp", "step")
    time.sleep(0.05)

torch.manual_seed(0)
perdure.elastic.train(
    blocks=Model(4, 1),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda k: numpy.cos(k / 1e3)),
    dataset=Data(),
    loss=torch.nn.functional.mse_loss,
    global_batch=8,
    micro_batch=2,
    steps=100_000,
    on_step=note,
)
"""


def world(job: Job) -> int:
    try:
        return int((job.home / "step").read_text().split()[1])
    except (OSError, ValueError):
        return 0


@pytest.mark.slow
def test_members_share_a_rate_that_numpy_has_computed(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("EXTRA", "numpy.arange(3)"))
    job = start("el", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: world(job) == 2, "two members")
    os.kill(job.find("perdure rank el g0 r1")[0].pid, 9)
    job.wait_until(lambda: world(job) == 1, "a member alone")
    job.wait_until(lambda: world(job) == 2, "two members again")
    assert not job.state()["empty_slots"]


@pytest.mark.slow
def test_a_state_that_cannot_be_sent_is_refused_by_its_name_before_the_first_step(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("EXTRA", "io.BytesIO(b'x')"))
    (tmp_path / "job.toml").write_text("[checkpoint]\nallow_pickle = true\n")
    job = start("el", "-c", "job.toml", "-n", "2", str(tmp_path / "train.py"))
    assert job.wait() == 1
    said = "elastic: model._extra_state is of type _io.BytesIO, and no other rank could be sent it"
    assert said in job.text()
    assert not (tmp_path / "step").exists()
