"""A real keeper, real ranks, really killed; the agent is played by the test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from perdure.files import replace_file
from perdure.files.private import locate_job
from perdure.model.bus.wire import (
    KeeperKill,
    KeeperSignal,
    KeeperSpawn,
    KeeperState,
    KeeperStatus,
    KeeperStopped,
    KeeperStore,
    KeeperStoreReady,
)
from tests.e2e.node import JOB, MAIN, Node
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.torch


def is_gone(pid: int) -> bool:
    """Whether nothing of `pid` runs; whoever inherits it may be slow to take its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def cold() -> bool:
    """Return whether the node has no warm image."""
    return False


@pytest.fixture
def node(tmp_path: Path, cold: bool) -> Iterator[Node]:
    node = Node(tmp_path, cold=cold)
    yield node
    node.end()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Return a node with an image, for all tests that leave it as it is: one takes 4 s of CPU."""
    node = Node(tmp_path_factory.mktemp("warm"))
    node.wait_warm()
    yield node
    node.end()


@pytest.fixture
def kept(cold: bool, request: pytest.FixtureRequest) -> Iterator[Node]:
    """Return a node on which other tests may have run; `next` is its first generation."""
    node: Node = request.getfixturevalue("node" if cold else "warm")
    yield node
    node.clear()


without_image = pytest.mark.parametrize("cold", [True], ids=["no image"])


TRAIL = """\
import json, os, time
def note(*what):
    with open(os.environ["TRAIL"], "a") as file:
        file.write(json.dumps([*what]) + "\\n")
