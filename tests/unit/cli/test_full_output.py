"""A command whose standard output or error cannot be written says so, where it still can."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.disks import small_disk
from tests.waiting import PATIENCE_S

FULL = "perdure: error: standard output: No space left on device\n"


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file on a disk that has no room left."""
    with small_disk(tmp_path / "disk") as disk:
        (disk / "fill").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        (disk / "out").touch()
        yield disk / "out"


def run(home: Path, args: str, **streams: int) -> "subprocess.CompletedProcess[str]":
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run(
        [sys.executable, "-m", "perdure", *args.split()],
        env=dict(os.environ, PERDURE_HOME=str(home / "home")), text=True,
        timeout=PATIENCE_S, **given,
    )  # type: ignore[call-overload, no-any-return]  # fmt: skip


@pytest.mark.parametrize("args", ["status", "status --json", "--version"])
def test_an_answer_that_cannot_be_written_is_an_error(
    tmp_path: Path, full: Path, args: str
) -> None:
    with open(full, "w") as out:
        done = run(tmp_path, args, stdout=out.fileno())
    assert (done.returncode, done.stderr) == (3, FULL)


def test_an_error_that_cannot_be_a_document_is_said_in_words(tmp_path: Path, full: Path) -> None:
    with open(full, "w") as out:
        done = run(tmp_path, "status nosuch --json", stdout=out.fileno())
    assert done.returncode == 2
    assert done.stderr.startswith("perdure: error: unknown job `nosuch`\nhint: ")


def test_an_error_that_nobody_can_be_told_is_its_exit_code(tmp_path: Path, full: Path) -> None:
    with open(full, "w") as out:
        done = run(tmp_path, "status nosuch", stderr=out.fileno())
        assert done.returncode == 2
        done = run(tmp_path, "status nosuch --json", stderr=out.fileno())
    assert json.loads(done.stdout)["exit_code"] == 2


def test_who_reads_no_further_is_no_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = run(tmp_path, "status", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_queue_is_asked_is_no_watcher(tmp_path: Path, full: Path) -> None:
    """Only `queue run` goes on where its output is not taken."""
    with open(full, "w") as out:
        done = run(tmp_path, "queue ls", stdout=out.fileno())
    assert (done.returncode, done.stderr) == (3, FULL)
