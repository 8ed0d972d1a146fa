"""What nobody reads blocks nobody (T10)."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, is_readable, wait_until

from perdure.cli.speech.unread import UnreadStream
from perdure_lab.cli.trace import show_play


class Pipe:
    """A pipe whose reader sleeps until asked."""

    def __init__(self, pending_max: int = 200_000) -> None:
        self.reader, writer = os.pipe()
        self.file = os.fdopen(writer, "w")
        self.stream = UnreadStream(self.file, pending_max=pending_max)

    def fill(self) -> int:
        """Write until the pipe is full and lines are dropped; return how many were written."""
        for number in range(5000):
            print(f"line {number} " + "x" * 90, file=self.stream)
        return 5000

    def read(self, until: str) -> str:
        """Read until the text ends with `until`."""
        data = b""
        while not data.decode().endswith(until):
            assert is_readable(self.reader), data[-500:]
            data += os.read(self.reader, 1 << 16)
        return data.decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.file.close()
    os.close(pipe.reader)


def test_lines_without_a_reader_are_dropped_counted_and_said_to_be(pipe: Pipe) -> None:
    written = pipe.fill()
    assert not pipe.stream.finish(0.05)
    print("end", file=pipe.stream)
    lines = pipe.read("end\n").splitlines()[:-1]
    shown = [line for line in lines if line.startswith("line ")]
    lost = sum(int(line.split()[1]) for line in lines if line.startswith("[perdure]"))
    numbers = [int(line.split()[1]) for line in shown]
    assert shown == [f"line {n} " + "x" * 90 for n in numbers]  # Whole,
    assert numbers == sorted(numbers)  # and in order.
    assert lost > 0
    assert len(shown) + lost == written


def test_all_is_shown_to_a_reader_and_at_the_end(pipe: Pipe) -> None:
    print("one", file=pipe.stream)
    assert pipe.stream.finish()
    assert pipe.read("\n") == "one\n"


def test_the_end_waits_for_no_reader_for_ever_and_its_words_are_not_dropped(pipe: Pipe) -> None:
    pipe.fill()
    assert not pipe.stream.finish(0.05)
    print("the report", file=pipe.stream)
    assert "are not shown" in pipe.read("the report\n")


def test_the_report_after_a_flood_is_not_dropped(pipe: Pipe) -> None:
    """T10: a reader who is only slow gets it, however far behind he was when it was printed."""
    pipe.fill()
    pipe.stream.keep_all()
    print("the report", file=pipe.stream)
    assert "are not shown" in pipe.read("the report\n")


def test_a_long_line_is_shown_whole(pipe: Pipe) -> None:
    print("y" * 300_000, file=pipe.stream)
    assert len(pipe.read("\n")) == 300_001


def test_a_reader_that_has_gone_away_is_written_to_no_more(pipe: Pipe) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.reader)
    pipe.fill()
    wait_until(lambda: not pipe.stream.finish(0.1))
    assert pipe.stream.write("x") == 1


def test_a_lone_surrogate_is_shown_escaped(pipe: Pipe) -> None:
    print("a\ud800b", file=pipe.stream)
    assert pipe.read("\n") == "a\\ud800b\n"


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    pipe.stream.pending_max = 1 << 22
    os.set_blocking(pipe.file.fileno(), False)
    for number in range(3000):
        print(f"{number} " + "x" * 90, file=pipe.stream)
    assert pipe.read("2999 " + "x" * 90 + "\n").count("\n") == 3000


def test_what_has_no_descriptor_is_left_as_it_is() -> None:
    with pytest.raises(OSError, match="fileno"):
        UnreadStream(io.StringIO())


@pytest.mark.parametrize(
    ("closed", "command", "code"), [(">&-", "status", 0), ("<&- >&- 2>&-", "run --bad", 2)]
)
def test_streams_that_were_closed_are_as_if_nobody_read(
    closed: str, command: str, code: int, tmp_path: Path
) -> None:
    program = (
        "import os, sys; from perdure.cli.main import main\n"
        "try:\n    main(sys.argv[2:])\n"
        "finally:\n    open(sys.argv[1], 'w').write(str([*map(os.get_inheritable, range(3))]))"
    )
    told = tmp_path / "told"
    words = [sys.executable, "-c", program, str(told), *command.split()]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *words], env={"PERDURE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert told.read_text() == "[True, True, True]"


def test_a_play_goes_on_and_ends_what_it_has_started_though_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`2>&1 | tee log`: Ctrl-C ends tee first, and the job has to be ended as well."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "w") as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", file)
            os.close(reader)
            with show_play("drill") as bar:
                bar.say("start", 0.0)
                bar.say("stop", 1.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
