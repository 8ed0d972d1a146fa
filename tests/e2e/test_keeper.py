"""A real keeper, real ranks, really killed; the agent is played by the test."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.model.codec import decode, encode
from perdure.model.events import ExitRecord
from perdure.model.paths import JobPaths, job_paths
from perdure.model.wire import (
    FromKeeper,
    KeeperExit,
    KeeperExited,
    KeeperKill,
    KeeperSignal,
    KeeperSpawn,
    KeeperSpawned,
    KeeperState,
    KeeperStatus,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
    RankLaunch,
)

pytestmark = [pytest.mark.torch, pytest.mark.serial]
JOB = "kept"
TIMEOUT_S = 60.0
MAIN = "import sys; from perdure.worker.keeper import main; main(sys.argv[1], 0)"


class Node:
    """A keeper and its agent."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.paths: JobPaths = job_paths(str(home), JOB, os.getuid())
        self.port = 0
        self.env: dict[str, str] = {}
        os.makedirs(self.paths.root)
        self.start()

    def start(self) -> None:
        environ = dict(os.environ, PERDURE_HOME=str(self.home), PERDURE_RUN_PID=str(os.getpid()))
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
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self.sock = socket.socket(socket.AF_UNIX)
            try:
                self.sock.connect(self.paths.keeper_socket(0))
                break
            except OSError:
                self.sock.close()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.01)
        self.sock.settimeout(TIMEOUT_S)
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
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            self.ask(KeeperStatus())
            state = self.expect(KeeperState)
            if state.warm:
                return
            assert not state.why_cold and time.monotonic() < deadline, self.log()
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
        self.ask(order)
        spawned: KeeperSpawned = self.expect(KeeperSpawned, generation=generation)
        return spawned

    def serve_store(self, generation: int, world: int) -> None:
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
        deadline = time.monotonic() + TIMEOUT_S
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
                self.process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        self.disconnect()
        deadline = time.monotonic() + 5
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not self.leftovers(), self.log()


def is_gone(pid: int) -> bool:
    """Whether nothing of `pid` runs; whoever inherits it may be slow to take its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.end()


TRAIL = """\
import json, os, time
def note(*what):
    with open(os.environ["TRAIL"], "a") as file:
        file.write(json.dumps([*what]) + "\\n")
note("first", time.monotonic())
"""


def test_generations(node: Node) -> None:
    """Two ranks train, one is killed, the next generation starts warm within 0.1 s."""
    script = node.script(
        TRAIL
        + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value[0] == 2
    if os.environ.get("STEPPED") is None:
        os.environ["STEPPED"] = "1"
        note("step", dist.get_rank())
    time.sleep(0.01)
"""
    )
    node.wait_warm()
    node.serve_store(0, 2)
    spawned = node.spawn(0, script, world=2)
    assert spawned.warm, spawned.why_cold
    node.wait_trail(4)
    os.kill(spawned.pids[1], signal.SIGKILL)
    record = node.ended(0, 1)
    assert (record.signal, record.asked, record.pid) == (9, False, spawned.pids[1])
    node.ask(KeeperKill(0))
    other = node.ended(0, 0)
    assert other.asked or other.code == 1  # Its own exception may come first.
    node.expect(KeeperStopped, generation=0)
    node.serve_store(1, 2)
    begin = time.monotonic()
    node.spawn(1, script, world=2)
    firsts = [entry[1] for entry in node.wait_trail(6)[4:] if entry[0] == "first"]
    node.wait_trail(8)
    print("first line after", [round(at - begin, 4) for at in firsts])
    assert max(firsts) - begin < 0.3
    again = node.spawn(1, script, world=2)
    assert len(again.pids) == 2
    assert len(node.trail()) == 8


def test_nothing_escapes_a_kill(node: Node) -> None:
    """Stopped ranks and detached grandchildren end too, SIGTERM first where asked."""
    script = node.script(
        TRAIL
        + """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: note("term"))
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 1001 & "]).wait()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("forked", os.getpid())
        time.sleep(1002)
    os._exit(0)
note("second")
while True:
    time.sleep(0.02)
"""
    )
    node.wait_warm()
    spawned = node.spawn(0, script, world=2)
    node.wait_trail(6)
    begin = time.monotonic()
    node.ask(KeeperKill(0, 0.3))
    node.expect(KeeperStopped, generation=0)
    assert time.monotonic() - begin > 0.29
    assert [e for e in node.trail() if e[0] == "term"] == [["term"], ["term"]]
    assert not [x for x in node.leftovers() if "keeper" not in x and "zygote" not in x]
    spawned = node.spawn(1, script, world=2)
    node.wait_trail(14)
    node.ask(KeeperSignal(1, 0, signal.SIGSTOP))
    psutil.Process(spawned.pids[0]).status()
    node.ask(KeeperKill(1))
    assert node.ended(1, 0).asked
    node.expect(KeeperStopped, generation=1)
    assert not [x for x in node.leftovers() if "keeper" not in x and "zygote" not in x]
    node.ask(KeeperKill(1))
    node.expect(KeeperStopped, generation=1)
    # What was ended is never started again.
    node.ask(KeeperSpawn(1, (node.launch(1, 0, 1),), script, (), False, False, ".", False))
    node.expect(KeeperStopped, generation=1)


