"""`perdure run --nnodes N`, the same command in several network namespaces: it is one job.

Each namespace is a node: an address of its own, a PERDURE_HOME of its own, and nothing shared but
a secret (and a folder for checkpoints, where one is lost and comes back).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS
from tests.lab.network import Lab, sh, why_not
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
SECRET = "no-wall-has-ears-but-0123456789"
ENDS = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
rank = int(os.environ["RANK"])
print("I am", rank, "of", os.environ["TORCHELASTIC_RUN_ID"], "PERDURE_RDZV_SECRET" in os.environ)
if rank == 1:
    while not os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), "told")):
        time.sleep(0.1)
    sys.exit(7)
time.sleep(86_400)
"""


class Node:
    """One namespace, and the command in it."""

    def __init__(self, lab: Lab, number: int, folder: Path) -> None:
        self.space, self.folder = lab.space(number), folder
        self.home, self.output = folder / f"home-{number}", folder / f"node-{number}.out"
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *words: str, secret: str = SECRET) -> None:
        """Type `perdure run`."""
        env = dict(os.environ, PERDURE_HOME=str(self.home), PERDURE_RDZV_SECRET=secret)
        command = ["ip", "netns", "exec", self.space, sys.executable, "-m", "perdure", "run"]
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [*command, *words], stdout=out, stderr=out, env=env, cwd=self.folder
            )

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Return its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on:\n{self.text()[-3000:]}") from None

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        assert self.process is not None
        return self.process.poll()

    def text(self) -> str:
        """Return what it has printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def vanish(self) -> None:
        """SIGKILL everything in the namespace."""
        for _ in range(3):  # What was just being forked is found by a later look.
            for pid in sh("ip", "netns", "pids", self.space, check=False).split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        if self.process is not None:
            self.process.wait(PATIENCE_S)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], tuple[Lab, list[Node]]]]:
    """Return a function that makes some; afterwards nothing of them may be left."""
    with contextlib.ExitStack() as stack:

        def make(count: int) -> tuple[Lab, list[Node]]:
            lab = stack.enter_context(Lab(count))
            made = [Node(lab, number, tmp_path) for number in range(count)]
            for node in made:
                stack.callback(node.vanish)
            return lab, made

        yield make


def wait_until(condition: Callable[[], object], what: str, nodes: list[Node]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        told = "\n".join(f"--- {node.space}\n{node.text()[-1500:]}" for node in nodes)
        assert time.monotonic() < deadline, f"no {what}:\n{told}"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_same_command_on_two_nodes_is_one_job_that_ends_on_both_with_its_code(
    nodes: Callable[[int], tuple[Lab, list[Node]]], tmp_path: Path
) -> None:
    lab, (first, second, stranger) = nodes(3)
    (tmp_path / "ends.py").write_text(ENDS)
    where = f"{lab.addresses[0]}:29500"
    command = ["--cold", "--nnodes", "2", "--rdzv-endpoint", where, "--rdzv-id", "pair"]
    command += ["--max-restarts", "0", "ends.py"]
    second.run(*command)  # It comes before the first one, and waits.
    stranger.run(*command, secret=f"{SECRET}, or so")
    first.run(*command)
    assert stranger.wait() == 4, stranger.text()  # Once the job is there, and while it is.
    (tmp_path / "told").touch()
    assert f"{where} does not know this node's secret" in stranger.text()
    wait_until(lambda: (first.code, second.code) == (7, 7), "end", [first, second])
    assert "this is the first node of pair" in first.text()
    assert "if the machine is lost, the job starts from its newest checkpoint" in first.text()
    assert "[rank 0] I am 0 of pair False" in first.text()
    assert "this machine is node 1 of pair" in second.text()
    assert "[rank 1] I am 1 of pair False" in second.text()
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.long
def test_a_node_that_is_lost_is_back_by_the_same_command_and_so_is_the_first(
    nodes: Callable[[int], tuple[Lab, list[Node]]], tmp_path: Path
) -> None:
    lab, all_ = nodes(3)
    first, second, third = all_
    (tmp_path / "trail").mkdir()
    (tmp_path / "job.toml").write_text(
        f'[checkpoint]\nevery_steps = 10\nurl = "{tmp_path / "checkpoints"}"\n'
    )
    command = ["--config", "job.toml", "--nnodes", "3", "--rdzv-id", "trio"]
    command += ["--rdzv-endpoint", f"{lab.addresses[0]}:29500"]
    command += [str(SCRIPTS / "train_paced.py"), "--steps", "100000"]
    command += ["--trail", str(tmp_path / "trail")]

    def steps() -> list[int]:
        path = tmp_path / "trail" / "rank-0.txt"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [int(line.split()[0]) for line in lines if line.endswith("\n")]

    def trains_on(what: str) -> list[int]:
        before = len(steps())
        wait_until(lambda: len(steps()) > before + 15, what, all_)
        return steps()[before:]

    for node in all_:
        node.run(*command)
    trains_on("training on three")
    second.vanish()
    second.run(*command)
    assert trains_on("the second one back")[0] > 0, "from a checkpoint"

    first.vanish()
    first.run(*command)
    assert trains_on("the first one back")[0] > 0
    for node in (second, third):
        assert "was started anew" in node.text(), "it has waited, and came back by itself"

    assert third.process is not None
    third.process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    third.process.send_signal(signal.SIGINT)
    assert third.wait() == 130
    third.run(*command)
    assert trains_on("the third one back")[0] > 0
    (tmp_path / "trail" / "hurry").touch()
    assert first.process is not None
    first.process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in all_] == [0, 0, 0]
