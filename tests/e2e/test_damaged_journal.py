"""The journal of a job that runs is damaged while its server and its controller are dead."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Job

pytestmark = [pytest.mark.slow, pytest.mark.long]
REMARKS = 6


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def find_remarks(job: Job) -> list[str]:
    return [note["text"] for note in job.report()["notes"]]


@pytest.fixture
def job(start: Callable[..., Job], tmp_path: Path) -> Job:
    """A job with remarks of an operator in its journal."""
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(86_400)\n")
    job = start("job", "-n", "1", "--cold", "sleep.py")
    job.wait_state("running")
    for number in range(REMARKS):
        job.cli("note", "job", f"remark {number}")
    return job


def test_what_the_stream_loses_is_in_the_journal_again_before_anything_is_decided(job: Job) -> None:
    supervisor = psutil.Process(job.process.pid)
    supervisor.suspend()
    try:
        for part in ("perdure controller", "nats-server"):
            os.kill(job.pid_of(part), signal.SIGKILL)
        [block] = job.folder.rglob("*.blk")
        flip(block, block.stat().st_size // 2)
    finally:
        supervisor.resume()
    job.wait_until(lambda: job.state().get("mended"), "a mended journal")
    [mended] = job.state()["mended"]
    assert mended["restored"] > 0
    assert mended["lost"] == 0
    assert find_remarks(job) == [f"remark {number}" for number in range(REMARKS)]
    said = f"{mended['restored']} entries that the stream had lost came back from journal.jsonl"
    assert said in job.cli("status", "job").stdout
    assert f"the journal was damaged: {said}" in job.text()
    job.cli("note", "job", "after")  # It is written on, and found by the next one.
    job.kill("perdure controller")
    job.wait_until(lambda: find_remarks(job)[-1] == "after", "the next controller")
    assert len(job.state()["mended"]) == 1


def test_a_damaged_mirror_blinds_no_command(job: Job) -> None:
    mirror = job.folder / "journal.jsonl"
    flip(mirror, mirror.read_bytes().rindex(b"remark 2"))  # In the record of the remark itself.
    told = job.cli("report", "job")
    assert "1 entry is not there or not as written" in told.stderr
    assert find_remarks(job) == [f"remark {number}" for number in range(REMARKS) if number != 2]
    for command in ("status", "events", "diagnose"):
        assert job.cli(command, "job").stdout
    job.kill("perdure controller")  # The next one takes the remark from the stream.
    job.wait_until(lambda: job.state().get("mended"), "a mended journal")
    assert len(find_remarks(job)) == REMARKS
    assert (job.folder / "journal.jsonl.damaged-1").exists()
