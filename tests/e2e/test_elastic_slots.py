"""A slot of an elastic job whose processes always end: the others train on, and status says so.

The data of slot 1 cannot be read while a file `broken` is there.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job

SCRIPT = """
import os, time, torch, perdure.elastic
from pathlib import Path

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if os.environ["LOCAL_RANK"] == "1" and Path("broken").exists():
            {how}
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.zeros(1)

Path(f"process-{{os.environ['LOCAL_RANK']}}-{{os.getpid()}}").touch()
torch.manual_seed(0)

def note(step):
    mine = Path(f"world.{{os.getpid()}}")  # Every rank notes it.
    mine.write_text(f"{{len(step.world)}} {{step.step}}")
    os.replace(mine, "world")
    time.sleep(0.0 if Path("hurry").exists() else 0.05)

perdure.elastic.train(
    blocks=torch.nn.Linear(4, 1),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    dataset=Data(),
    loss=torch.nn.functional.mse_loss,
    global_batch=8,
    micro_batch=2,
    steps=3000,
    on_step=note,
)
"""
RAISES = 'raise OSError(f"shard 17 cannot be read by process {os.getpid()}")'


def world(job: Job) -> int:
    """Return the members of the newest step."""
    try:
        return int((job.home / "world").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [RAISES, pytest.param("os._exit(3)", marks=pytest.mark.long)])
def test_a_slot_whose_processes_always_end_stays_empty_until_it_is_restored(
    start: Callable[..., Job], tmp_path: Path, how: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(how=how))
    job = start("el", "-n", "2", "--max-restarts", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: world(job) == 2, "both slots training")
    (tmp_path / "broken").touch()
    job.wait_until(lambda: job.state().get("empty_slots"), "the slot given up")
    (row,) = job.state()["empty_slots"]
    assert (row["slot"], row["node"]) == (1, 0)
    assert len(list(tmp_path.glob("process-1-*"))) <= 5  # The first one, and those that failed.
    assert len(list(tmp_path.glob("process-0-*"))) == 1
    assert "Slot 1 of node 0 was left empty: " in job.cli("status", "el").stdout
    assert "`perdure node restore el 0` tries it again" in job.cli("status", "el").stdout
    (tmp_path / "broken").unlink()
    assert "gets new processes in slot 1" in job.cli("node", "restore", "el", "0").stdout
    job.wait_until(lambda: world(job) == 2, "both slots training again")
    job.wait_until(lambda: job.state()["empty_slots"][0]["over_s"], "word of it in the picture")
    assert "was left empty" not in job.cli("status", "el").stdout
    assert len(list(tmp_path.glob("process-0-*"))) == 1
    assert job.report()["state"] == "running"


@pytest.mark.slow
@pytest.mark.long
def test_the_end_says_that_a_slot_was_empty(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(how=RAISES))
    (tmp_path / "broken").touch()
    job = start("el", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: job.state().get("empty_slots"), "the slot given up")
    (tmp_path / "hurry").touch()
    assert job.wait() == 0, job.text()[-3000:]
    assert "el: done after " in job.text()
    assert " on 1 of 2 ranks, 3000 steps" in job.text()
    assert "Slot 1 of node 0 was left empty: " in job.text()
