"""What a stranger does to connections between healthy ranks restarts the world, and blames none."""

import contextlib
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.test_open_ports import find_blamed
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def cut_connections(job: Job) -> bool:
    """Destroy the connections between ranks; return whether the kernel has done it."""
    pids = {process.pid: process for process in job.find("perdure rank")}
    ends = {}
    for process in pids.values():
        for one in process.net_connections("tcp"):
            if one.status == "ESTABLISHED" and one.raddr:
                ends[one.laddr] = one.raddr
    cut = False
    for here, there in ends.items():
        if ends.get(there) != here:
            continue  # Only the other end of a rank's connection is a rank's as well.
        command = ["ss", "-K", "src", here.ip, "sport", "=", str(here.port), "dport", "=",
                   str(there.port)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        cut |= str(there.port) in done.stdout
    return cut


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ss"), reason="needs root and ss")
def test_a_cut_connection_restarts_the_world_and_blames_no_rank(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    trail.mkdir()
    job = start(
        "cut", "-n", "2", str(SCRIPTS / "train_paced.py"), "--trail", str(trail),
        "--steps", "100000000",
    )  # fmt: skip
    job.wait_step(5)
    if not cut_connections(job):
        pytest.skip("this kernel cannot destroy a connection")
    job.wait_until(lambda: job.state().get("restarts") == 1, "a restart")
    job.wait_state("running")
    (incident,) = job.report()["recoveries"]
    assert incident["culprit"].startswith("a connection of rank ")
    told = job.cli("diagnose", "cut").stdout
    assert "Crash of the job" in told
    assert "Crash of rank" not in told


def test_connections_that_take_all_descriptors_of_a_rank_blame_no_rank(
    start: Callable[..., Job],
) -> None:
    script = str(SCRIPTS / "allreduce.py")
    job = start("flooded", "-n", "2", script, "--steps", "100000000")
    job.wait_state("running")
    job.wait_until(lambda: len(list_doors(job)) == 2, "gloo's ports")
    (rank, place), *_ = list_doors(job)
    limit = rank.num_fds() + 50
    resource.prlimit(rank.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(place, PATIENCE_S))
        job.wait_until(lambda: job.state().get("restarts") == 1, "a restart")
    job.wait_state("running")
    (incident,) = job.report()["recoveries"]
    assert incident["culprit"].startswith(("the port of rank ", "a connection of rank "))
    assert find_blamed(job) == []


def list_doors(job: Job) -> list[tuple[psutil.Process, tuple[str, int]]]:
    """Return each rank and the port at which gloo listens in it."""
    return [
        (rank, (one.laddr.ip, one.laddr.port))
        for rank in job.find("perdure rank")
        for one in rank.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
