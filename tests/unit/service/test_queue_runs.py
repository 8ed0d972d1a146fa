"""A queue's journal after a kill in the middle of a record; what a person wants run again, runs."""

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.failpoints import FOLDER, SWITCH, switch
from perdure.files.rotation import list_parts
from perdure.model.errors import PlatformError
from perdure.model.queue import Again, Ended, Ending, Item, Put, Started
from perdure.service.queue.runner import Runner
from perdure.service.queue.store import OUTPUT, QueueStore


def test_a_record_that_was_torn_by_a_kill_is_cut_off_by_the_next(tmp_path: Path) -> None:
    store = QueueStore(str(tmp_path), "q")
    with store.writing() as writer:
        writer.append(Put(1.0, Item(name="a", command=("true",))))
    journal = store.root / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:20])
    with QueueStore(str(tmp_path), "q").writing() as writer:
        writer.append(Put(2.0, Item(name="b", command=("true",))))
    assert list(QueueStore(str(tmp_path), "q").read().lines) == ["a", "b"]


@pytest.mark.parametrize("bit", [0, 5])
def test_a_flipped_bit_behind_the_last_record_does_not_cost_it(tmp_path: Path, bit: int) -> None:
    """Its line had no end any more, so it was taken for torn, and cut off: it was run again."""
    item = Item(name="a", command=("true",), cwd=str(tmp_path))
    with QueueStore(str(tmp_path), "q").writing() as writer:
        writer.append(Put(1.0, item))
        writer.append(Started(2.0, "a", 1, ("cpu-0",)))
        writer.append(Ended("a", 1, Ending(at_s=3.0, code=0)))
    journal = writer.root / "journal.jsonl"
    data = bytearray(journal.read_bytes())
    data[-1] ^= 1 << bit
    journal.write_bytes(data)
    assert QueueStore(str(tmp_path), "q").read().lines["a"].state == "done"
    for name in "bc":
        with QueueStore(str(tmp_path), "q").writing() as writer:
            writer.append(Put(4.0, Item(name=name, command=("true",))))
    lines = QueueStore(str(tmp_path), "q").read().lines
    assert [line.state for line in lines.values()] == ["done", "waiting", "waiting"]


def test_what_a_full_disk_took_of_some_records_does_not_count(tmp_path: Path) -> None:
    store = QueueStore(str(tmp_path), "q")
    puts = [Put(1.0, Item(name=name, command=("x" * 1500,))) for name in "abcdef"]
    with store.writing() as writer:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            with pytest.raises(PlatformError):
                writer.append(*puts)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
    assert not QueueStore(str(tmp_path), "q").read().lines


def test_what_is_asked_for_again_runs_although_its_files_are_there(tmp_path: Path) -> None:
    proof = tmp_path / "done"
    proof.write_text("x")
    store = QueueStore(str(tmp_path), "q")
    item = Item(name="a", command=("true",), cwd=str(tmp_path), done=(str(proof),))
    with store.writing() as writer:
        writer.append(Put(1.0, item))
    assert Runner(store, ("cpu-0",), lambda line: None).run().lines["a"].attempts == 0
    with store.writing() as writer:
        writer.append(Again(2.0, "a"))
    line = Runner(store, ("cpu-0",), lambda line: None).run().lines["a"]
    assert (line.state, line.attempts) == ("done", 1)


_WRITER = """
import os, time
lines = (b"x" * 99_999 + b"\\n") * 100
assert os.write(1, lines) == len(lines)
while os.fstat(1).st_size >= len(lines):
    time.sleep(0.05)
print("end")
"""
"""Ends once the file that it writes to was cut."""


def test_what_an_item_writes_is_kept_to_a_bounded_size(tmp_path: Path) -> None:
    store = QueueStore(str(tmp_path), "q")
    item = Item(name="a", command=(sys.executable, "-c", _WRITER), cwd=str(tmp_path))
    with store.writing() as writer:
        writer.append(Put(1.0, item))
    assert Runner(store, ("cpu-0",), lambda line: None).run().lines["a"].state == "done"
    first, newest = list_parts(str(store.attempt("a", 1) / OUTPUT))
    assert first.begin == 0
    assert newest.end == 100 * 100_000 + len("end\n")
    assert newest.end - newest.begin < 100_000


_REMOVED = """
import sys
from perdure.model.queue import Claim, Item, Put, Removed, Started
from perdure.service.queue import runner
from perdure.service.queue.store import QueueStore

store = QueueStore(sys.argv[1], "q")
with store.writing() as writer:
    writer.append(Put(1.0, Item(name="a", command=("true",))), Started(2.0, "a", 1, ("cpu-0",)))
    writer.append(Removed(3.0, "a"))
# It lived when it was looked at, and has ended since.
runner.look_at_attempt = lambda *attempt: Claim(boot_id="", holder=0, holder_start=0)
assert runner.Runner(store, ("cpu-0",), print)._follow(store.read().lines["a"]) is None
"""


def test_what_ends_just_before_it_is_to_be_stopped_does_not_take_the_runner_along(
    tmp_path: Path,
) -> None:
    # In a group of its own, all of which a signal to nobody would end.
    command = [sys.executable, "-P", "-c", _REMOVED, str(tmp_path)]
    done = subprocess.run(command, start_new_session=True, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.fixture
def switched() -> Iterator[None]:
    yield
    switch({})


@pytest.mark.usefixtures("switched")
def test_a_disk_that_is_full_for_a_moment_costs_a_queue_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the runner's records nor how an attempt has ended is lost: both try again."""
    monkeypatch.setenv(SWITCH, "file/write=error(ENOSPC),about=ending.json,nth=1")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    store = QueueStore(str(tmp_path), "q")
    with store.writing() as writer:
        writer.append(Put(1.0, Item(name="a", command=("true",), cwd=str(tmp_path))))
    switch({SWITCH: "queue/append=error(ENOSPC),nth=2"})
    said: list[str] = []
    line = Runner(store, ("cpu-0",), said.append).run().lines["a"]
    assert (line.state, line.attempts) == ("done", 1)
    assert any("No space left on device: tried again until it can be" in one for one in said)
    assert "ending.json" in (tmp_path / "fired").read_text()
