"""`perdure watch` and `status --devices --watch` on a real terminal: drawing, keys, signals.

No process is behind the job; pyte is the terminal that reads what is drawn.
"""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyte
import pytest
from tests.living import LivingJob
from tests.waiting import PATIENCE_S, is_readable

ALT_ON, ALT_OFF, CURSOR_OFF, CURSOR_ON = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A command on a pseudo-terminal of its own."""

    def __init__(
        self,
        home: Path,
        *args: str,
        columns: int = 80,
        lines: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.fd, self.tty = pty.openpty()
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.tty)
        own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        own |= {"TERM": "xterm-256color", "PERDURE_HOME": str(home)} | dict(env or {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "perdure", *args],
            stdin=self.tty, stdout=self.tty, stderr=self.tty, env=own, start_new_session=True,
        )  # fmt: skip

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def read(self, seconds: float) -> None:
        if is_readable(self.fd, seconds):
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
        while is_readable(self.fd, 0.05):
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

        def begin(*args: str, **options: Any) -> Terminal:
            terminal = Terminal(job.home, *args, **options)
            stack.callback(terminal.close)
            return terminal

        yield begin


def test_it_follows_the_job_until_q(job: LivingJob, start: Callable[..., Terminal]) -> None:
    terminal = start("watch", "j", "--every", "0.1")
    terminal.wait_text("j running  step 7  8.0 steps/s  2 ranks")
    terminal.wait_text("allreduce #7")
    assert termios.tcgetattr(terminal.tty) != terminal.before
    job.write(step=9, state="paused")
    terminal.wait_text("j paused  step 9")
    terminal.type(b"q")
    assert terminal.wait() == 0
    assert terminal.is_given_back()
    assert "j paused  step 9" in terminal.text  # What was last seen stays.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_gives_the_terminal_back(
    number: signal.Signals, start: Callable[..., Terminal]
) -> None:
    terminal = start("watch", "j", "--every", "3600")
    terminal.wait_text("step 7")
    terminal.process.send_signal(number)
    assert terminal.wait() == 128 + number
    assert terminal.is_given_back()


def test_colours_are_left_out_where_nobody_wants_them(start: Callable[..., Terminal]) -> None:
    terminal = start("watch", "j", env={"NO_COLOR": "1", "COLORTERM": "truecolor"})
    terminal.wait_text("j running  step 7")
    colours = re.findall(rb"[34]8;2;(\d+);(\d+);(\d+)", terminal.raw)
    assert colours
    assert all(len(set(colour)) == 1 for colour in colours)  # Nothing but grey.


def test_the_map_is_followed_too(job: LivingJob, start: Callable[..., Terminal]) -> None:
    devices = tuple(
        msgspec.structs.replace(job.picture.devices[0], device=f"cpu-x-{i}") for i in range(40)
    )
    job.write(devices=(*devices, msgspec.structs.replace(devices[0], device="bad", state="lost")))
    terminal = start("status", "j", "--devices", "--watch", lines=16)
    terminal.wait_text("bad ")
    rows = [line for line in terminal.screen.display if "cpu-x-" in line or "bad " in line]
    assert rows[0].strip().startswith("bad ")  # Whoever is not well comes first.
    terminal.type(b"q")
    assert terminal.wait() == 0
    assert terminal.is_given_back()


def test_lines_are_there_for_whom_the_screen_is_not(
    job: LivingJob, start: Callable[..., Terminal]
) -> None:
    job.write(state="done")
    plain = start("watch", "j", "--plain")
    assert plain.wait() == 0
    assert ALT_ON not in plain.raw
    assert "j done  step 7" in plain.text


def test_without_textual_there_are_lines_and_a_word(job: LivingJob, tmp_path: Path) -> None:
    (tmp_path / "textual.py").write_text(
        "raise ModuleNotFoundError('No module named textual', name='textual')"
    )
    job.write(state="done")
    code = "import sys; from perdure.cli.looking import watch; watch.show_screen('j', 0.1)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S,
        env=os.environ | {"PERDURE_HOME": str(job.home), "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "j done  step 7" in done.stdout
    assert "pip install textual" in done.stderr


def test_programs_follow_the_map_by_its_changes(job: LivingJob) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure", "status", "j", "--devices", "--watch", "--json"],
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
