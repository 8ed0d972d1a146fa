"""T3: a full disk below a rank's output ends no script, and no success becomes a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
sys.path.insert(0, {source!r})
from perdure.worker.streams import survive_full_disks
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
    program = "import os; from perdure.worker.streams import survive_full_disks as s; s()\n"
    program += "os.close(1)\nprint('x', flush=True)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode
    assert "Bad file descriptor" in done.stderr
