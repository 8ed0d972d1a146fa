"""A state of an elastic job that no other rank could be sent: an open file.

`test_elastic_slots` has one with NumPy's numbers, which can.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job

SCRIPT = """
import io, torch, perdure.elastic
from pathlib import Path

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.zeros(1)

class Model(torch.nn.Linear):
    def get_extra_state(self):
        return io.BytesIO(b'x')

    def set_extra_state(self, state):
        pass

perdure.elastic.train(
    blocks=Model(4, 1),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    dataset=Data(),
    loss=torch.nn.functional.mse_loss,
    global_batch=8,
    micro_batch=2,
    steps=100_000,
    on_step=lambda step: Path("step").touch(),
)
"""


@pytest.mark.slow
def test_a_state_that_cannot_be_sent_is_refused_by_its_name_before_the_first_step(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text("[checkpoint]\nallow_pickle = true\n")
    job = start("el", "-c", "job.toml", "-n", "1", "--cold", str(tmp_path / "train.py"))
    assert job.wait() == 1
    said = "elastic: model._extra_state is of type _io.BytesIO, and no other rank could be sent it"
    assert said in job.text()
    assert not (tmp_path / "step").exists()
