"""Strangers attack each port that a live job opens; the job trains on and tells them nothing."""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow]
SECRET_BYTES = 4096
"""A stranger who gets more than this has got part of a state."""
WIDTH = "300000"
"""Width of the hidden layer. Its state is too large to be sent within a join."""


def find_ports(job: Job) -> dict[int, str]:
    """Return the TCP ports on which the job listens, and the address of each."""
    found: dict[int, str] = {}
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found[one.laddr.port] = one.laddr.ip
    return found


def find_ranks(job: Job) -> dict[int, int]:
    """Return the pid of each rank."""
    return {row["rank"]: row["pid"] for row in job.state()["ranks"]}


def exchange(port: int, data: bytes, *, reset: bool = False) -> int:
    """Send `data` to a port; return how many bytes came back before the end of the connection."""
    count = 0
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 2.0) as sock:
        sock.settimeout(0.5)
        sock.sendall(data)
        if reset:
            linger = struct.pack("ii", 1, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return 0
        while block := sock.recv(1 << 16):
            count += len(block)
    return count


GARBAGE = (
    os.urandom(4096),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 64,
    b"\x16\x03\x01\x02\x00" + bytes(512),
    b'{"type":"Ask","generation":0,"member":1}\n{"type":"Take","step":1,"share":0,"shares":0}\n',
)


@contextlib.contextmanager
def attack(find: Callable[[], list[int]]) -> Iterator[dict[int, int]]:
    """Attack the ports that `find` names, again and again, until the end of the block.

    Yields the most bytes that each port has sent to a stranger.
    """
    got: dict[int, int] = {}
    over = threading.Event()

    def run() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            for port in find():
                for data in GARBAGE:
                    got[port] = max(got.get(port, 0), exchange(port, data))
                    exchange(port, data, reset=True)
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(("127.0.0.1", port), 2.0))
            for sock in held[:-30]:
                sock.close()
            del held[:-30]
            over.wait(0.05)
        for sock in held:
            sock.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield got
    finally:
        over.set()
        thread.join(60.0)


KINDS: dict[str, tuple[str, ...]] = {
    "plain": ("-n", "2", str(SCRIPTS / "allreduce.py"), "--steps", "100000000", "--end", "{end}"),
    "resumable": (
        "-n", "2", str(SCRIPTS / "train_paced.py"), "--trail", "{trail}", "--steps", "100000000",
    ),
    "elastic": (
        "-n", "2", str(SCRIPTS / "elastic.py"), "--trail", "{trail}", "--steps", "100000000",
        "--pace-s", "0.02",
    ),
    "nodes": (
        "-n", "1", "--nodes", "2", str(SCRIPTS / "train_paced.py"), "--trail", "{trail}",
        "--steps", "100000000",
    ),
    "torchft": (
        "--torchft", "--replicas", "2", "-n", "1", str(SCRIPTS / "torchft_groups.py"), "100000000",
        "{trail}",
    ),
}  # fmt: skip


OFTEN = ("plain", "elastic")
"""Kinds that `make test` tries. `make campaign` tries the others."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.long) for kind in KINDS]
)
def test_no_stranger_at_a_port_ends_a_rank(
    kind: str, start: Callable[..., Job], tmp_path: Path
) -> None:
    if kind == "torchft":
        pytest.importorskip("torchft")
    trail, end = tmp_path / "trail", tmp_path / "end"
    trail.mkdir()
    words = [word.format(trail=trail, end=end) for word in KINDS[kind]]
    job = start("prey", *words)
    job.wait_state("running")
    job.wait_until(lambda: len(find_ranks(job)) == 2, "two ranks")
    if kind != "plain":
        job.wait_step(5)
    ranks, ports = find_ranks(job), find_ports(job)
    assert ports
    with attack(lambda: sorted(ports)) as got:
        job.wait_until(lambda: got.keys() >= ports.keys(), "an attack on each port")
        if kind != "plain":
            job.wait_step(job.state()["step"] + 20)
    assert max(got.values()) < SECRET_BYTES, got
    assert find_ranks(job) == ranks
    report = job.report()
    assert report["recoveries"] == []


def read_bodies(job: Job, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind in the job's journal."""
    path = job.folder / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    bodies = [json.loads(line)["body"] for line in lines if line.endswith("}")]
    return [body for body in bodies if body["type"] == kind]


@pytest.mark.long
def test_a_stranger_at_a_join_gets_no_state_and_hurts_nobody(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    job = start(
        "prey", "-n", "2", str(SCRIPTS / "elastic.py"), "--trail", str(trail),
        "--steps", "100000000", "--pace-s", "0.05", "--width", WIDTH,
    )  # fmt: skip
    job.wait_until(lambda: len(read_bodies(job, "RankJoined")) == 2, "two members")
    job.wait_step(5)
    donors = [body["feed"] for body in read_bodies(job, "RankJoined")]
    donor_ports = [int(address.rpartition(":")[2]) for address in donors]
    assert not set(donor_ports) & set(find_ports(job)), "no join is under way"
    survivor = find_ranks(job)[0]
    with attack(lambda: donor_ports) as got:
        os.kill(find_ranks(job)[1], 9)
        job.wait_until(lambda: read_bodies(job, "MemberReady"), "a rank that has followed")
        joined = read_bodies(job, "MemberReady")[0]["rank"]
        job.wait_until(lambda: joined in find_ranks(job), "the rank in the world")
        job.wait_step(job.state()["step"] + 5)
    assert max(got.values(), default=0) < SECRET_BYTES, got
    assert find_ranks(job)[0] == survivor
    assert [body["culprit"]["rank"] for body in read_bodies(job, "VerdictReached")].count(0) == 0
    wait_until(lambda: not set(donor_ports) & set(find_ports(job)), "a closed port")
