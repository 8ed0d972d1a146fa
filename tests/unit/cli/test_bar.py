"""A bar of progress, on a terminal and where there is none to draw it on."""

import os
import pty
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

from perdure.cli.speech.bar import APPEARS_S, Bar


@pytest.mark.parametrize(
    ("name", "told"), [("replay", "perdure: replay: measure 2 nodes\n"), ("", "")]
)
def test_without_a_terminal_a_bar_is_a_line_for_each_part_or_nothing(
    name: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # Logs of CI show colours and are no terminal.
    with Bar(name) as bar:
        bar.say("measure", 0.5, "2 nodes")
        bar.say("measure", 1.0, "1 nodes")
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", told)


PROGRAM = """
import itertools, select, sys, time
from perdure.cli.speech.bar import Bar

def goes_on():
    return not select.select([sys.stdin], [], [], 0.05)[0]

"""


def draw(code: str, *words: str) -> str:
    """Return what a program writes to a terminal that is its standard error.

    Once all `words` were written, its `goes_on` says that it is to end.
    """
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", PROGRAM + code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=theirs, env=env) as process:
        os.close(theirs)
        assert process.stdin is not None
        written = b""
        try:
            while True:
                if all(word.encode() in written for word in words):
                    process.stdin.close()
                written += os.read(ours, 1 << 16)
        except OSError:  # The other end is closed.
            pass
        assert process.wait(PATIENCE_S) == 0
    os.close(ours)
    return written.decode()


def test_on_a_terminal_it_has_rate_and_time_left() -> None:
    code = """
with Bar(appears_s=0.1) as bar:
    for step in itertools.count():
        if not goes_on():
            break
        bar.count("pull", min(step * 1e5, 119e6), 120e6)
"""
    words = ("pull", "of 120", "MB/s", "left")
    seen = draw(code, *words)
    assert all(word in seen for word in words)


def test_nothing_is_drawn_of_what_is_over_at_once_or_answered_as_json() -> None:
    code = """
with Bar({}) as bar:
    bar.count("pull", 60e6, 120e6)
    bar.watch("pull", 120e6, lambda: 60e6)
    assert len(bar._threads) == {}
"""
    assert APPEARS_S >= 1.0
    assert draw(code.format("appears_s=3600.0", 2)) == ""
    assert draw(code.format("appears_s=0.0, as_json=True", 0)) == ""


def test_what_another_does_is_measured_while_it_does_it() -> None:
    code = """
began = time.monotonic()
with Bar(appears_s=0.1) as bar:
    bar.watch("pull", 40e6, lambda: 1e7 * (time.monotonic() - began))
    while goes_on():
        pass
"""
    assert "of 40" in draw(code, "of 40")