def test_keeper_killed(node: Node) -> None:
    """Its ranks and its store end with it, and the next keeper ends what had detached."""
    script = node.script(
        TRAIL
        + """
import subprocess
note("pid", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
while True:
    time.sleep(0.02)
"""
    )
    node.wait_warm()
    node.serve_store(0, 1)
    spawned = node.spawn(0, script)
    detached = node.wait_trail(2)[1][1]
    node.process.kill()
    node.process.wait()
    deadline = time.monotonic() + 5
    while any("perdure" in line for line in node.leftovers()):
        assert time.monotonic() < deadline, node.leftovers()
        time.sleep(0.01)
    assert is_gone(spawned.pids[0])
    assert not is_gone(detached)
    node.disconnect()
    node.start()
    node.ask(KeeperStatus())
    assert node.expect(KeeperState).generation == -1
    assert is_gone(detached)


def test_agent_replaced(node: Node) -> None:
    """Ranks go on without an agent; the next one is told what it missed."""
    script = node.script("import sys, time; time.sleep(0.3); sys.exit(7)")
    node.wait_warm()
    node.spawn(0, script, world=2)
    node.disconnect()
    deadline = time.monotonic() + TIMEOUT_S
    while not all(Path(node.paths.exit_record(0, r)).exists() for r in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    node.connect()
    node.ask(KeeperStatus())
    state = node.expect(KeeperState)
    assert (state.generation, state.running) == (0, {})
    assert [r.code for r in sorted(state.exits, key=lambda r: r.rank)] == [7, 7]


ENDINGS: dict[str, str] = {
    "exception": "def f():\n    raise ValueError('bad lr\\nsecond line')\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e\n",
    "syntax": "import sys\nprint('x'\n",
    "exit code": "import sys\nsys.exit(3)\n",
    "exit text": "import sys\nsys.exit('no data')\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "group": "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0], file=sys.stderr)\n1 / 0\n",
    "bad hook": "import sys\ndef h(*a):\n    raise TypeError('hook')\nsys.excepthook = h\n1 / 0\n",
    "atexit": (
        "import atexit, threading, time, sys\natexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "class A:\n    def __del__(self):\n        print('del')\n"
        "a = A()\nprint('main', end='')\n"
    ),
    "main": (
        "import sys, os\nprint(__name__, __file__, __spec__, __package__, __doc__, sys.argv)\n"
        "print(sys.path[0], sorted(k for k in globals() if k != 'k'), os.getcwd())\n"
        "print(sys.flags.safe_path, sys.stdin.read(), type(__loader__).__name__)\n"
        "import __main__; print(__main__.sys is sys, sys.orig_argv[-1])\n"
        "import torch; print(torch.get_num_threads())\n"
    ),
    "uncaught in thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\n"
        "t.start()\nt.join()\n"
    ),
    "os._exit": "import os\nprint('x', flush=True)\nos._exit(5)\n",
    "abort": "import os\nos.abort()\n",
}


