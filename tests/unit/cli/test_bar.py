"""A bar of progress, on a terminal and where there is none to draw it on."""

import os
import pty
import subprocess
import sys

import pytest

from perdure.cli.speech.bar import Bar


@pytest.mark.parametrize(
    ("name", "told"), [("replay", "perdure: replay: measure 2 nodes\n"), ("", "")]
)
def test_without_a_terminal_a_bar_is_a_line_for_each_part_or_nothing(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bar(name) as bar:
        bar.say("measure", 0.5, "2 nodes")
        bar.say("measure", 1.0, "1 nodes")
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", told)


def draw(code: str) -> str:
    """Return what a program writes to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    program = "import time; from perdure.cli.speech.bar import Bar\n" + code
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", program], stderr=theirs, env=env) as process:
        os.close(theirs)
        written = b""
        try:
            while data := os.read(ours, 1 << 16):
                written += data
        except OSError:  # The other end is closed.
            pass
        assert process.wait(60) == 0
    os.close(ours)
    return written.decode()


COUNT = """
with Bar({}) as bar:
    for mb in range(0, 60, 2):
        bar.count("pull", mb * 1e6, 120e6)
        time.sleep(0.05)
"""


def test_on_a_terminal_it_has_rate_and_time_left() -> None:
    seen = draw(COUNT.format("appears_s=0.1"))
    assert "pull" in seen
    assert "of 120" in seen
    assert "MB/s" in seen
    assert "left" in seen


def test_nothing_is_drawn_of_what_is_over_at_once_or_answered_as_json() -> None:
    assert draw(COUNT.format("")) == ""
    assert draw(COUNT.format("appears_s=0.1, as_json=True")) == ""


def test_what_another_does_is_measured_while_it_does_it() -> None:
    code = """
began = time.monotonic()
with Bar(appears_s=0.1) as bar:
    bar.watch("pull", 40e6, lambda: 1e7 * (time.monotonic() - began))
    time.sleep(2)
"""
    assert "of 40" in draw(code)
