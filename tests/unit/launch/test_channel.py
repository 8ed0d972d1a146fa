"""Commands of this machine's own shell: their end is known, and nothing of them is left."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.waiting import wait_until

from perdure.launch.channel import Channel
from perdure.launch.exchange import FloodError, UnreachedError
from perdure.launch.ssh.submit import _compare
from perdure.model.platforms.profile import LaunchSection

HERE = Channel(LaunchSection())


def endless(folder: Path) -> str:
    """Return a script that never ends, nor minds that nobody reads what it says."""
    group = f"ps -o pgid= -p $$ > {folder}/group"
    return f"{group}; while true; do date; sleep 0.2; done"


def check_gone(folder: Path) -> None:
    """See that nothing of its process group is left, nor the script, which may not have begun."""
    group = folder / "group"
    number = int(group.read_text().strip() or 0) if group.exists() else 0

    def is_gone() -> bool:
        words = [one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])]
        try:
            os.killpg(number or 1 << 30, 0)
        except ProcessLookupError:
            return not any(str(group) in word for one in words for word in one)
        return False

    wait_until(is_gone, f"end of the processes of group {number}")


class Enough(Exception):
    """Who reads has seen enough."""


def test_a_stream_that_nobody_reads_any_more_leaves_nothing(tmp_path: Path) -> None:
    def read(line: str) -> None:
        raise Enough

    script = endless(tmp_path)
    with pytest.raises(Enough):
        HERE.stream(script, read)
    check_gone(tmp_path)


def test_a_command_that_does_not_answer_in_time_leaves_nothing(tmp_path: Path) -> None:
    script = endless(tmp_path)
    with pytest.raises(UnreachedError, match="no answer in 1 s"):
        HERE.run(script, timeout_s=1.0)
    check_gone(tmp_path)


def test_how_a_command_ended_is_told_with_what_it_said() -> None:
    done = HERE.run("cat; echo bad >&2; exit 37", stdin=b"hello")
    assert (done.code, done.out, done.err, done.banner) == (37, "hello", "bad", "")
    lines: list[str] = []
    assert HERE.stream("echo one; echo two; exit 3", lines.append) == 3
    assert lines == ["one\n", "two\n"]


def test_255_is_the_command_s_where_it_was_told(tmp_path: Path) -> None:
    assert HERE.run("exit 255").code == 255
    ssh = tmp_path / "ssh"  # As the client leaves when the connection breaks.
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(UnreachedError):
            Channel(LaunchSection(host="box")).run("true")


@pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync")
def test_a_file_that_is_another_there_is_named(tmp_path: Path) -> None:
    for side, text in (("here", "one\n"), ("there", "two\n")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "train.py").write_text(text)
        (tmp_path / side / "same.py").write_text("same\n")
        os.utime(tmp_path / side / "train.py", (1e9, 1e9))  # Sizes and times tell nothing.
    assert _compare(HERE, tmp_path / "here", str(tmp_path / "there"), ()) == ["train.py"]


FLOOD = "yes | head -c 10G"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: HERE.run(FLOOD),
        lambda: HERE.run(f"{FLOOD} >&2"),
        lambda: HERE.query(FLOOD, dict),
    ],
    ids=["answer", "complaints", "query"],
)
def test_a_box_that_floods_does_not_fill_the_memory(ask: Callable[[], object]) -> None:
    """It is read to a bound; how large this process gets by it, the gate `flood-memory` says."""
    with pytest.raises(FloodError, match="this machine says more than 64 MiB"):
        ask()


@pytest.mark.parametrize("flood", [FLOOD, "head -c 10G /dev/zero"], ids=["lines", "no-end"])
def test_a_login_profile_that_floods_does_not_fill_the_memory(tmp_path: Path, flood: str) -> None:
    ssh = tmp_path / "ssh"  # As a box whose profile prints before anything of ours.
    ssh.write_text(f"#!/bin/sh\n{flood}\n")
    ssh.chmod(0o755)
    box = Channel(LaunchSection(host="box"))

    def hold() -> None:
        with box.hold(b"pass"):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for ask in (
            lambda: box.run("true"),
            lambda: box.ask("true"),
            lambda: box.stream("true", print),
            hold,
        ):
            with pytest.raises(FloodError, match=r"box says more than (64|1) MiB: not"):
                ask()


def test_what_is_long_comes_whole_where_it_may() -> None:
    """A large question and a large answer at once, and lines of a stream without a bound."""
    text = b"x" * (3 << 20)
    assert HERE.run("cat", stdin=text).out.encode() == text
    assert HERE.run("echo short", stdin=text).out == "short\n"  # It reads nothing of it.
    seen: list[int] = []
    assert HERE.stream("yes | head -c 8M", lambda line: seen.append(len(line))) == 0
    assert sum(seen) == 8 << 20
