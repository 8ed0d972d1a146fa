"""What goes wrong at the store at which ranks meet restarts the world at once, and blames no rank.

torch's store has no login: any user of the machine can end a meeting by writing into it.
"""

import re
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

me = os.environ["TORCHELASTIC_RESTART_COUNT"] + "-" + os.environ["RANK"]
with open(f"port-{me}", "w") as file:
    file.write(os.environ["MASTER_PORT"])
open(f"began-{me}", "w").close()
while not os.path.exists(f"go-{me}"):
    time.sleep(0.01)
dist.init_process_group("gloo")
open(f"met-{me}", "w").close()
while not os.path.exists("end"):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""
LOST = "lost its connection to the store"


def wait_for(job: Job, what: str, life: int) -> None:
    """Wait until both ranks of this life have noted it."""
    paths = [job.home / f"{what}-{life}-{rank}" for rank in range(2)]
    job.wait_until(lambda: all(path.exists() for path in paths), f"{what} in life {life}")


def let_go(job: Job, life: int, *ranks: int) -> None:
    for rank in ranks:
        (job.home / f"go-{life}-{rank}").touch()


def find_store(job: Job, life: int) -> tuple[psutil.Process, str, int]:
    """Return the store of this life, and where it listens. Another one may stand by."""
    port = int((job.home / f"port-{life}-0").read_text())
    found: list[tuple[psutil.Process, str, int]] = []

    def look() -> bool:
        found[:] = [
            (store, one.laddr.ip, port)
            for store in job.find("perdure store")
            for one in store.net_connections()
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        ]
        return bool(found)

    job.wait_until(look, f"the store of life {life}")
    return found[0]


def wait_in_store(job: Job, life: int) -> torch.distributed.TCPStore:
    """Let rank 0 wait for rank 1; return a stranger's connection to the store."""
    _, host, port = find_store(job, life)
    store = torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    before = store.num_keys()
    let_go(job, life, 0)
    job.wait_until(lambda: store.num_keys() > before, "what rank 0 has written")
    return store


def test_what_goes_wrong_at_the_store_blames_no_rank(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    job = start("met", "-n", "2", "meeting.py")

    wait_for(job, "began", 0)  # It dies before ranks meet.
    find_store(job, 0)[0].kill()
    let_go(job, 0, 0, 1)

    wait_for(job, "began", 1)  # It dies while a rank waits in it.
    wait_in_store(job, 1)
    find_store(job, 1)[0].kill()
    reasons = [LOST, LOST]

    wait_for(job, "began", 2)
    if hasattr(torch.distributed.TCPStore, "list_keys"):  # The test writes into it.
        store = wait_in_store(job, 2)
        for key in store.list_keys():
            store.set(key, "garbage")
        let_go(job, 2, 1)
        # Whichever rank fails first takes the other's connection along.
        reasons.append("could not form a process group with the others|lost its connection to")

    life = len(reasons)
    wait_for(job, "began", life)  # It is stopped while a rank waits in it, and goes on.
    wait_in_store(job, life)
    find_store(job, life)[0].suspend()
    let_go(job, life, 1)
    wait_for(job, "met", life)
    (job.home / "end").touch()
    assert job.wait() == 0
    recoveries = job.report()["recoveries"]
    for recovery, reason in zip(recoveries, reasons, strict=True):
        assert re.search(reason, recovery["reason"])
        assert not recovery["culprit"].startswith("rank")
    assert find_blamed(job) == []
