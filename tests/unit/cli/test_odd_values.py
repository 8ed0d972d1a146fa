"""What a person sees of values that are not finite, and of those that were dropped."""

import json
import math
import re
from pathlib import Path

import msgspec
import pytest
from tests.journals import Story, make_series, render_journal, tell

from perdure.cli.app import run_command
from perdure.dash.svg import render_curve, render_stack
from perdure.dash.text import render_chart, render_text
from perdure.model.codec import encode
from perdure.model.events import MetricsLogged
from perdure.service.curves import CurveFiles
from perdure.telemetry.accounting.ledger import LedgerFold


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose loss diverged, and which logged 1,500 values that are no numbers."""
    story = tell(Story(now=1_700_000_000.0))
    story.log(*({"loss": value} for value in (0.5, math.nan, math.inf, -math.inf)))
    folder = tmp_path / "jobs" / "job"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text(
        '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
    )
    (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    story.lay_curves(folder)
    dropped = MetricsLogged(generation=0, rows=(), dropped=1500)
    CurveFiles(str(folder / "curves"), "more").append(story.now, "g0-r1-p\x07", dropped)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))


def read(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert run_command(args) == 0
    return capsys.readouterr().out


def test_diagnose_counts_the_values_that_were_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """T1."""
    text = read(capsys, "diagnose", "job")
    assert "dropped: 1,500 of g0-r1-p\\x07: values of run.log: no numbers" in text
    (row,) = json.loads(read(capsys, "diagnose", "job", "--json"))["dropped_values"].values()
    assert row["count"] == 1500


def test_values_that_are_not_finite_are_shown_and_valid(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """T1: screens say nan and inf, and every `--json` is JSON."""

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    assert "-inf" in read(capsys, "status", "job")
    for command in ("status", "status --devices", "report", "diagnose", "metrics"):
        json.loads(read(capsys, *command.split(), "job", "--json"), parse_constant=refuse)
    for line in read(capsys, "events", "job", "--json").splitlines():
        json.loads(line, parse_constant=refuse)
    page = tmp_path / "page.html"
    read(capsys, "report", "job", "--html", str(page))
    svg = page.read_text(encoding="utf-8")
    assert "loss is nan from here on" in svg
    assert not re.search(r'(points|[xyr][12]?)="[^"]*(nan|inf)', svg)
    assert "x nan or inf, 3 of " in read(capsys, "report", "job")


def test_values_that_can_hardly_be_drawn() -> None:
    """T1: the difference of the largest numbers is not finite."""
    values = [-1.7e308, math.nan, 1.7e308, math.inf]
    assert [row[1] for row in render_chart(values, height=3)] == [" ", " ", "x"]
    svg = render_curve(list(enumerate(values)), x_label="step", y_label="loss")
    assert not re.search(r'="[^"]*(nan|inf)[^"]*"', svg.replace("loss by step", ""))
    assert render_chart([math.nan] * 2, height=1) == ["xx"]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 1e300, -5.0])
def test_a_ledger_of_lies_is_drawn_all_the_same(seconds: float) -> None:
    """T1: a rank that lies about its seconds makes a strange report, and not none."""
    story = tell(Story(now=1_700_000_000.0))
    fold = LedgerFold()
    for entry in story.entries:
        fold.add(entry)
    report = fold.report(story.now)
    ledger = {
        name: msgspec.structs.replace(account, s=seconds, fraction=seconds)
        for name, account in report.ledger.items()
    }
    report = msgspec.structs.replace(report, ledger=ledger)
    assert "Ledger" in render_text(report, make_series(story.entries, story.now), width=100)
    bar = render_stack((name, account.fraction) for name, account in ledger.items())
    assert not re.search(r'="[^"]*(nan|inf)[^"]*"', bar)
