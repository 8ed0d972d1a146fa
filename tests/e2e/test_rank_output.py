"""A rank's log keeps each line, also if a child opens it by name or a part of perdure dies."""

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from perdure.keeper.execution import start_copier
from perdure.model.bus.wire import KeeperKill, KeeperSpawn, KeeperSpawned, KeeperStopped
from perdure.model.failures import ExitRecord
from tests.disks import small_disk
from tests.e2e.node import Node
from tests.waiting import is_readable, wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, cold=True)
    yield node
    node.end()


GENERATIONS = itertools.count()


@pytest.fixture(scope="module", params=[True, False], ids=["cold", "warm"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """Return a node without a warm image, and then one with it; tests share them."""
    node = Node(tmp_path_factory.mktemp("node"), cold=request.param)
    if not node.cold:
        node.wait_warm()
    yield node
    node.end()


def find_copier(node: Node) -> psutil.Process:
    """Return the process that writes the ranks' logs."""

    def find() -> list[psutil.Process]:
        below = psutil.Process(node.process.pid).children()
        return [one for one in below if any("keeper.copier" in word for word in one.cmdline())]

    wait_until(find, "a copier")
    return find()[0]


WAIT = """
import os, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.02)
"""

CHILDREN = """
import os, subprocess, sys
print("first")
print("first", file=sys.stderr)
subprocess.run("echo child > /dev/stdout; echo child > /dev/stderr", shell=True, check=True)
subprocess.run("echo child > /proc/self/fd/1; echo child > /proc/self/fd/2", shell=True, check=True)
for number in (1, 2):
    with open(f"/proc/{os.getpid()}/fd/{number}", "w") as file:
        file.write("by name\\n")
print("last")
print("last", file=sys.stderr)
"""


def run(node: Node, text: str) -> tuple[int, KeeperSpawned, ExitRecord]:
    """Run a script as the next generation; return its number, its start, and its end."""
    generation = next(GENERATIONS)
    spawned = node.spawn(generation, node.script(text))
    return generation, spawned, node.ended(generation)


def test_a_child_that_opens_a_stream_by_its_name_cuts_no_log(both: Node) -> None:
    generation, spawned, record = run(both, CHILDREN)
    assert spawned.warm is not both.cold
    assert (record.code, record.signal) == (0, 0)
    lines = ["first", "child", "child", "by name", "last"]
    assert both.text(generation).splitlines() == lines
    assert both.text(generation, name="err").splitlines() == lines
    assert list(record.last_output) == lines


def test_streams_say_that_they_cannot_seek(both: Node) -> None:
    """As plain Python does on a pipe: also if the image made them while its own were files."""
    text = (
        "import io, sys\nprint(sys.stdout.seekable(), sys.stdout.buffer.seekable())\n"
        "try:\n    sys.stderr.tell()\nexcept io.UnsupportedOperation:\n    print('no')\n"
    )
    generation, _, record = run(both, text)
    assert record.code == 0
    assert both.text(generation) == "False False\nno\n"


def test_the_last_line_of_a_killed_rank_is_kept(both: Node) -> None:
    text = "import os, sys\nprint('last', file=sys.stderr)\nprint('half', end='')\n"
    generation, _, record = run(both, f"{text}os.kill(os.getpid(), 9)\n")
    assert record.signal == signal.SIGKILL
    assert record.last_output == ("last",)
    assert both.text(generation) == "half"


@pytest.mark.parametrize("both", [False], indirect=True, ids=["warm"])
def test_the_end_of_perdures_own_store_is_not_told_to_a_user(both: Node) -> None:
    """The store ends later than the ranks: it is stopped, so SIGTERM does not end it."""
    generation = next(GENERATIONS)
    both.serve_store(generation, 1)
    both.spawn(generation, both.script("import time\nopen('up', 'w')\ntime.sleep(3600)"))
    wait_until((both.home / "up").exists, "the rank")
    below = psutil.Process(both.process.pid).children()
    store = next(one for one in below if one.cmdline()[0].startswith("perdure store"))
    store.suspend()
    both.ask(KeeperKill(generation, 3600.0))
    both.expect(KeeperStopped, generation=generation)
    assert not store.is_running() or store.status() == "zombie"
    assert "killed" not in both.text(generation, name="err")


def test_each_byte_of_a_loud_rank_is_kept(node: Node) -> None:
    text = "import os\nfor n in range(100):\n    os.write(1, b'%07d\\n' % n * 131072)\n"
    node.spawn(0, node.script(text))
    node.ended(0)
    said = Path(node.paths.stream(0, 0, "out")).read_bytes()
    assert len(said) == 100 << 20
    assert said[:8] == b"0000000\n"
    assert said[-8:] == b"0000099\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_copier_holds_up_no_rank(node: Node, number: int) -> None:
    """The rank writes more than a pipe holds, is not told, and loses nothing."""
    text = WAIT + "print('before')\nwait('go')\nprint('x' * 1_000_000)\nprint('after')\n"
    node.spawn(0, node.script(text))
    out = Path(node.paths.stream(0, 0, "out"))
    wait_until(lambda: out.exists() and out.read_text() == "before\n", "the first line")
    copier = find_copier(node)
    copier.send_signal(number)
    (node.home / "go").touch()
    record = node.ended(0)
    assert (record.code, record.signal) == (0, 0)
    assert node.text(0) == f"before\n{'x' * 1_000_000}\nafter\n"
    assert (find_copier(node).pid == copier.pid) is (number == signal.SIGSTOP)


def test_what_a_rank_said_before_its_keeper_died_is_kept(node: Node) -> None:
    """The copier gets no time before: it is stopped, and goes on when the keeper is dead."""
    text = WAIT + "wait('go')\nprint('last')\nopen('said', 'w')\nwait('never')\n"
    node.spawn(0, node.script(text))
    copier = find_copier(node)
    node.process.send_signal(signal.SIGSTOP)
    copier.send_signal(signal.SIGSTOP)
    (node.home / "go").touch()
    wait_until((node.home / "said").exists, "the line")
    node.process.kill()
    node.process.wait()
    copier.send_signal(signal.SIGCONT)
    wait_until(lambda: node.text(0) == "last\n", "the line in the log")
    wait_until(lambda: not copier.is_running() or copier.status() == "zombie", "the copier's end")
    node.disconnect()
    node.start()


def test_what_children_say_at_the_end_of_a_generation_is_kept(node: Node) -> None:
    script = node.script(
        "import subprocess, time\n"
        "loop = \"trap 'echo bye; exit' TERM; touch up; while :; do sleep 0.1; done\"\n"
        "subprocess.Popen(['sh', '-c', loop], start_new_session=True)\ntime.sleep(3600)"
    )
    node.spawn(0, script)
    wait_until((node.home / "up").exists, "the child")
    node.ask(KeeperKill(0, 3600.0))
    node.expect(KeeperStopped, generation=0)
    assert node.text(0) == "bye\n"


@pytest.mark.parametrize("hard", [64, 4096])
def test_a_copier_with_few_descriptors_holds_up_no_rank(node: Node, hard: int) -> None:
    """It raises its own limit. If that is too low, the ranks are refused, and the line says why."""
    shell = node.home / "loud.sh"
    shell.write_text("#!/bin/sh\nhead -c 200000 /dev/zero\n")
    shell.chmod(0o755)
    psutil.Process(node.process.pid).rlimit(psutil.RLIMIT_NOFILE, (64, hard))
    copier = find_copier(node)
    copier.kill()
    wait_until(lambda: not copier.is_running(), "its end")
    ranks = tuple(node.launch(0, rank, 20) for rank in range(20))
    node.ask(KeeperSpawn(0, ranks, str(shell), (), False, True, str(node.home), True))
    records = [node.ended(0, rank) for rank in range(20)]
    if hard == 64:
        assert {record.code for record in records} == {1}
        assert all("open files than ulimit -n allows (64)" in record.error for record in records)
    else:
        assert {record.code for record in records} == {0}
        assert {len(node.text(0, rank)) for rank in range(20)} == {200_000}


def test_a_copier_goes_on_if_its_keeper_dies_before_an_answer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    read, write = os.pipe()
    os.set_blocking(read, False)
    pid, orders = start_copier()
    try:
        with log.open("ab") as file:
            socket.send_fds(orders, [b"+"], [read, file.fileno()])
        os.close(read)
        orders.send(b"1")
        wait_until(lambda: is_readable(orders, 0), "an answer")
        orders.close()
        data = b"x" * 1_000_000
        while data:
            data = data[os.write(write, data) :]
        os.close(write)
        wait_until(
            lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end"
        )
        assert log.stat().st_size == 1_000_000
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def disk(node: Node) -> Iterator[Path]:
    """A disk of 256 KB, on which nothing is open when it goes."""
    with small_disk(node.home / "disk", "256k") as disk:
        yield disk
        copier = find_copier(node)
        node.end()
        wait_until(lambda: not copier.is_running(), "the end of the copier")
    node.start()


def test_a_full_disk_below_the_log_ends_no_program(node: Node, disk: Path) -> None:
    """A shell writes on. The log says what did not fit, once there is room."""
    filler, log = disk / "filler", disk / "rank-0.out"
    filler.write_bytes(bytes(200_000))
    shell = node.home / "loud.sh"
    zeros = "head -c 400000 /dev/zero"  # Much more than disk and pipe; the pipe's part fits later.
    shell.write_text(f"#!/bin/sh\nset -e\n{zeros}\nrm {filler}\necho; echo after\n")
    shell.chmod(0o755)
    launch = structs.replace(node.launch(0, 0, 1), stdout=str(log))
    node.ask(KeeperSpawn(0, (launch,), str(shell), (), False, True, str(node.home), True))
    record = node.ended(0)
    assert (record.code, record.signal) == (0, 0)
    said = log.read_text()
    assert "bytes did not fit on the disk" in said
    assert said.endswith("after\n")
