"""A job whose files are damaged: what can be known of it is said, and of all others too."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.journals import Story, render_journal

from perdure.cli.app import run_command
from perdure.cli.page.app import Site
from perdure.cli.page.door import Access
from perdure.model.codec import encode

NONSENSE = ("", "{", "null", "[]", '{"script": 3}', "\x00" * 100, "[" * 100_000)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two jobs that have ended."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    for name in ("broken", "whole"):
        story = Story(now=1_700_000_000.0)
        story.start()
        story.train(3)
        story.finish()
        folder = tmp_path / "jobs" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_bytes(encode(story.spec))
        (folder / "endpoint.json").write_text("{}")
        (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    return tmp_path / "jobs" / "broken"


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[Any, str]:
    assert run_command([*args, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_one_damaged_job_hides_no_other(
    jobs: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """`ps` said: unknown job `broken`; there is broken."""
    (jobs / "job.json").write_text(text)
    rows, err = ask(capsys, "status")
    assert [row["job"] for row in rows["jobs"]] == ["broken", "whole"]
    assert "broken/job.json is damaged: " in err
    report, _ = ask(capsys, "report", "broken")
    assert report["job"] == "job"
    (jobs / "journal.jsonl").write_text("")
    rows, err = ask(capsys, "status")
    assert [row["job"] for row in rows["jobs"]] == ["whole"]
    assert "perdure: broken: " in err
    assert run_command(["status", "broken"]) == 3
    assert "job.json is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["job.json", "state.json", "journal.jsonl"])
def test_a_file_that_cannot_be_read_hides_no_other_job(
    jobs: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It is another user's, or the disk does not give it: here, a folder has its name."""
    (jobs / name).unlink(missing_ok=True)
    (jobs / name).mkdir()
    rows, err = ask(capsys, "status")
    missing = {"broken"} if name == "journal.jsonl" else set()  # It tells what a job was.
    assert {"whole", "broken"} - {row["job"] for row in rows["jobs"]} == missing
    assert ("perdure: broken: " in err) == bool(missing)
    site = Site(str(jobs.parent.parent), Access(frozenset(), 1, "x"))
    assert "whole" in site._render_jobs()["jobs"]


def test_a_journal_whose_beginning_is_lost_is_reported(
    jobs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An AssertionError before: `JobSubmitted` was missed."""
    lines = (jobs / "journal.jsonl").read_bytes().splitlines(True)
    (jobs / "journal.jsonl").write_bytes(b"".join(lines[1:]))
    report, _ = ask(capsys, "report", "broken")
    assert report["wall_s"] > 0.0
    (jobs / "journal.jsonl").write_bytes(b"")
    report, _ = ask(capsys, "report", "broken")
    assert report["wall_s"] == 0.0


@pytest.mark.parametrize("text", ["{", ""])
def test_one_damaged_record_of_a_launch_hides_no_job(
    jobs: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """`perdure status` ended with exit code 3 and listed none."""
    record = jobs.parent.parent / "launches" / "away.json"
    record.parent.mkdir()
    record.write_text(text)
    rows, err = ask(capsys, "status")
    assert [row["job"] for row in rows["jobs"]] == ["broken", "whole"]
    assert f"cannot read {record}" in err
    record.unlink()
    os.mkfifo(record)
    _, err = ask(capsys, "status")
    assert "a FIFO" in err
