"""`perdure watch` and `map --watch` on a real terminal: what is drawn, keys, signals, leaving.

The job is a directory with a snapshot in it, and a lock that says that it lives; pyte is the
terminal that reads what is drawn.
"""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyte
import pytest

from perdure.cli.looking.watch import _leave_on_signals, _read_keys
from perdure.model.codec import encode
from perdure.model.job import JobSpec
from perdure.model.report import DeviceRow, RankRow, Snapshot
from perdure.service.jobfiles import LOCK, write_document

ALT_ON, ALT_OFF, CURSOR_OFF, CURSOR_ON = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h"
PATIENCE_S = 60.0


class LivingJob:
    """A job of 2 ranks as its controller and its `perdure run` leave it on disk."""

    def __init__(self, home: Path) -> None:
        self.home, self.root = home, home / "jobs" / "j"
        self.root.mkdir(parents=True)
        (self.root / "job.json").write_bytes(encode(JobSpec(name="j", script="x.py", nproc=2)))
        (self.root / "endpoint.json").write_text(
            '{"url":"nats://x:1","token":"","clock_offset_s":0}'
        )
        self.lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.picture = Snapshot(
            version=1, job="j", state="running", at_s=0.0, started_s=0.0, generation=0, restarts=0,
            step=7, steps_per_s=8.0, world_size=2, depth="resumable", reason="",
            ranks=tuple(RankRow(r, 0, 9, "running", "step", 7, 8.0, "allreduce #7", 1.0, 1)
                        for r in range(2)),
            devices=(DeviceRow("cpu-x-0", 0, (0,), (), "in use", ("node0/slot0",)),),
        )  # fmt: skip
        self.write()

    def write(self, **changes: object) -> None:
        now = time.monotonic()
        self.picture = msgspec.structs.replace(self.picture, at_s=now, **changes)
        write_document(str(self.root / "state.json"), self.picture)

    def die(self) -> None:
        """`perdure run` is gone, and has not ended the job."""
        os.close(self.lock)
        self.lock = -1


class Terminal:
    """A command on a pseudo-terminal of its own."""

    def __init__(self, home: Path, *args: str, columns: int = 80, lines: int = 24) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.fd, self.tty = pty.openpty()
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.tty)
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        env |= {"TERM": "xterm-256color", "PERDURE_HOME": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "perdure", *args],
            stdin=self.tty, stdout=self.tty, stderr=self.tty, env=env, start_new_session=True,
        )  # fmt: skip

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def read(self, seconds: float) -> None:
        if select.select([self.fd], [], [], seconds)[0]:
            data = os.read(self.fd, 65536)
            self.raw += data
            self.stream.feed(data)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.text}\n{self.raw[-2000:]!r}"
            self.read(0.05)

    def wait_text(self, words: str) -> None:
        self.wait_until(lambda: words in self.text, words)

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def wait(self) -> int:
        """Return the exit code, after everything was read."""
        self.wait_until(lambda: self.process.poll() is not None, "end")
        while select.select([self.fd], [], [], 0.05)[0]:
            self.read(0)
        return self.process.returncode

    def is_given_back(self) -> bool:
        """Whether the terminal is as it was: its mode, its screen, its cursor."""
        mode = termios.tcgetattr(self.tty) == self.before
        screen = self.raw.rfind(ALT_OFF) > self.raw.rfind(ALT_ON) >= 0
        return mode and screen and self.raw.rfind(CURSOR_ON) > self.raw.rfind(CURSOR_OFF)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)
        os.close(self.tty)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LivingJob]:
    living = LivingJob(tmp_path)
    yield living
    if living.lock >= 0:
        living.die()


@pytest.fixture
def start(job: LivingJob) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def begin(*args: str, columns: int = 80, lines: int = 24) -> Terminal:
            terminal = Terminal(job.home, *args, columns=columns, lines=lines)
            stack.callback(terminal.close)
            return terminal

        yield begin


def test_it_follows_the_job_until_q(job: LivingJob, start: Callable[..., Terminal]) -> None:
    terminal = start("watch", "j", "--every", "0.1")
    terminal.wait_text("j running  step 7  8.0 steps/s  2 ranks")
    assert "allreduce #7" in terminal.text
    assert termios.tcgetattr(terminal.tty) != terminal.before
    job.write(step=9, state="paused")
    terminal.wait_text("j paused  step 9")
    terminal.type(b"xq")
    assert terminal.wait() == 0
    assert terminal.is_given_back()
    assert "j paused  step 9" in terminal.text  # What was last seen stays.


