"""An exception of megabytes fits a screen, which says what it leaves out; --json has it."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.journals import Story, render_journal

from perdure.cli.app import run_command
from perdure.model.codec import encode
from perdure.model.events import Decision, JobEnded, RankExited

ERROR = "ValueError: " + "x" * 4000 + " is too much"
TRACEBACK = "\n".join(
    [
        "Traceback (most recent call last):",
        *(f"  frame {n}: {'y' * 3000}" for n in range(20)),
        ERROR,
    ]
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that an exception of megabytes ended, as its exit record keeps it."""
    story = Story(now=1_700_000_000.0)
    story.start()
    story.train(3)
    story.exit(0, story.now, code=1, error=ERROR)
    (at,) = (n for n, e in enumerate(story.entries) if isinstance(e.body, RankExited))
    failed = story.entries[at].body
    assert isinstance(failed, RankExited)
    record = msgspec.structs.replace(
        failed.record, traceback=TRACEBACK, last_output=tuple(TRACEBACK.splitlines()[-20:])
    )
    story.entries[at] = msgspec.structs.replace(
        story.entries[at], body=msgspec.structs.replace(failed, record=record)
    )
    reason = f"rank 0: {record.cause}; 3 restarts in a row without progress"
    story.write(Decision(action="EndJob", summary="give up", reason=reason))
    story.write(JobEnded(status="failed", exit_code=1, reason=reason, at_s=story.now))
    folder = tmp_path / "jobs" / "job"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text(
        '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
    )
    (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))


@pytest.mark.parametrize("screen", [["diagnose"], ["status"], ["report"], ["events"], ["watch"]])
def test_a_long_exception_fits_a_screen(
    screen: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([screen[0], "job", *screen[1:]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 700
    assert len(lines) < 60
    text = "\n".join(lines)
    assert "ValueError: xxx" in text
    assert "more characters; --json has all" in text


def test_diagnose_shows_both_ends_of_an_exception_and_json_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_command(["diagnose", "job"])
    text = capsys.readouterr().out
    assert text.count("xxx is too much") >= 3  # The reason, the traceback, the last output.
    assert "without progress" not in text
    shown = text[text.index("traceback:") : text.index("last_output:")].splitlines()[:-1]
    assert len(shown) == 1 + 2 + 1 + 8
    assert shown[3].strip().startswith("... 12 more lines, 36,")
    run_command(["diagnose", "job", "--json"])
    evidence = json.loads(capsys.readouterr().out)["verdicts"][0]["evidence"]
    assert (evidence["error"], evidence["traceback"]) == (ERROR, TRACEBACK)
    assert len(evidence["last_output"]) == 20
