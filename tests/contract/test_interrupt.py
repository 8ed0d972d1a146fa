"""A collective of three real gloo ranks, one of them stopped, is broken from beside it."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.model.bus.wire import FromWorker, WorkerEvent, WorkerHello
from perdure.model.codec import decode, encode
from perdure.model.events import CollectivesInterrupted
from perdure.model.orders import InterruptCollectives
from perdure.worker.ring import RingWriter

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.serial]

WAIT_S = 100.0
WITHIN_S = 0.1


class Line:
    """A rank's control line, as its agent sees it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        self.connection = connection
        self.lines = connection.makefile("rb")
        self.hello = self.read(WorkerHello)

    def read(self, type_: Any) -> Any:
        while True:
            message = decode(self.lines.readline(), FromWorker)
            if isinstance(message, type_):
                return message

    def close(self) -> None:
        self.lines.close()
        self.connection.close()


class Ranks:
    """Three ranks, their outputs and their lines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(directory / "s"))
        self.server.listen()
        self.server.settimeout(WAIT_S)
        self.lines: dict[int, Line] = {}
        self.processes = [self._start(directory, rank, port) for rank in range(3)]
        try:
            for _ in range(3):
                line = Line(self.server.accept()[0])
                self.lines[line.hello.rank] = line
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _start(directory: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
        ring = directory / f"{rank}.ring"
        RingWriter.create(str(ring), rank=rank, generation=4).close()
        world = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PERDURE_JOB": "j",
            "PERDURE_HOME": str(directory),
            "PERDURE_RING": str(ring),
            "PERDURE_SOCKET": str(directory / "s"),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("interrupt_rank.py"))],
            env=os.environ | world,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def hear(self, rank: int) -> dict[str, Any]:
        out = self.processes[rank].stdout
        assert out is not None
        assert select.select([out], [], [], WAIT_S)[0], f"rank {rank} says nothing"
        words: dict[str, Any] = json.loads(out.readline())
        return words

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=WAIT_S)
        for line in self.lines.values():
            line.close()
        self.server.close()


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("i"))
    yield ranks
    ranks.close()


def test_survivors_of_a_stopped_rank_raise_within_milliseconds(ranks: Ranks) -> None:
    for rank in range(3):
        assert ranks.hear(rank) == {"ready": rank}
    os.kill(ranks.processes[2].pid, signal.SIGSTOP)
    time.sleep(0.3)  # Both are in a collective that the stopped rank holds up.
    order = InterruptCollectives(generation=4, ranks=(0, 1), reason="rank 2 is stopped")
    sent_s = time.monotonic()
    for rank in (0, 1):
        ranks.lines[rank].connection.sendall(encode(order) + b"\n")
    for rank in (0, 1):
        words = ranks.hear(rank)
        took_s = words["raised_s"] - sent_s
        print(f"rank {rank}: {words['type']} {took_s * 1e3:.1f} ms after the order")
        assert words["type"] == "RuntimeError", words
        assert took_s < WITHIN_S
        assert words["echo"] == "still here"  # The script's own connections are whole,
        assert words["store"] == "alive"  # and so is the store's.
        event = ranks.lines[rank].read(WorkerEvent).event
        assert isinstance(event, CollectivesInterrupted)
        assert (event.generation, event.rank) == (4, rank)
        # Two of the world's and one of the pair's, less what the other rank broke before.
        assert event.sockets <= 3
        assert event.sockets or "any more" in event.error


def test_order_of_another_generation_or_a_repeat_breaks_nothing(ranks: Ranks) -> None:
    for rank in range(3):
        assert ranks.hear(rank) == {"ready": rank}
    old = InterruptCollectives(generation=3, ranks=(0,), reason="late")
    ranks.lines[0].connection.sendall(encode(old) + b"\n")
    assert not select.select([ranks.processes[0].stdout], [], [], 0.3)[0]
