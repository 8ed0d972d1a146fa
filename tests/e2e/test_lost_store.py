"""What goes wrong at the store at which ranks meet restarts the world at once, and blames no rank.

torch's store has no login: any user of the machine can end a meeting by writing into it.
"""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed

from tests.e2e.harness import Job
from tests.e2e.test_open_ports import find_blamed

pytestmark = [pytest.mark.torch, pytest.mark.slow]
MEETING = """
import os, time
import torch, torch.distributed as dist

def note(what):
    open(f"{what}-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}", "w").close()

note("began")
while not os.path.exists(f"go-{os.environ['RANK']}") and not os.path.exists("began-1-0"):
    time.sleep(0.01)
note("went")
dist.init_process_group("gloo")
note("met")
while not os.path.exists("end"):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def job(start: Callable[..., Job], tmp_path: Path) -> Job:
    """Return a job of two ranks that wait to meet in their first life."""
    (tmp_path / "meeting.py").write_text(MEETING)
    job = start("met", "-n", "2", "meeting.py")
    wait_for(job, "began-0-0", "began-0-1")
    return job


def wait_for(job: Job, *names: str) -> None:
    """Wait until the script has noted these."""
    job.wait_until(lambda: all((job.home / name).exists() for name in names), str(names))


def check_blameless(job: Job, reason: str) -> None:
    """The ranks of the next life meet, and perdure blames no rank of the first one."""
    wait_for(job, "met-1-0", "met-1-1")
    (job.home / "end").touch()
    assert job.wait() == 0
    (recovery,) = job.report()["recoveries"]
    assert reason in recovery["reason"]
    assert not recovery["culprit"].startswith("rank")
    assert find_blamed(job) == []


def test_a_store_that_dies_before_ranks_meet_ends_their_generation(job: Job) -> None:
    os.kill(job.pid_of("perdure store"), signal.SIGKILL)
    (job.home / "go-0").touch()
    (job.home / "go-1").touch()
    check_blameless(job, "lost its connection to the store")


def test_a_store_that_dies_while_a_rank_waits_in_it_ends_the_generation(job: Job) -> None:
    wait_in_store(job)
    os.kill(job.pid_of("perdure store"), signal.SIGKILL)
    check_blameless(job, "lost its connection to the store")


def test_a_store_that_is_stopped_while_a_rank_waits_in_it_goes_on(job: Job) -> None:
    wait_in_store(job)
    os.kill(job.pid_of("perdure store"), signal.SIGSTOP)
    (job.home / "go-1").touch()
    wait_for(job, "met-0-0", "met-0-1")
    (job.home / "end").touch()
    assert job.wait() == 0
    assert job.report()["recoveries"] == []
    assert find_blamed(job) == []


def test_who_writes_into_the_store_makes_perdure_blame_no_rank(job: Job) -> None:
    if not hasattr(torch.distributed.TCPStore, "list_keys"):
        pytest.skip("this torch cannot list the keys")
    store = wait_in_store(job)
    for key in store.list_keys():
        store.set(key, "garbage")
    (job.home / "go-1").touch()
    check_blameless(job, "could not form a process group with the others")


def wait_in_store(job: Job) -> torch.distributed.TCPStore:
    """Let rank 0 wait for rank 1; return a stranger's connection to the store."""
    (server,) = job.find("perdure store")
    (listener,) = [
        one
        for one in psutil.Process(server.pid).net_connections()
        if one.status == psutil.CONN_LISTEN
    ]
    host, port = listener.laddr
    store = torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    before = store.num_keys()
    (job.home / "go-0").touch()
    job.wait_until(lambda: store.num_keys() > before, "what rank 0 has written")
    return store
