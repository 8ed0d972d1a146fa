"""What a job on one machine listens on: nothing that another machine could reach.

Jobs that do more than this are asked as well: `test_last_work` has a plain one, and
`test_elastic_slots` an elastic one.
"""

import ipaddress
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job

pytestmark = pytest.mark.torch
Start = Callable[..., Job]
FOR_EVER = "10000000"


def list_open(job: Job) -> list[str]:
    """Return what processes of the job listen on beyond this machine's loopback."""
    found = []
    for process in job.find(""):
        try:
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN and not is_loopback(one.laddr.ip):
                    found.append(f"{one.laddr} of {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def count_listeners(job: Job) -> int:
    count = 0
    for process in job.find("rank"):
        count += sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("inet"))
    return count


@pytest.mark.long
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_plain_job_listens_on_loopback_alone(start: Start, tmp_path: Path, cold: bool) -> None:
    words = ["--cold"] if cold else []
    script = [str(SCRIPTS / "allreduce.py"), "--steps", FOR_EVER]
    job = start("plain", "-n", "2", *words, *script)
    job.wait_until(lambda: count_listeners(job) >= 2, "gloo on both ranks")
    assert list_open(job) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "cold"), [("train_paced.py", False), ("elastic.py", False), ("elastic.py", True)]
)
def test_a_job_that_trains_listens_on_loopback_alone(
    start: Start, tmp_path: Path, script: str, cold: bool
) -> None:
    trail = tmp_path / "trail"
    trail.mkdir()
    words = ["--trail", str(trail), "--steps", FOR_EVER]
    job = start("trains", "-n", "2", *["--cold"][: int(cold)], str(SCRIPTS / script), *words)
    job.wait_step(2)
    assert list_open(job) == []


def test_a_torchft_job_listens_on_loopback_alone(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    log = tmp_path / "log"
    log.mkdir()
    words = ("--torchft", "--replicas", "2", "-n", "1")
    job = start("ft", *words, str(SCRIPTS / "torchft_groups.py"), FOR_EVER, str(log))
    job.wait_until(
        lambda: all((log / f"group-{group}.jsonl").exists() for group in range(2)), "steps"
    )
    assert list_open(job) == []
