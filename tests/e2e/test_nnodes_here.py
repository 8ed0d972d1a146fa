"""`perdure run --nnodes N` on one machine: who comes late, and who comes too early."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.box import find_port
from tests.e2e.harness import Job

pytestmark = pytest.mark.slow
Start = Callable[..., Job]


@pytest.fixture
def pair(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Return a function that types one node's command, with further options."""
    monkeypatch.setenv("PERDURE_RDZV_SECRET", "a-secret-of-this-test-0123456789")
    script = tmp_path / "ends.py"
    script.write_text('print("done", flush=True)\n')
    where = f"127.0.0.1:{find_port()}"
    command = ["--cold", "--nnodes", "2", "--rdzv-endpoint", where, "--rdzv-id", "pair"]
    output = tmp_path / "pair.out"

    def type_command(node: int, *options: str) -> Job:
        job = start("pair", *command, "--node-rank", str(node), *options, str(script))
        if node == 0:
            job.output = output.rename(tmp_path / "first.out")
        return job

    return type_command


@pytest.mark.long
def test_the_first_node_says_who_has_not_come(pair: Callable[..., Job]) -> None:
    first = pair(0, "--rdzv-conf", "join_timeout=3600")
    said = "1 of 2 nodes are here; the same command on the others brings them"
    first.wait_until(lambda: said in first.text(), "word of the other one")


def test_the_first_node_gives_up_in_time(pair: Callable[..., Job]) -> None:
    first = pair(0, "--rdzv-conf", "join_timeout=1")
    assert first.wait() == 3, first.text()
    assert "not all 2 nodes have come within 1 s" in first.text()


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