def _plain(node: Node, *command: str) -> subprocess.CompletedProcess[str]:
    env = node.launch(0, 0, 1).env
    return subprocess.run(
        [sys.executable, *command], env=env, cwd=node.home, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=TIMEOUT_S,
    )  # fmt: skip


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_same_as_python(node: Node, cold: bool) -> None:
    """Streams, exit codes and exceptions are what `python SCRIPT` gives."""
    node.wait_warm()
    differences = []
    for generation, (name, text) in enumerate(ENDINGS.items()):
        script = node.script(text, f"ending_{name.replace(' ', '_')}.py")
        plain = _plain(node, script, "--flag", "value")
        node.spawn(generation, script, "--flag", "value", cold=cold)
        record = node.ended(generation)
        got = (record.signal and -record.signal) or record.code
        out, err = node.text(generation), node.text(generation, name="err")
        for what, one, two in (
            ("status", plain.returncode, got),
            ("stdout", plain.stdout, out),
            ("stderr", plain.stderr, err),
        ):
            if one != two:
                differences.append(f"--- {name}: {what}\n{one}\n--- is\n{two}")
        if name == "exception":
            assert record.error == "ValueError: bad lr"
            assert record.traceback == err
            assert record.last_output == tuple(err.splitlines())
        if name == "syntax":
            assert record.error.startswith("SyntaxError:")
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_multiprocessing(node: Node, cold: bool) -> None:
    """Spawn, forkserver, fork and loader workers find the script's functions, not its ring."""
    script = node.script(
        TRAIL
        + """
import multiprocessing, sys, torch, random, numpy
def work(x):
    from perdure.worker import attach
    return x * 2, os.environ.get("PERDURE_ATTACH", ""), attach._attachment is not None
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor([float(i)])
if __name__ == "__main__":
    from perdure.worker import attach
    note("attached", attach._attachment is not None)
    for kind in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            note(kind, pool.map(work, [1, 2]))
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)
    note("loader", sum(float(b.sum()) for b in loader))
    note("random", random.random(), numpy.random.rand(), torch.initial_seed())
"""
    )
    node.wait_warm()
    node.spawn(0, script, world=2, cold=cold)
    for rank in range(2):
        record = node.ended(0, rank)
        assert record.code == 0, record
    trail = node.trail()
    for kind in ("spawn", "forkserver"):
        assert [e[1] for e in trail if e[0] == kind] == [[[2, "", False], [4, "", False]]] * 2
    assert len([e for e in trail if e[0] == "fork"]) == 2
    assert [e[1] for e in trail if e[0] == "loader"] == [28.0, 28.0]
    assert [e[1] for e in trail if e[0] == "attached"] == [True, True]
    for drawn in zip(*(e[1:] for e in trail if e[0] == "random"), strict=True):
        assert drawn[0] != drawn[1]


def test_module_and_program(node: Node) -> None:
    """`--module` and `--no-python`; what cannot be executed says so."""
    node.wait_warm()
    package = node.home / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text("import sys\nprint(__spec__.name, sys.argv, sys.path[0])\n1/0")
    plain = _plain(node, "-m", "pack.run", "a")
    node.spawn(0, "pack.run", "a", module=True)
    assert node.ended(0).error == "ZeroDivisionError: division by zero"
    assert (node.text(0), node.text(0, name="err")) == (plain.stdout, plain.stderr)
    spawned = node.spawn(1, "sh", "-c", "echo $RANK; exit 4", no_python=True)
    assert spawned.why_cold == "--no-python"
    assert (node.ended(1).code, node.text(1)) == (4, "0\n")
    node.spawn(2, "no-such-program", no_python=True)
    assert node.ended(2).code == 127
    assert "cannot execute no-such-program" in node.text(2, name="err")
    node.env["PYTHONHASHSEED"] = "3"
    spawned = node.spawn(3, node.script("print(hash('x'))"))
    assert spawned.why_cold == "PYTHONHASHSEED differs from the image's environment"
    node.ended(3)
    node.wait_warm()
    assert node.spawn(4, node.script("print(hash('x'))")).warm
    node.ended(4)
    assert node.text(3) == node.text(4)


def test_imports_are_preloaded(node: Node) -> None:
    """The next image has what ranks imported, but for what starts threads or asks its rank."""
    names = ["wave", "perdure.worker.control", "torch.distributed.launcher.api", "turtledemo"]
    Path(node.paths.imports).write_text(json.dumps(names))
    node.end()
    node.start()
    node.wait_warm()
    script = node.script(
        TRAIL + "import sys; note(*('%s' % (m in sys.modules) for m in ('wave', 'sched')))\n"
        "import sched; time.sleep(30)"
    )
    node.spawn(0, script)
    assert node.wait_trail(2)[1] == ["True", "False"]
    deadline = time.monotonic() + TIMEOUT_S
    while node.log().count("is ready") < 3:
        assert time.monotonic() < deadline, node.log()
        time.sleep(0.1)
    node.spawn(1, script)
    assert node.wait_trail(4)[3] == ["True", "True"]


def test_supervisor_gone(tmp_path: Path) -> None:
    """A keeper whose supervisor was killed ends its ranks and leaves."""
    node = Node(tmp_path)
    node.wait_warm()
    node.end()
    supervisor = subprocess.Popen(["sleep", "1000"])
    node.process = subprocess.Popen(
        [sys.executable, "-P", "-c", MAIN, JOB],
        env=dict(os.environ, PERDURE_HOME=str(tmp_path), PERDURE_RUN_PID=str(supervisor.pid)),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    node.connect()
    node.wait_warm()
    node.spawn(0, node.script("import time; time.sleep(1000)"))
    supervisor.kill()
    supervisor.wait()
    node.process.wait(5)
    assert not node.leftovers()
    node.disconnect()
