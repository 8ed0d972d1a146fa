"""D4: no text of a host, a rank or a checkpoint acts on the terminal on which it is shown."""

import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.journals import Story, reseal, tell
from tests.waiting import PATIENCE_S

from perdure.cli.app import run_command
from perdure.dash.live import LiveScreen
from perdure.dash.terminal import plain_streams
from perdure.dash.watch import render_watch
from perdure.model.codec import encode
from perdure.model.events import CheckpointFailed, MachineReported, StacksTaken
from perdure.model.input.plain import show_controls, show_output
from perdure.telemetry.alerts import AlertFold

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
HOSTILE = (
    CLIPBOARD, "\x1b[2J\x1b[H", "\x1bP$q\x1b\\", "\x1b[6n", "\x9b2J", "\u202etxt.exe", "\u2066x",
    "a\rb", "\x08\x08", "\x7f", "\udcff", "[link=http://evil]x[/link]", "\x1b[8mhidden",
)  # fmt: skip
FREE = (
    "reason",
    "error",
    "summary",
    "cause",
    "message",
    "text",
    "source",
    "machine",
    "host",
    "path",
)
"""Fields of journaled events whose text somebody else may have written."""
_DIRECTIONS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"


def acts(text: str) -> list[str]:
    """Return the characters of `text` that would do something, by Unicode's own categories."""
    return [c for c in text if c != "\n"
            and (unicodedata.category(c) in ("Cc", "Cs") or c in _DIRECTIONS)]  # fmt: skip


@given(st.text(st.characters(codec=None, categories=None), max_size=50))
def test_d4_no_string_whatsoever_acts(text: str) -> None:
    assert not acts(show_controls(text))
    shown = show_output(text)
    assert not acts(re.sub(r"\x1b\[[0-9;:]*m", "", shown))
    assert "\n" not in shown
    if "\x1b[" in shown:
        assert shown.endswith("\x1b[0m")
    document = json.dumps({"text": text}, ensure_ascii=False)
    assert json.loads(show_controls(document)) == {"text": text}  # --json stays exact.


def spoil(value: Any, extra: str) -> Any:
    """Return a document with `extra` in each field that is free text."""
    if isinstance(value, dict):
        return {key: one + extra if key in FREE and isinstance(one, str) else spoil(one, extra)
                for key, one in value.items()}  # fmt: skip
    return [spoil(one, extra) for one in value] if isinstance(value, list) else value


def write_job(home: Path, extra: str) -> None:
    """Write a job whose every free text ends with `extra`, its ranks' output included."""
    story = tell(Story(now=1_700_000_000.0))
    story.write(
        MachineReported(node=1, reason="x", source="kubernetes", machine="m", at_s=story.now)
    )
    story.write(CheckpointFailed(generation=2, step=100, error="no space left", at_s=story.now))
    clean = extra.encode("utf-8", "replace").decode()  # A journal is UTF-8.
    story.write(StacksTaken(generation=2, at_s=story.now, stacks={0: f'Thread 1: "{clean}"'}))
    folder = home / "jobs" / "job"
    (folder / "logs" / "ranks" / "g2").mkdir(parents=True, exist_ok=True)
    output = folder / "logs" / "ranks" / "g2" / "rank-1.out"
    output.write_bytes(f"hello {extra}\n".encode("utf-8", "surrogateescape"))
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text(
        '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
    )
    rows = [spoil(json.loads(encode(entry)), clean) for entry in story.entries]
    lines = [json.dumps(row, separators=(",", ":")).encode() for row in rows]
    (folder / "journal.jsonl").write_bytes(b"".join(reseal(lines)))


SCREENS = (
    ["status"], ["status", "job"], ["events", "job"], ["diagnose", "job"], ["report", "job"],
    ["status", "job", "--devices"], ["watch", "job", "--once"], ["metrics", "job"],
    ["status", "nobody"],
    ["report", "job", "--html", "page.html"],
)  # fmt: skip


def check_screens(home: Path, capsys: pytest.CaptureFixture[str], extra: str) -> None:
    write_job(home, extra)
    capsys.readouterr()
    for screen in SCREENS:
        run_command(screen)
        said = capsys.readouterr()
        assert not acts(said.out + said.err), screen
    assert not acts((Path.cwd() / "page.html").read_text(encoding="utf-8"))
    run_command(["logs", "job"])
    assert not acts(re.sub(r"\x1b\[[0-9;:]*m", "", capsys.readouterr().out))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_d4_every_screen_is_plain_whatever_a_job_says(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_screens(home, capsys, "".join(HOSTILE))
    run_command(["events", "job"])
    assert "\\x1b]52;c;" in capsys.readouterr().out  # It is shown and not hidden.


@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate],
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(extra=st.text(st.characters(codec=None, categories=None), min_size=1, max_size=30))
def test_d4_every_screen_is_plain_for_any_text(
    home: Path, capsys: pytest.CaptureFixture[str], extra: str
) -> None:
    check_screens(home, capsys, extra)


def test_d4_json_is_exact(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = CLIPBOARD + "\u202e\x9b\x7f"
    write_job(home, extra)
    run_command(["events", "job", "--json"])
    out = capsys.readouterr().out
    assert not acts(out)
    rows = [json.loads(line) for line in out.splitlines()]
    assert any(row.get("reason") == "x" + extra for row in rows)
    run_command(["logs", "job", "--json"])
    assert json.loads(capsys.readouterr().out)["text"] == "hello " + extra


def test_d4_logs_keep_colours_and_drop_what_acts(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(home, "\x1b[31mred")
    run_command(["logs", "job"])
    assert capsys.readouterr().out == "[rank 1] hello \x1b[31mred\x1b[0m\n"


def test_d4_errors_of_a_typed_name_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["status", CLIPBOARD]) == 2
    assert not acts(capsys.readouterr().err)


@pytest.mark.parametrize("tty", [False, True])
def test_d4_the_lines_below_perdure_run_are_plain(tty: bool, home: Path) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return tty

    screen = Screen()
    with LiveScreen(screen) as live:
        live.show_line("[rank 0] " + CLIPBOARD + "\u202e")
    text = screen.getvalue()
    assert "\x1b]" not in text
    assert "\u202e" not in text


def test_d4_a_watched_screen_is_plain() -> None:
    from tests.unit.dash.test_screens import fold

    story = tell(Story())
    _, snapshot, _ = fold(story)
    import msgspec

    spoilt = msgspec.structs.replace(snapshot, reason="".join(HOSTILE), job="j" + CLIPBOARD)
    for line in render_watch(spoilt, 100):
        assert not acts(line)


def test_d4_an_alert_is_plain() -> None:
    story = tell(Story())
    fold = AlertFold("job", frozenset({"verdict", "failure", "checkpoint", "ended"}))
    rows = [json.dumps(spoil(json.loads(encode(entry)), CLIPBOARD)) for entry in story.entries]
    from perdure.model.codec import decode
    from perdure.model.events import JournalEntry

    found = [alert for row in rows if (alert := fold.add(decode(row.encode(), JournalEntry)))]
    assert found
    assert not any(acts(alert.summary) for alert in found)


def test_d4_streams_are_themselves_again_afterwards() -> None:
    import sys

    before = sys.stdout
    with plain_streams(), plain_streams():
        print("x", end="")
    assert sys.stdout is before


@pytest.mark.parametrize("words", ["logs job", "events job"])
def test_a_reader_that_has_seen_enough_is_no_error(words: str, home: Path) -> None:
    write_job(home, "more")
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *words.split()], stdout=writes,
            stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (0, "")
