"""What ranks that are killed have in /dev/shm: helpers remove it, and the rest is named."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job

pytestmark = pytest.mark.slow

SEGMENT = """
import os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
name, rank, life = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == "0":
    kept = SharedMemory(name, create=True, size=1 << 16)
    if life == "0":
        untracked = SharedMemory(f"{name}-untracked", create=True, size=1 << 16)
        resource_tracker.unregister(untracked._name, "shared_memory")
print("life", life, "of", rank, flush=True)
time.sleep(86_400)
"""
TENSORS = """
import os, time, torch, torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
mp.set_sharing_strategy("file_system")
class Rows(Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i): return torch.ones(20000)
for number, _ in enumerate(DataLoader(Rows(), batch_size=4, num_workers=2)):
    if number == 3:
        life = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("life", life, "of", os.environ["RANK"], flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    for path in Path("/dev/shm").glob(f"{name}*"):
        path.unlink()


def tensors() -> set[str]:
    return {one for one in os.listdir("/dev/shm") if one.startswith("torch_")}


def crash(job: Job, life: int) -> None:
    """Kill rank 1, and wait until both ranks of the next life have come as far."""
    job.kill(f" g{life - 1} r1")
    lives = [f"life {life} of {rank}" for rank in range(2)]
    job.wait_until(lambda: all(one in job.text() for one in lives), "the next life")


def test_a_segment_of_a_killed_rank_is_gone_and_one_that_no_helper_removes_is_named(
    start: Callable[..., Job], tmp_path: Path, name: str
) -> None:
    (tmp_path / "train.py").write_text(SEGMENT)
    job = start("shm", "-n", "2", "--cold", str(tmp_path / "train.py"), name)
    job.wait_until(lambda: "life 0 of 0" in job.text() and "life 0 of 1" in job.text(), "ranks")
    crash(job, 1)
    job.cli("stop", "shm", "--now")
    job.wait()
    job.wait_until(lambda: not os.path.exists(f"/dev/shm/{name}"), "no segment")
    errors = [path.read_text() for path in job.folder.glob("logs/ranks/g*/rank-0.err")]
    assert f"ranks that ended left /dev/shm/{name}-untracked" in "".join(errors)


def test_tensors_of_killed_loaders_are_gone(start: Callable[..., Job], tmp_path: Path) -> None:
    before = tensors()
    (tmp_path / "train.py").write_text(TENSORS)
    job = start("tensors", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: "life 0 of 0" in job.text() and "life 0 of 1" in job.text(), "ranks")
    assert tensors() - before
    crash(job, 1)
    job.cli("stop", "tensors", "--now")
    job.wait()
    job.wait_until(lambda: not tensors() - before, "no tensors")
