"""`perdure run --nnodes N` on one machine: who comes late, and who comes too early."""

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Job

pytestmark = pytest.mark.slow
Start = Callable[..., Job]


@pytest.fixture
def pair(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return a function that types one node's command, with further options."""
    monkeypatch.setenv("PERDURE_RDZV_SECRET", "a-secret-of-this-test-0123456789")
    script = tmp_path / "ends.py"
    script.write_text('print("done", flush=True)\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "pair"]
    output = tmp_path / "pair.out"

    def type_command(node: int, *options: str) -> Job:
        job = start("pair", *command, "--node-rank", str(node), *options, str(script))
        if node == 0:
            job.output = output.rename(tmp_path / "first.out")
        return job

    return type_command


def test_the_first_node_says_who_has_not_come_and_gives_up_in_time(
    pair: Callable[..., Job],
) -> None:
    first = pair(0, "--rdzv-conf", "join_timeout=7")
    assert first.wait() == 3, first.text()
    assert "1 of 2 nodes are here; the same command on the others brings them" in first.text()
    assert "not all 2 nodes have come within 7 s" in first.text()


def test_a_node_that_asks_as_soon_as_the_controller_hears_anything_has_its_place(
    pair: Callable[..., Job],
) -> None:
    first = pair(0)
    first.wait_until(lambda: first.find("perdure controller"), "a controller")
    supervisor = psutil.Process(first.process.pid)
    os.kill(supervisor.pid, signal.SIGSTOP)  # What it still has to say comes later than the other.
    try:
        second = pair(1)
        second.wait_until(lambda: "this machine is node 1 of pair" in second.text(), "a place")
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    assert (first.wait(), second.wait()) == (0, 0), first.text() + second.text()
