"""`perdure events` shows what a person wants of a journal, and says what it leaves out."""

from datetime import datetime
from pathlib import Path

import pytest
from tests.journals import Story, render_journal, tell

from perdure.cli.app import run_command
from perdure.cli.looking.chosen import BULK, KINDS, read_kinds, read_moment
from perdure.model.codec import encode
from perdure.model.errors import ConfigError


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    story = tell(Story(now=1_700_000_000.0))
    folder = tmp_path / "jobs" / "job"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text(
        '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
    )
    (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    return folder


def show(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert run_command(["events", "job", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_is_said_again_and_again_is_left_out_and_counted(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["events", "job"]) == 0
    out, err = capsys.readouterr()
    assert not any(kind in out for kind in BULK)
    whole = show(capsys, "--all")
    left_out = len(whole) - len(out.splitlines())
    assert left_out > 0
    assert "left out: " in err
    assert sum(int(word) for word in err.split() if word.isdigit()) == left_out
    assert len(show(capsys, "--json")) == len(whole), "a document is whole"


def test_kinds_decisions_and_the_end(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert all("RankExited" in line for line in show(capsys, "--kind", "rankexited"))
    assert all(" -> " in line for line in show(capsys, "--decisions"))
    assert show(capsys, "--tail", "3") == show(capsys)[-3:]
    assert show(capsys, "--since", "1h") == []
    assert show(capsys, "--since", "2001-01-01") == show(capsys)


def test_moments() -> None:
    now_s = datetime(2026, 11, 27, 12, 30).timestamp()
    assert read_moment("10m", now_s) == now_s - 600
    assert read_moment("12:15", now_s) == now_s - 900
    assert read_moment("9:30:00", now_s) == now_s - 3 * 3600
    assert read_moment("2026-11-27 12:29:00", now_s) == now_s - 60


@pytest.mark.parametrize("text", ["", "soon", "-3m", "99:99", "1e400s", "2026-13-01", "\x1b"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time"):
        read_moment(text)


def test_what_is_no_kind() -> None:
    assert set(KINDS) >= BULK
    with pytest.raises(ConfigError, match="no kind of entry") as caught:
        read_kinds(["verdict"])
    assert "VerdictReached" in caught.value.hint