note("first", time.monotonic())
"""


def test_generations(kept: Node) -> None:
    """Two ranks train, one is killed, and the next generation starts warm."""
    node, first = kept, kept.next
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
    node.serve_store(first, 2)
    spawned = node.spawn(first, script, world=2)
    assert spawned.warm, spawned.why_cold
    node.wait_trail(4)
    os.kill(spawned.pids[1], signal.SIGKILL)
    record = node.ended(first, 1)
    assert (record.signal, record.asked, record.pid) == (9, False, spawned.pids[1])
    node.ask(KeeperKill(first))
    other = node.ended(first, 0)
    assert other.asked or other.code == 1  # Its own exception may come first.
    node.expect(KeeperStopped, generation=first)
    node.serve_store(first + 1, 2)
    spawned = node.spawn(first + 1, script, world=2)
    assert spawned.warm, spawned.why_cold
    node.wait_trail(8)
    again = node.spawn(first + 1, script, world=2)
    assert len(again.pids) == 2
    assert len(node.trail()) == 8


def find_ranks(node: Node) -> list[str]:
    """Return all processes of the node but its keeper, its image, and a store that stands by."""
    own = ("keeper", "zygote", "standby")
    return [line for line in node.leftovers() if not any(word in line for word in own)]


def test_nothing_escapes_a_kill(kept: Node) -> None:
    """Stopped ranks and detached grandchildren end too, SIGTERM first where asked."""
    node, first = kept, kept.next
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
    spawned = node.spawn(first, script, world=2)
    node.wait_trail(6)
    # The ranks outlive SIGTERM, so the hour of grace ends by the second order alone.
    node.ask(KeeperKill(first, 3600.0))
    # Both ranks hear it, and what each has forked into a session whose leader has ended.
    assert [e for e in node.wait_trail(10) if e[0] == "term"] == 4 * [["term"]]
    assert all(psutil.Process(pid).is_running() for pid in spawned.pids.values())
    node.ask(KeeperKill(first))
    node.expect(KeeperStopped, generation=first)
    assert not find_ranks(node)
    spawned = node.spawn(first + 1, script, world=2)
    node.wait_trail(14)
    node.ask(KeeperSignal(first + 1, 0, signal.SIGSTOP))
    stopped = psutil.Process(spawned.pids[0])
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "stop of rank 0")
    node.ask(KeeperKill(first + 1, 0.3))
    assert node.ended(first + 1, 0).asked
    node.expect(KeeperStopped, generation=first + 1)
    assert not find_ranks(node)
    node.ask(KeeperKill(first + 1))
    node.expect(KeeperStopped, generation=first + 1)
    # What was ended is never started again.
    ranks = (node.launch(first + 1, 0, 1),)
    node.ask(KeeperSpawn(first + 1, ranks, script, (), False, False, ".", False))
    node.expect(KeeperStopped, generation=first + 1)


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
    wait_until(lambda: not any("perdure" in line for line in node.leftovers()), "end of its parts")
    assert is_gone(spawned.pids[0])
    assert not is_gone(detached)
    node.disconnect()
    node.start()
    node.ask(KeeperStatus())
    assert node.expect(KeeperState).generation == -1
    assert is_gone(detached)


@without_image
def test_agent_replaced(node: Node) -> None:
    """Ranks go on without an agent; the next one is told what it missed."""
    text = "import os, sys, time\nwhile not os.path.exists('leave'): time.sleep(0.02)\nsys.exit(7)"
    script = node.script(text)
    node.spawn(0, script, world=2)
    node.disconnect()
    (node.home / "leave").touch()
    records = [Path(node.paths.exit_record(0, rank)) for rank in range(2)]
    wait_until(lambda: all(record.exists() for record in records), "exit records")
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
        "import atexit, threading, sys\natexit.register(print, 'bye')\n"
        "wait = threading.main_thread().join\n"
        "threading.Thread(target=lambda: (wait(), print('thread'))).start()\n"
        "class A:\n    def __del__(self):\n        print('del')\n"
        "a = A()\nprint('main', end='')\n"
    ),
    "main": (
        "import sys, os\nprint(__name__, __file__, __spec__, __package__, __doc__, sys.argv)\n"
        "print(sys.path[0], sorted(k for k in globals() if k != 'k'), os.getcwd())\n"
        "print(sys.flags.safe_path, sys.stdin.read(), type(__loader__).__name__)\n"
        "import __main__; print(__main__.sys is sys, sys.orig_argv[-1])\n"
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
        stdin=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip


def find_stores(node: Node, word: str) -> dict[int, psutil.Process]:
    """Return processes below the keeper whose title says that they are the store `word`, by pid."""
    found = {}
    for process in psutil.Process(node.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()).split()
            if title[:2] == ["perdure", "store"] and title[-1] == word:
                found[process.pid] = process
    return found


def test_a_standby_serves_the_next_generation(node: Node) -> None:
    """It is there before it is needed, lives through an end, and is replaced once it is used."""
    node.wait_warm()
    script = node.script("import time\ntime.sleep(3600)\n")
    node.serve_store(0, 1)
    assert node.spawn(0, script).warm
    wait_until(lambda: find_stores(node, "standby"), "a standby")
    (older,) = find_stores(node, "g0")
    ((used, process),) = find_stores(node, "standby").items()
    ports = {one.laddr.port for one in process.net_connections()}
    node.ask(KeeperKill(0))
    node.ask(KeeperStore(1, 1))
    assert node.expect(KeeperStoreReady, generation=1).port in ports
    node.expect(KeeperStopped, generation=0)
    wait_until(lambda: is_gone(older), "the end of the older store")

    for generation, harm in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        assert node.spawn(generation, script).warm

        def find_another(used: int = used) -> set[int]:
            return find_stores(node, "standby").keys() - {used}

        wait_until(find_another, "another standby")
        (used,) = find_another()
        os.kill(used, harm)
        if harm == signal.SIGKILL:
            wait_until(lambda: is_gone(used), "the harm")  # noqa: B023
        node.ask(KeeperKill(generation))
        node.ask(KeeperStore(generation + 1, 1))
        assert node.expect(KeeperStoreReady, generation=generation + 1).port
        node.expect(KeeperStopped, generation=generation)
        assert find_stores(node, f"g{generation + 1}") or not is_gone(used)


@pytest.mark.parametrize(
    "cold", [False, pytest.param(True, marks=pytest.mark.long)], ids=["warm", "cold"]
)
def test_same_as_python(kept: Node) -> None:
    """Streams, exit codes and exceptions are what `python SCRIPT` gives."""
    node = kept
    differences = []
    for generation, (name, text) in enumerate(ENDINGS.items(), node.next):
        script = node.script(text, f"ending_{name.replace(' ', '_')}.py")
        plain = _plain(node, script, "--flag", "value")
        node.spawn(generation, script, "--flag", "value")
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
    last = node.next
    node.spawn(last, node.script("import torch\nprint(torch.get_num_threads())"))
    assert node.ended(last).code == 0
    assert (node.launch(last, 0, 1).env["OMP_NUM_THREADS"], node.text(last)) == ("1", "1\n")


@pytest.mark.parametrize(
    "cold", [False, pytest.param(True, marks=pytest.mark.long)], ids=["warm", "cold"]
)
def test_multiprocessing(kept: Node) -> None:
    """Spawn, forkserver, fork and loader workers find the script's functions, not its ring."""
    node, first = kept, kept.next
    script = node.script(
        TRAIL
        + """
import multiprocessing, sys, random
def work(x):
    from perdure.worker import attach
    return x * 2, os.environ.get("PERDURE_ATTACH", ""), attach._attachment is not None
class Data:
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor([float(i)])
if __name__ == "__main__":
    import numpy, torch  # What is spawned needs neither.
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
    node.spawn(first, script, world=2)
    for rank in range(2):
        record = node.ended(first, rank)
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


@pytest.mark.parametrize("cold", [False, True])
def test_standard_input_arrives(kept: Node) -> None:
    """A rank reads the rest of what another process has as its standard input."""
    node = kept
    script = node.script(
        TRAIL + "import sys\nnote(sys.stdin.name, sys.stdin.mode, sys.stdin.seekable(),"
        " sys.stdin.buffer.seekable(), sys.stdin.line_buffering, repr(sys.stdin.read()))"
    )
    rows = node.home / "rows"
    rows.write_bytes(b"read before\n1\r\n2\n")
    for generation, kind in enumerate(("pipe", "file"), node.next):
        with rows.open("rb", buffering=0) as file:
            file.readline()
            holder = subprocess.Popen(
                ["sleep", "1000"], stdin=subprocess.PIPE if kind == "pipe" else file
            )
        try:
            if holder.stdin is not None:
                holder.stdin.write(b"1\r\n2\n")
                holder.stdin.close()
            launch = msgspec.structs.replace(node.launch(generation, 0, 1), stdin=holder.pid)
            home = str(node.home)
            node.next = generation + 1
            node.ask(KeeperSpawn(generation, (launch,), script, (), False, False, home, False))
            assert node.ended(generation).code == 0
            seeks = kind == "file"  # As in plain Python.
            assert node.trail()[-1] == ["<stdin>", "r", seeks, seeks, False, repr("1\r\n2\n")]
        finally:
            holder.kill()
            holder.wait()


@without_image
def test_a_program_below_a_shell_hears_sigterm(node: Node) -> None:
    """The shell ends at once; the program saves within the grace, and the generation waits."""
    program = (
        "import os, signal, sys, time\n"
        "def save(*_): time.sleep(0.5); open('saved', 'w'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('up', 'w')\ntime.sleep(3600)"
    )
    (node.home / "save.py").write_text(program)
    shell = node.home / "go.sh"
    shell.write_text(f"#!/bin/sh\n{sys.executable} save.py\necho left\n")
    shell.chmod(0o755)
    node.spawn(0, str(shell), no_python=True)
    wait_until((node.home / "up").exists, "the program")
    node.ask(KeeperKill(0, 3600.0))
    node.expect(KeeperStopped, generation=0)
    assert (node.home / "saved").exists()


def test_a_rank_that_works_on_sigterm_has_its_store(kept: Node) -> None:
    """It may save together with others, and meet them at the store."""
    node, first = kept, kept.next
    node.serve_store(first, 1)
    script = node.script(
        TRAIL
        + """
import signal, torch.distributed as dist
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
def save(*_):
    note("told")
    while not os.path.exists("saving"):
        time.sleep(0.02)
    store.set("saved", "yes")
    note(store.get("saved").decode())
    os._exit(0)
signal.signal(signal.SIGTERM, save)
note("ready")
time.sleep(3600)
"""
    )
    node.spawn(first, script)
    node.wait_trail(2)
    node.ask(KeeperKill(first, 3600.0))
    node.wait_trail(3)
    node.ask(KeeperStatus())
    node.expect(KeeperState)  # So all have been told.
    (node.home / "saving").touch()
    assert node.ended(first).code == 0
    assert node.trail()[3] == ["yes"]
    node.expect(KeeperStopped, generation=first)


@pytest.mark.parametrize("word", ["LOCAL_RANK", "getpid"])
def test_a_sitecustomize_of_its_rank_or_process_runs_in_each_rank(
    tmp_path: Path, word: str
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    value = "str(os.getpid())" if word == "getpid" else f"os.environ.get('{word}', 'none')"
    (site / "sitecustomize.py").write_text(f"import os\nos.environ['MINE'] = {value}\n")
    node = Node(tmp_path, PYTHONPATH=str(site))
    try:
        node.env["PYTHONPATH"] = str(site)
        script = node.script("import os\nprint(os.environ['MINE'])")
        spawned = node.spawn(0, script, world=2)
        assert spawned.why_cold == f"sitecustomize uses {word} when Python starts"
        for rank in range(2):
            assert node.ended(0, rank).code == 0
            own = spawned.pids[rank] if word == "getpid" else rank
            assert node.text(0, rank) == f"{own}\n"
    finally:
        node.end()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU to be bound to")
def test_torch_binds_a_rank_to_its_cpus_only_once_the_script_imports_it(tmp_path: Path) -> None:
    binding = {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    node = Node(tmp_path, **binding)
    try:
        node.env |= binding
        script = node.script("""
            import os
            print(sorted(os.sched_getaffinity(0)))
            import torch
            print(sorted(os.sched_getaffinity(0)))
        """)
        fresh = subprocess.run(
            [sys.executable, script], env=os.environ | binding, capture_output=True, check=True
        )
        node.wait_warm()
        assert node.spawn(0, script).warm
        assert node.ended(0).code == 0
        assert node.text(0) == fresh.stdout.decode()
    finally:
        node.end()


@without_image
def test_a_cold_rank_has_its_title_if_pythonpath_is_its_first_variable(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": str(tmp_path)} | dict(os.environ))
    node.spawn(0, node.script("print(open('/proc/self/cmdline').read())"))
    assert node.ended(0).code == 0
    assert node.text(0).startswith(f"perdure rank {JOB} g0 r0: ")


@without_image
def test_what_does_not_end_is_named(node: Node) -> None:
    """A process in a session of its own is told, then killed, and the rank's stream says so."""
    script = node.script(
        "import subprocess, time\n"
        "loop = \"trap '' TERM; touch up; while :; do sleep 0.1; done\"\n"
        "subprocess.Popen(['sh', '-c', loop], start_new_session=True)\ntime.sleep(3600)"
    )
    node.spawn(0, script)
    wait_until((node.home / "up").exists, "the child")
    node.ask(KeeperKill(0, 1.0))
    node.expect(KeeperStopped, generation=0)
    said = Path(node.paths.stream(0, 0, "err")).read_text()
    assert "perdure: killed process" in said
    assert "touch up" in said


@without_image
def test_what_a_rank_leaves_at_a_good_end_may_finish(node: Node) -> None:
    upload = "until test -e go; do sleep 0.1; done; touch uploaded"
    script = node.script(
        f"import subprocess\nsubprocess.Popen({upload!r}, shell=True, start_new_session=True)"
    )
    node.spawn(0, script)
    assert node.ended(0).code == 0
    node.ask(KeeperKill(0))
    node.ask(KeeperStatus())
    node.expect(KeeperState)  # The order has been carried out.
    (node.home / "go").touch()
    node.expect(KeeperStopped, generation=0)
    assert (node.home / "uploaded").exists()


STORED = """
from importlib.util import find_spec
def list_stored(names):
    return [name for name in names if type(find_spec(name).loader).__name__ == "Stored"]
"""
"""What a script needs to see which modules the image has for it."""

BAD_MODULES = {
    "crasher": "import os\nos.abort()",
    "starter": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "asker": "import os\nrank = int(os.environ.get('RANK', '0'))",
    "drawer": "import random\nrng = random.Random()",
    "locker": "import multiprocessing\nlock = multiprocessing.Lock()",
    "opener": "file = open(__file__)",
    "handler": "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)",
    "maker": "import os, tempfile\ntempfile.mkdtemp(dir=os.path.dirname(__file__))",
    "leaver": "import sys\nsys.exit(3)",
    "setter": "import os\nos.environ['SET_AT_IMPORT'] = 'yes'",
}


def test_imports_are_preloaded(tmp_path: Path) -> None:
    """An image has what ranks imported, but not what crashes or makes what ranks may not share."""
    for name, text in BAD_MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    script = tmp_path / "train.py"
    names = ("wave", *BAD_MODULES, "sched")
    script.write_text(
        f"import sys\nfound = [m for m in {names} if m in sys.modules]\n" + TRAIL + STORED + "note("
        f"found, list_stored({names}), 'SET_AT_IMPORT' in os.environ)\n"
        "import sched, setter\nnote(os.environ['SET_AT_IMPORT'])\ntime.sleep(3600)"
    )
    paths = locate_job(str(tmp_path), JOB)
    os.makedirs(paths.root)
    Path(paths.imports).write_text(json.dumps(names[:-1]))
    node = Node(tmp_path, PYTHONPATH=str(tmp_path))
    node.env["PYTHONPATH"] = str(tmp_path)
    try:
        node.wait_warm()
        told = (
            "crasher (died)", "starter runs 1 thread", "asker reads RANK", "opener opens a file",
            "drawer makes a random state", "locker makes a lock", "handler handles a signal",
            "maker makes a temporary file or folder",
        )  # fmt: skip
        for said in told:
            assert said in node.log()
        assert node.spawn(0, str(script)).warm
        assert node.wait_trail(3)[1:] == [[[], ["wave", "setter"], False], ["yes"]]
        wait_until(lambda: node.log().count("is ready") >= 2, "another image")
        assert node.spawn(1, str(script)).warm
        assert "sched" in node.wait_trail(6)[4][1]
    finally:
        node.end()


def test_what_a_rank_imports_late_is_in_the_image_while_it_still_runs(tmp_path: Path) -> None:
    """Trainers import at their first step; the next rank starts from an image that has it all.

    The image is forked from the one before, which is ended, and outlives the end of a generation
    that comes in the middle of an import.
    """
    go = tmp_path / "go"
    # The image that `starter` makes unfit imports it at once; the one after that waits.
    (tmp_path / "slow.py").write_text(
        "import os, sys, time\n"
        f"while 'starter' not in sys.modules and not os.path.exists({str(go)!r}): time.sleep(0.02)"
    )
    for name in ("starter", "asker"):
        (tmp_path / f"{name}.py").write_text(BAD_MODULES[name])
    script = tmp_path / "train.py"
    names = ("sched", "wave", "slow", "starter", "asker")
    script.write_text(
        TRAIL + STORED + f"note(list_stored({names}))\n"
        "import sched\ntime.sleep(3)\nimport wave\ntime.sleep(3600)"
    )
    imported = Path(locate_job(str(tmp_path), JOB).imports)
    node = Node(tmp_path, PYTHONPATH=str(tmp_path))
    node.env["PYTHONPATH"] = str(tmp_path)

    def find_images() -> list[psutil.Process]:
        found = []
        for process in psutil.Process(node.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # One may just have ended.
                if "zygote" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    try:
        node.wait_warm()
        (first,) = find_images()
        assert node.spawn(0, str(script)).warm
        wait_until(
            lambda: imported.exists() and "wave" in json.loads(imported.read_bytes()),
            "a late import",
        )
        # Of modules beside the script a rank notes nothing: they may change.

        def said() -> bool:
            names = json.loads(imported.read_bytes())
            if "slow" not in names:  # Also where the rank has noted once more meanwhile.
                more = [*names, "starter", "asker", "slow"]
                replace_file(str(imported), json.dumps(more).encode())
            return "starter runs 1 thread" in node.log()

        wait_until(said, "what is said of `starter`")
        wait_until(lambda: "asker reads RANK at import" in node.log(), "what is said of `asker`")
        wait_until(lambda: len(find_images()) == 2, "an image that imports `slow`")
        ready = node.log().count("is ready")
        node.ask(KeeperKill(0))
        node.expect(KeeperStopped, generation=0)
        go.touch()
        wait_until(lambda: node.log().count("is ready") > ready, "another image")
        assert "died" not in node.log()
        wait_until(lambda: len(find_images()) == 1, "the end of the older image")
        assert is_gone(first.pid)
        assert node.spawn(1, str(script)).warm
        assert node.wait_trail(4)[3] == [["sched", "wave", "slow"]]
    finally:
        node.end()


def test_image_lost(tmp_path: Path) -> None:
    """An image that dies while it forks leaves a cold start, and is replaced."""
    switch = tmp_path / "switch"
    node = Node(tmp_path, PERDURE_FAILPOINTS=f"zygote/fork=crash,file={switch}")
    node.wait_warm()
    script = node.script(TRAIL)
    switch.touch()
    spawned = node.spawn(0, script)
    assert (spawned.warm, spawned.why_cold) == (False, "the image died while forking")
    assert node.ended(0).code == 0
    switch.unlink()
    node.wait_warm()
    assert node.spawn(1, script).warm
    assert node.ended(1).code == 0
    assert len(node.trail()) == 2
    node.end()


def test_stopped_parts_go_on(node: Node) -> None:
    """A stopped image forks a rank, and a stopped store answers it."""
    node.wait_warm()
    node.serve_store(0, 1)
    for title in ("zygote", "store"):
        keeper = psutil.Process(node.process.pid)
        (part, *_) = [p for p in keeper.children() if p.cmdline()[0].startswith(f"perdure {title}")]
        part.suspend()
        wait_until(lambda pid=part.pid: f"{pid} was stopped" in node.log(), "a word about it")
        wait_until(lambda part=part: part.status() != "stopped", "its going on")
    assert node.spawn(0, node.script(TRAIL)).warm
    assert node.ended(0).code == 0


def test_supervisor_gone(tmp_path: Path) -> None:
    """A keeper whose supervisor was killed ends its ranks and leaves."""
    node = Node(tmp_path, cold=True)
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
    node.process.wait(PATIENCE_S)
    wait_until(lambda: not node.leftovers(), "end of its ranks")
    node.disconnect()
