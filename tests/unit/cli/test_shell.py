"""What makes a shell pleasant: completion, the newest job, and jobs that leave."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.journals import Story, render_journal, tell
from tests.waiting import PATIENCE_S

from perdure.cli.app import run_command
from perdure.launch.catalog import load_profile
from perdure.launch.records import read_record, write_record
from perdure.model.codec import encode
from perdure.model.platforms.launching import LaunchRecord
from perdure.service.jobfiles import JobLock
from perdure.service.jobfolders import paths_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    for number, name in enumerate(("first", "second")):
        story = tell(Story(now=time.time() - 600))
        folder = tmp_path / "home" / "jobs" / name
        (folder / "checkpoints" / "step-00000012").mkdir(parents=True)
        (folder / "job.json").write_bytes(encode(story.spec))
        (folder / "endpoint.json").write_text(
            '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
        )
        (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
        os.utime(folder / "job.json", (number + 1.0, number + 1.0))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["st"], {"status", "stop"}),
        (["status", ""], {"first", "second"}),
        (["trace", "s"], {"show", "simulate"}),
        (["events", "--dec"], {"--decisions"}),
    ],
)
def test_bash_completes(home: Path, tmp_path: Path, words: list[str], found: set[str]) -> None:
    link = tmp_path / "perdure"
    link.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perdure "$@"\n')
    link.chmod(0o755)
    script = (
        'eval "$(perdure completion bash)"; COMP_WORDS=("perdure" "$@"); COMP_CWORD=$#; '
        '_perdure_completion perdure; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert set(done.stdout.split()) == found, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shells_lines_can_be_read_by_it(
    capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    assert run_command(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_PERDURE_COMPLETE" in text
    if shutil.which(shell):
        assert (
            subprocess.run([shell, "-n"], input=text.encode(), timeout=PATIENCE_S).returncode == 0
        )


def test_the_newest_job_is_meant_where_none_is_named(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["report", "--json"]) == 0
    newest = capsys.readouterr().out
    assert run_command(["report", "second", "--json"]) == 0
    assert capsys.readouterr().out == newest
    assert run_command(["stop"]) == 2, "what changes something is named"


def test_without_jobs_there_is_no_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    assert run_command(["report"]) == 2
    assert "there are no jobs under" in capsys.readouterr().err


def test_ps_hides_what_ended_long_ago(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tell(Story(now=time.time() - 30 * 86400))
    folder = home / "jobs" / "first"
    (folder / "journal.jsonl").write_bytes(render_journal(old.entries))
    assert run_command(["status"]) == 0
    out = capsys.readouterr().out
    assert "second" in out
    assert "min ago" in out
    assert "1 that ended long ago: perdure status --all" in out
    assert run_command(["status", "--all"]) == 0
    assert "first" in capsys.readouterr().out
    assert run_command(["status", "--running"]) == 0
    assert "no job runs" in capsys.readouterr().out


def test_compare(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["report", "first", "second"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["first", "second"]
    assert run_command(["report", "first", "second", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows["goodput"][0] == pytest.approx(rows["goodput"][1], rel=0.01)


def test_rm_asks_then_takes_all_of_a_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rm", "first"]) == 4
    assert "nothing was removed" in capsys.readouterr().err
    assert (home / "jobs" / "first").exists()
    assert run_command(["rm", "first", "--yes", "--json"]) == 0
    removed = json.loads(capsys.readouterr().out)["removed"]
    assert [row["checkpoints"] for row in removed] == [[12]]
    assert os.listdir(home / "jobs") == ["second"]


def test_rm_refuses_what_runs_and_what_is_elsewhere(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = JobLock(paths_of(str(home), "first"))
    assert run_command(["rm", "second", "first", "-y"]) == 4
    lock.release()
    profile = load_profile("generic-ssh", str(home)).profile
    write_record(
        str(home),
        LaunchRecord(job="first", profile=profile, place="/b", home="/far", python="python3"),
    )
    assert run_command(["rm", "first", "-y"]) == 4
    assert "was launched to another machine" in capsys.readouterr().err
    assert sorted(os.listdir(home / "jobs")) == ["first", "second"], "one refusal removes nothing"
    assert read_record(str(home), "first") is not None


def test_a_half_removed_job_is_no_job_and_goes_with_the_next(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "jobs" / "first").rename(home / "jobs" / ".removed-first-1")
    assert run_command(["status", "--json"]) == 0
    assert [row["job"] for row in json.loads(capsys.readouterr().out)["jobs"]] == ["second"]
    assert run_command(["rm", "second", "-y"]) == 0
    assert os.listdir(home / "jobs") == []
