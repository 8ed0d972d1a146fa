"""A slot of an elastic job whose processes always end: the others train on, and status says so.

The data of slot 1 cannot be read while a file `broken` is there. What a new process takes over has
NumPy's numbers in it, which torch does not load as data.
"""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job
from tests.e2e.test_listeners import list_open

SCRIPT = """
import os, time, numpy, torch, perdure.elastic
from pathlib import Path

class Model(torch.nn.Linear):
    def get_extra_state(self):
        return numpy.arange(3)

    def set_extra_state(self, state):
        pass

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
    time.sleep(0.0 if Path("hurry").exists() else 0.2)

perdure.elastic.train(
    blocks=Model(4, {width}),
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda k: numpy.cos(k / 1e3)),
    dataset=Data(),
    loss=lambda output, target: output.square().mean(),
    global_batch=8,
    micro_batch=2,
    steps=3000,
    on_step=note,
)
"""
RAISES = 'raise OSError(f"shard 17 cannot be read by process {os.getpid()}")'


def read_newest(job: Job) -> tuple[int, int]:
    """Return how many members the newest step had, and its number."""
    try:
        members, step = (job.home / "world").read_text().split()
        return int(members), int(step)
    except (OSError, ValueError):
        return 0, -1


def world(job: Job) -> int:
    """Return the members of the newest step."""
    return read_newest(job)[0]


def restore(job: Job) -> None:
    """Try the slot that was given up again, and wait until it trains."""
    assert "gets new processes in slot 1" in job.cli("node", "restore", "el", "0").stdout
    job.wait_until(lambda: world(job) == 2, "both slots training again")
    job.wait_until(lambda: job.state()["empty_slots"][-1]["over_s"], "word of it in the picture")


@pytest.mark.slow
@pytest.mark.parametrize("how", [RAISES, pytest.param("os._exit(3)", marks=pytest.mark.long)])
def test_a_slot_whose_processes_always_end_stays_empty_until_it_is_restored(
    start: Callable[..., Job], tmp_path: Path, how: str
) -> None:
    """At last a process that comes with another model is refused, and the other one trains on."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(how=how, width=1))
    job = start("el", "-n", "2", "--max-restarts", "2", str(script))
    job.wait_until(lambda: world(job) == 2, "both slots training")
    assert list_open(job) == []
    (tmp_path / "broken").touch()
    job.wait_until(lambda: job.state().get("empty_slots"), "the slot given up")
    (row,) = job.state()["empty_slots"]
    assert (row["slot"], row["node"]) == (1, 0)
    assert len(list(tmp_path.glob("process-1-*"))) <= 5  # The first one, and those that failed.
    assert len(list(tmp_path.glob("process-0-*"))) == 1
    assert "Slot 1 of node 0 was left empty: " in job.cli("status", "el").stdout
    assert "`perdure node restore el 0` tries it again" in job.cli("status", "el").stdout
    (tmp_path / "broken").unlink()
    restore(job)
    assert "was left empty" not in job.cli("status", "el").stdout

    script.write_text(SCRIPT.format(how=how, width=3))
    newest = max(tmp_path.glob("process-1-*"), key=lambda path: path.stat().st_mtime_ns)
    os.kill(int(newest.name.rpartition("-")[2]), signal.SIGKILL)
    job.wait_until(lambda: not job.state()["empty_slots"][-1]["over_s"], "the slot given up again")
    said = "ConfigError: elastic: .*parameter weight differs: float32"
    assert re.search(said, job.text()), job.text()[-3000:]
    now = read_newest(job)[1]
    job.wait_until(lambda: read_newest(job)[1] > now + 5, "more steps")
    script.write_text(SCRIPT.format(how=how, width=1))
    restore(job)
    assert len(list(tmp_path.glob("process-0-*"))) == 1
    assert job.report()["state"] == "running"
    assert job.state()["generation"] == 0


@pytest.mark.slow
@pytest.mark.long
def test_the_end_says_that_a_slot_was_empty(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(how=RAISES, width=1))
    (tmp_path / "broken").touch()
    job = start("el", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: job.state().get("empty_slots"), "the slot given up")
    (tmp_path / "hurry").touch()
    assert job.wait() == 0, job.text()[-3000:]
    assert "el: done after " in job.text()
    assert " on 1 of 2 ranks, 3000 steps" in job.text()
    assert "Slot 1 of node 0 was left empty: " in job.text()