def test_a_key_looks_at_once(job: LivingJob, start: Callable[..., Terminal]) -> None:
    terminal = start("watch", "j", "--every", "3600")
    terminal.wait_text("step 7")
    job.write(step=8)
    terminal.type(b" ")
    terminal.wait_text("step 8")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_gives_the_terminal_back(
    number: signal.Signals, start: Callable[..., Terminal]
) -> None:
    terminal = start("watch", "j", "--every", "3600")
    terminal.wait_text("step 7")
    terminal.process.send_signal(number)
    assert terminal.wait() == 128 + number
    assert terminal.is_given_back()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_comes_as_a_wait_begins_is_not_forgotten(number: signal.Signals) -> None:
    """Nor one that came while an object was finalized, where what a handler raises is dropped."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(number)

    with _leave_on_signals() as (leave_if_asked, woken), _read_keys(woken) as wait_key:
        leave_if_asked()
        one = Finalized()
        del one
        began_s = time.monotonic()
        assert not wait_key(3600.0)
        assert time.monotonic() - began_s < 10.0
        with pytest.raises(SystemExit) as ended:
            leave_if_asked()
    assert ended.value.code == 128 + number


def test_a_narrow_window_keeps_what_matters(start: Callable[..., Terminal]) -> None:
    terminal = start("watch", "j", columns=40, lines=10)
    terminal.wait_text("steps/s")
    assert max(len(line.rstrip()) for line in terminal.screen.display) <= 40
    table = next(line for line in terminal.screen.display if line.startswith("ranks"))
    assert table.split() == ["ranks", "state", "step", "steps/s"]


def test_the_end_of_the_job_ends_it(job: LivingJob, start: Callable[..., Terminal]) -> None:
    terminal = start("watch", "j", "--every", "0.1")
    terminal.wait_text("step 7")
    job.write(state="done", step=10, reason="done")
    assert terminal.wait() == 0
    assert terminal.is_given_back()
    assert "j done  step 10" in terminal.text
    assert "perdure report j" in terminal.text


def test_a_job_whose_run_was_killed_is_told_of(
    job: LivingJob, start: Callable[..., Terminal]
) -> None:
    terminal = start("watch", "j", "--every", "0.1")
    terminal.wait_text("step 7")
    job.die()
    assert terminal.wait() == 0
    assert "j lost" in terminal.text
    assert "the same --name resumes it" in terminal.text
    assert "perdure diagnose j" in terminal.text


def test_an_old_picture_says_so(job: LivingJob, start: Callable[..., Terminal]) -> None:
    job.picture = msgspec.structs.replace(job.picture, at_s=time.monotonic() - 600)
    write_document(str(job.root / "state.json"), job.picture)
    terminal = start("watch", "j", "--every", "0.1")
    terminal.wait_text("the controller has said nothing for 6")


def test_the_map_is_followed_too(job: LivingJob, start: Callable[..., Terminal]) -> None:
    devices = tuple(
        msgspec.structs.replace(job.picture.devices[0], device=f"cpu-x-{i}") for i in range(40)
    )
    job.write(devices=(*devices, msgspec.structs.replace(devices[0], device="bad", state="lost")))
    terminal = start("map", "j", "--watch", lines=12)
    terminal.wait_text("and 32 more: perdure map j")
    assert terminal.screen.display[2].startswith("bad ")
    terminal.type(b"q")
    assert terminal.wait() == 0
    assert terminal.is_given_back()


def test_programs_follow_the_map_by_its_changes(job: LivingJob) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure", "map", "j", "--watch", "--json"],
        env=dict(os.environ, PERDURE_HOME=str(job.home)), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as out:
        assert json.loads(out.readline())["devices"][0]["state"] == "in use"
        job.write(step=8)  # No change of a device.
        job.write(devices=(msgspec.structs.replace(job.picture.devices[0], state="lost"),))
        assert json.loads(out.readline())["devices"][0]["state"] == "lost"
        job.write(state="done")
        assert out.readline() == b""
    assert process.wait(PATIENCE_S) == 0
