"""One node under test: a real keeper, and the test in the place of its agent."""

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil

from perdure.files.private import locate_job
from perdure.model.bus.wire import (
    FromKeeper,
    KeeperExit,
    KeeperExited,
    KeeperKill,
    KeeperSpawn,
    KeeperSpawned,
    KeeperState,
    KeeperStatus,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    RankLaunch,
)
from perdure.model.codec import decode, encode
from perdure.model.failures import ExitRecord
from perdure.model.paths import JobPaths
from tests.waiting import PATIENCE_S, wait_until

JOB = "kept"
MAIN = "import sys; from perdure.keeper.keeper import main; main(sys.argv[1], 0)"


class Node:
    """A keeper and its agent."""

    def __init__(self, home: Path, *, cold: bool = False, **environ: str) -> None:
        """Start a keeper: `cold` without an image of torch, which no rank would come from."""
        self.home, self.cold = home, cold
        self.paths: JobPaths = locate_job(str(home), JOB)
        self.port = 0
        self.next = 0
        """Number of the next generation to start."""
        self.env: dict[str, str] = {}
        self.environ = environ | ({"PERDURE_COLD": "1"} if cold else {})
        os.makedirs(self.paths.root, exist_ok=True)
        self.start()

    def start(self) -> None:
        environ = os.environ | {"PERDURE_HOME": str(self.home)} | self.environ
        environ["PERDURE_RUN_PID"] = str(os.getpid())
        with open(self.home / "keeper.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", MAIN, JOB],
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.connect()

    def connect(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.sock = socket.socket(socket.AF_UNIX)
            try:
                self.sock.connect(self.paths.keeper_socket(0))
                break
            except OSError:
                self.sock.close()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.01)
        self.sock.settimeout(PATIENCE_S)
        self.skipped: list[Any] = []
        self.lines = self.sock.makefile("rb")

    def disconnect(self) -> None:
        self.lines.close()
        self.sock.close()

    def log(self) -> str:
        return (self.home / "keeper.log").read_text()

    def ask(self, message: Any) -> None:
        self.sock.sendall(encode(message) + b"\n")

    def expect(self, kind: Any, **fields: Any) -> Any:
        """Return the next message of `kind` with `fields`, skipping others."""

        def fits(message: Any) -> bool:
            return isinstance(message, kind) and all(
                getattr(message, name) == value for name, value in fields.items()
            )

        for message in self.skipped:
            if fits(message):
                self.skipped.remove(message)
                return message
        try:
            for line in self.lines:
                message = decode(line, FromKeeper)
                if fits(message):
                    return message
                self.skipped.append(message)
        except TimeoutError:
            pass
        raise AssertionError(f"no {kind.__name__} {fields}:\n{self.log()}")

    def wait_warm(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.ask(KeeperStatus())
            state = self.expect(KeeperState)
            if state.warm:
                return
            assert not state.why_cold, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def launch(self, generation: int, rank: int, world: int) -> RankLaunch:
        env = dict(os.environ) | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True" if self.port else "False",
            "TORCHELASTIC_RESTART_COUNT": str(generation), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_ERROR_FILE": self.paths.error_file(generation, rank),
            "PERDURE_JOB": JOB, "PERDURE_HOME": str(self.home), "PERDURE_NODE": "0",
            "PERDURE_GENERATION": str(generation), "PERDURE_RECORDER": "auto",
            "PERDURE_RING": self.paths.ring(generation, rank), "TRAIL": str(self.home / "trail"),
        } | self.env  # fmt: skip
        return RankLaunch(
            rank=rank,
            env=env,
            stdout=self.paths.stream(generation, rank, "out"),
            stderr=self.paths.stream(generation, rank, "err"),
            ring=self.paths.ring(generation, rank),
        )

    def spawn(
        self, generation: int, script: str, *args: str, world: int = 1, **options: Any
    ) -> KeeperSpawned:
        defaults = {"module": False, "no_python": False, "cold": False, "cwd": str(self.home)}
        order = KeeperSpawn(
            generation=generation,
            ranks=tuple(self.launch(generation, r, world) for r in range(world)),
            script=script,
            args=args,
            **(defaults | options),
        )
        self.next = max(self.next, generation + 1)
        self.ask(order)
        spawned: KeeperSpawned = self.expect(KeeperSpawned, generation=generation)
        return spawned

    def clear(self) -> None:
        """End what runs, and forget the trail and the store: another test comes."""
        if self.next:
            self.ask(KeeperKill(self.next - 1))
            self.expect(KeeperStopped, generation=self.next - 1)
        self.skipped.clear()
        self.port = 0
        (self.home / "trail").unlink(missing_ok=True)

    def serve_store(self, generation: int, world: int) -> None:
        self.next = max(self.next, generation + 1)
        self.ask(KeeperStore(generation, world))
        ready = self.expect(KeeperStoreReady, generation=generation)
        assert ready.port, ready.why_not
        self.port = ready.port

    def ended(self, generation: int, rank: int = 0) -> ExitRecord:
        path = Path(self.paths.exit_record(generation, rank))
        others: list[Any] = []
        while True:
            record: ExitRecord = self.expect(KeeperExited).record
            if (record.generation, record.rank) == (generation, rank):
                self.skipped += others
                assert decode(path.read_bytes(), ExitRecord) == record
                return record
            others.append(KeeperExited(record))

    def text(self, generation: int, rank: int = 0, name: str = "out") -> str:
        return Path(self.paths.stream(generation, rank, name)).read_text()

    def trail(self) -> list[list[Any]]:
        path = self.home / "trail"
        return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    def wait_trail(self, count: int) -> list[list[Any]]:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.trail()) < count:
            assert time.monotonic() < deadline, (self.trail(), self.log())
            time.sleep(0.005)
        return self.trail()

    def script(self, text: str, name: str = "train.py") -> str:
        path = self.home / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def leftovers(self) -> list[str]:
        left = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PERDURE_HOME") == str(self.home):
                    left.append(f"{process.pid} {process.status()} {process.cmdline()}")
            except psutil.Error:
                continue
        return left

    def end(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask(KeeperExit())
                self.process.wait(PATIENCE_S)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        self.disconnect()
        shutil.rmtree(self.paths.sockets, ignore_errors=True)
        wait_until(lambda: not self.leftovers(), f"end of {self.leftovers()}:\n{self.log()}")
