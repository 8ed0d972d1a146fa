"""A keeper's line to its image: what it does not take at once, and an image that dies amid it.

And what a keeper cannot do at all.
"""

import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.waiting import PATIENCE_S, is_readable

from perdure.files.private import locate_job
from perdure.keeper.image import ImageProcess, Warmth
from perdure.keeper.json_lines import LineSocket
from perdure.model.bus.wire import (
    FromKeeper,
    KeeperExit,
    KeeperExited,
    KeeperKill,
    KeeperSpawn,
    KeeperSpawned,
    KeeperState,
    KeeperStatus,
    KeeperStore,
    KeeperStoreReady,
    RankLaunch,
)

T = TypeVar("T")

KEEPER = """
import math, os, socket, sys
from perdure.files.private import locate_job
from perdure.keeper import keeper
from perdure.keeper import image as warm
paths = locate_job(os.environ["PERDURE_HOME"], "j")
keeper.make_private(os.path.dirname(paths.sockets))
keeper.make_private(paths.sockets)
one = keeper.Keeper("j", 0, paths)
lines = warm.LineSocket(socket.socket(fileno=int(sys.argv[1])))
image = warm.ImageProcess(0, lines, (), 1, math.inf)
one.warmth.current = image
one.warmth._deaths = warm.DEATHS_MAX - 1  # No other takes its place.
one._watch_image(image)
image.lines.send("x" * 1_000_000)  # It reads as if it were stopped.
one.run(cold=True)
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, socket.socket]]:
    """Return a keeper's pid, and the image's end of its line to it."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", KEEPER, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as keeper:
        theirs.close()
        try:
            assert is_readable(ours), "no keeper"
            yield keeper.pid, ours
            assert keeper.wait(PATIENCE_S) == 0
        finally:
            keeper.kill()


def connect(home: Path) -> LineSocket:
    """Be an agent: the keeper listens, since it has spoken to its image."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(locate_job(str(home), "j").keeper_socket(0))
    return LineSocket(sock)


def wait_for(agent: LineSocket, kind: type[T]) -> T:
    """Return the next answer of this kind."""
    while is_readable(agent.sock) and not agent.closed:
        for message in agent.read(FromKeeper):
            if isinstance(message, kind):
                return message
    raise TimeoutError(f"no {kind.__name__}")


def test_an_image_that_dies_with_half_an_order_unsent_is_lost_at_once(
    image: tuple[int, socket.socket], tmp_path: Path
) -> None:
    pid, line = image
    agent = connect(tmp_path)
    agent.send(KeeperStatus())
    assert wait_for(agent, KeeperState).warm
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    agent.send(KeeperStore(generation=1, world_size=2))
    agent.send(KeeperKill(0))  # It begins what follows at once: it writes before it reads.
    line.close()
    os.kill(pid, signal.SIGCONT)
    ready = wait_for(agent, KeeperStoreReady)
    assert (ready.port, ready.why_not) == (0, "the image died while forking")
    another = connect(tmp_path)
    another.send(KeeperStatus())
    assert not wait_for(another, KeeperState).warm
    another.send(KeeperExit())
    for peer in (agent, another):
        peer.close()


def test_an_order_larger_than_a_socket_takes_arrives_whole(
    image: tuple[int, socket.socket], tmp_path: Path
) -> None:
    """T3: such as one with a large environment for each rank."""
    line = image[1]
    line.settimeout(PATIENCE_S)
    with line.makefile("rb") as lines:
        assert len(lines.readline()) > 1_000_000
    agent = connect(tmp_path)
    agent.send(KeeperExit())
    agent.close()


def make_order(rank: int, folder: Path, *, beside: bool = False) -> KeeperSpawn:
    """Return an order to start a rank that sleeps, and has all its files in `folder`."""
    out, err, ring = (str(folder / f"{rank}.{name}") for name in ("out", "err", "ring"))
    return KeeperSpawn(
        1, (RankLaunch(rank, {}, out, err, ring),), "/bin/sleep", ("3600",),
        module=False, no_python=True, cwd="/", cold=True, beside=beside,
    )  # fmt: skip


def test_a_rank_whose_files_cannot_be_made_has_failed_and_the_others_live_on(
    image: tuple[int, socket.socket], tmp_path: Path
) -> None:
    """Such as where a file stands in the place of a directory."""
    agent = connect(tmp_path)
    agent.send(make_order(0, tmp_path))
    running = wait_for(agent, KeeperSpawned).pids
    (tmp_path / "full").touch()
    agent.send(make_order(1, tmp_path / "full", beside=True))
    record = wait_for(agent, KeeperExited).record
    assert (record.rank, record.generation, record.code) == (1, 1, 1)
    assert record.error.startswith("cannot be started: [Errno ")
    agent.send(KeeperStatus())
    assert wait_for(agent, KeeperState).running == running
    agent.send(KeeperExit())
    agent.close()


PIDS = Path("/sys/fs/cgroup/pids")


@pytest.mark.skipif(not os.access(PIDS, os.W_OK), reason="no cgroup of version 1 for processes")
def test_ranks_for_which_there_is_no_process_are_started_once_there_is_one(
    image: tuple[int, socket.socket], tmp_path: Path
) -> None:
    """A limit of a container that others' processes have used up ended the keeper and all ranks."""
    agent = connect(tmp_path)
    agent.send(make_order(0, tmp_path))
    running = wait_for(agent, KeeperSpawned).pids
    group = PIDS / f"perdure-test-{image[0]}"
    group.mkdir()
    try:
        (group / "pids.max").write_text("1")
        (group / "cgroup.procs").write_text(str(image[0]))
        order = make_order(1, tmp_path, beside=True)
        agent.send(order)
        agent.send(order)
        agent.send(KeeperStatus())
        assert wait_for(agent, KeeperState).running == running
        (group / "pids.max").write_text("max")
        assert set(wait_for(agent, KeeperSpawned).pids) == {1}
        agent.send(KeeperExit())
        agent.close()
        keeper = os.pidfd_open(image[0])
        assert is_readable(keeper)
        os.close(keeper)
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (PIDS / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_an_image_is_made_only_for_modules_that_the_current_one_lacks() -> None:
    ours, theirs = socket.socketpair()
    images = Warmth("j", 0, {}, watch=lambda _: None, unwatch=lambda _: None, log=print)
    images.current = ImageProcess(
        0, LineSocket(ours), ("tried",), 1, math.inf, modules=frozenset({"torch"})
    )
    with ours, theirs:
        theirs.setblocking(False)
        images.refresh(("torch", "tried"))
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        images.refresh(("torch", "tried", "wave"))
        line, files, _, _ = socket.recv_fds(theirs, 100, 1)
        assert "ForkImage" in line.decode()
        os.close(files[0])
        images.close()
