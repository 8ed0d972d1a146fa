"""T3: a full disk below a rank's output ends no script, and no success becomes a failure."""

import array
import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, is_readable, wait_until

SCRIPT = """
import os, sys
sys.path.insert(0, {source!r})
from perdure.worker.start.streams import survive_full_disks
disk, full = os.dup(1), os.open("/dev/full", os.O_WRONLY)
survive_full_disks()
print("before", flush=True)
for fd in (1, 2):
    os.dup2(full, fd)
print("x" * 100_000, flush=True)
print("lost", file=sys.stderr)
sys.stdout.write("lost too")
if {room}:
    sys.stdout.flush()
    os.dup2(disk, 1)
    print("after", flush=True)
"""


@pytest.fixture(autouse=True)
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have streams unbuffered only where a test says so."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.mark.parametrize("option", ["-u", "-B"])
@pytest.mark.parametrize("room", [True, False])
def test_what_does_not_fit_is_dropped_and_said_to_be(option: str, room: bool) -> None:
    source = str(Path(__file__).resolve().parents[3] / "src")
    program = SCRIPT.format(source=source, room=room)
    done = subprocess.run([sys.executable, option, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = "\nperdure: 100,009 bytes did not fit on the disk\nafter\n" if room else ""
    assert done.stdout == f"before\n{said}"


def test_a_stream_that_was_closed_is_closed() -> None:
    program = "import os; from perdure.worker.start.streams import survive_full_disks as s; s()\n"
    program += "os.close(1)\nprint('x', flush=True)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode
    assert "Bad file descriptor" in done.stderr


def start(program: str, option: str = "-B", **keywords: Any) -> "subprocess.Popen[str]":
    """Start `program` with such streams."""
    begin = "from perdure.worker.start.streams import survive_full_disks\nsurvive_full_disks()\n"
    command = [sys.executable, option, "-c", begin + program]
    keywords = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | keywords
    keywords |= {"pipesize": 4096}
    return subprocess.Popen(command, text=True, **keywords)


def signal_amid_a_line(process: "subprocess.Popen[str]") -> None:
    """Send SIGALRM while the process waits in a line for a reader, and wait for its handler.

    A line has more bytes than the pipe: once any of it is there, the process is in it.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    assert is_readable(process.stdout)
    process.send_signal(signal.SIGALRM)
    assert os.read(process.stderr.fileno(), 1) == b"."


PRINTING_HANDLER = """
import os, signal
def handle(number, frame):
    os.write(2, b".")
    print("tick", flush=True)
signal.signal(signal.SIGALRM, handle)
for _ in range(20):
    print("x" * 9_990, flush=True)
"""


@pytest.mark.parametrize("option", ["-u", "-B"])
def test_a_signal_handler_may_print_while_a_line_is_written(option: str) -> None:
    with start(PRINTING_HANDLER, option) as process:
        signal_amid_a_line(process)
        said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert (said.count("x"), said.count("tick\n"), said.count("\n")) == (199_800, 1, 21)


def test_what_a_handler_raises_is_no_full_disk() -> None:
    program = """
import errno, os, signal
def handle(number, frame):
    os.write(2, b".")
    raise OSError(errno.ENOSPC, "the handler's own")
signal.signal(signal.SIGALRM, handle)
try:
    print("x" * 100_000, flush=True)
except OSError:
    os._exit(7)
"""
    with start(program) as process:
        signal_amid_a_line(process)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7


def test_a_script_finds_what_it_may_call() -> None:
    program = """
import io, sys
print("one")
sys.stdout.flush()
assert sys.stdout.buffer.write(memoryview(b"two\\n").cast("H")) == 4
assert sys.stdout.buffer.write(b"") == 0
sys.stdout.buffer.flush()
assert sys.stdout.buffer.fileno() == sys.stdout.fileno() == 1
sys.stdout.reconfigure(line_buffering=True)
assert sys.stdout.line_buffering
print("three")
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")
print("four")
"""
    with start(program) as process:
        said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert said == "one\ntwo\nthree\nfour\n"


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    with out.open("w") as file, start(program + "print('x' * 10_000)", stdout=file) as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert out.stat().st_size == 4096


def test_a_fork_has_lost_nothing_yet() -> None:
    program = """
import os, sys
disk, full = os.dup(1), os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
print("lost", flush=True)
os.dup2(disk, 1)
if os.fork():
    os.wait()
print("after", flush=True)
"""
    with start(program) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert said == "after\n\nperdure: 5 bytes did not fit on the disk\nafter\n"


def test_a_pipe_that_a_child_has_made_non_blocking_loses_nothing() -> None:
    """As ssh and node do with the streams that they inherit."""
    program = "import os\nos.set_blocking(1, False)\nprint('x' * 1_000_000)\nprint('after')\n"
    process = start(program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    held = array.array("i", [0])

    def is_full() -> bool:
        fcntl.ioctl(process.stdout, termios.FIONREAD, held)  # type: ignore[arg-type]
        return held[0] >= 4096 or process.poll() is not None

    wait_until(is_full, "a full pipe")
    assert process.communicate(timeout=PATIENCE_S)[0] == "x" * 1_000_000 + "\nafter\n"
