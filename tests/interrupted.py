"""Three real gloo ranks that run collectives for ever, with their control lines."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from perdure.adapters.rings import read_ring
from perdure.model.bus.wire import FromWorker, WorkerHello
from perdure.model.codec import decode, encode
from perdure.model.orders import InterruptCollectives
from perdure.worker.ring import RingWriter
from tests.waiting import PATIENCE_S, is_readable, wait_until

SCRIPT = Path(__file__).with_name("contract") / "interrupt_rank.py"
STOPPED = InterruptCollectives(generation=4, ranks=(0, 1), reason="rank 2 is stopped")


class Line:
    """A rank's control line, as its agent sees it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
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
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(directory / "s"))
        self.server.listen()
        self.server.settimeout(PATIENCE_S)
        self.lines: dict[int, Line] = {}
        self.processes = [self._start(directory, rank, self.store.port) for rank in range(3)]
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
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PERDURE_JOB": "j",
            "PERDURE_HOME": str(directory),
            "PERDURE_RING": str(ring),
            "PERDURE_SOCKET": str(directory / "s"),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=os.environ | world,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def hear(self, rank: int) -> dict[str, Any]:
        out = self.processes[rank].stdout
        assert out is not None
        assert is_readable(out), f"rank {rank} says nothing"
        words: dict[str, Any] = json.loads(out.readline())
        return words

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)
        for line in self.lines.values():
            line.close()
        self.server.close()
        del self.store

    def count_done(self, rank: int) -> int:
        """Return how many of the world's collectives a rank has seen the end of."""
        comms = read_ring(str(self.directory / f"{rank}.ring"), 0.0).comms
        return next((comm.ended_seq for comm in comms if comm.name == "0"), 0)

    def wait_held_up(self) -> None:
        """Wait until ranks 0 and 1 are in a collective that rank 2, which is stopped, holds up."""
        os.waitid(os.P_PID, self.processes[2].pid, os.WSTOPPED | os.WNOWAIT)
        before: list[object] = []

        def stand_still() -> bool:
            nonlocal before
            time.sleep(0.1)
            looks = [read_ring(str(self.directory / f"{rank}.ring"), 0.0).comms for rank in (0, 1)]
            seqs: list[object] = [
                [(comm.name, comm.started_seq, comm.ended_seq) for comm in look] for look in looks
            ]
            before, known = seqs, before
            waits = [any(comm.started_seq > comm.ended_seq for comm in look) for look in looks]
            return all(waits) and seqs == known

        wait_until(stand_still, "collective that does not end")


def time_interrupt() -> float:
    """Return the seconds from the order to the exception of the slower of two survivors."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder))
        try:
            for rank in range(3):
                ranks.hear(rank)
            os.kill(ranks.processes[2].pid, signal.SIGSTOP)
            ranks.wait_held_up()
            sent_s = time.monotonic()
            for rank in (0, 1):
                ranks.lines[rank].connection.sendall(encode(STOPPED) + b"\n")
            return max(float(ranks.hear(rank)["raised_s"]) - sent_s for rank in (0, 1))
        finally:
            ranks.close()
