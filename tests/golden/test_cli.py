"""What the commands print about a job that is told by hand, to the letter.

`UPDATE_GOLDEN=1 pytest tests/golden` writes the files anew; look at the difference before you
commit it: their JSON is a contract (DESIGN, "Command line").
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.app import run_command
from perdure.model.codec import encode
from perdure.model.report import ACCOUNTS
from tests.journals import Story, render_journal, tell

FOLDER = Path(__file__).resolve().parent
PROFILE = str(FOLDER.parent.parent / "examples" / "cost_profile.json")
PHASES = ("detect_s", "decide_s", "abort_s", "communicator_s", "state_s", "warmup_s", "total_s")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("golden")
    story = tell(Story(now=1_700_000_000.0))
    folder = home / "jobs" / "job"
    (folder / "logs" / "ranks" / "g2").mkdir(parents=True)
    (folder / "logs" / "ranks" / "g2" / "rank-1.out").write_text("hello\nworld\n")
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text('{"url":"nats://x:1","token":"","clock_offset_s":0}')
    (folder / "journal.jsonl").write_bytes(render_journal(story.entries))
    story.lay_curves(folder)
    return home


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "UTC")
        time.tzset()  # `localtime` does not look at the environment again by itself.
        yield
    time.tzset()


@pytest.fixture
def perdure(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, utc: None
) -> Any:
    monkeypatch.setenv("PERDURE_HOME", str(home))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")

    def call(*args: str) -> str:
        assert run_command(args) == 0
        return capsys.readouterr().out

    return call


CASES = {
    "help": ["--help"],
    "jobs": ["status", "--all"],
    "status": ["status", "job"],
    "devices": ["status", "job", "--devices"],
    "diagnose": ["diagnose", "job"],
    "report": ["report", "job"],
    "logs": ["logs", "job"],
    "run-help": ["run", "--help"],
    "plan": "plan PROFILE --devices 7 --global-batch 32 --memory 3GB --timeline".replace(
        "PROFILE", PROFILE
    ).split(),
    "plan-help": ["plan", "--help"],
    "trace-help": ["trace", "--help"],
    "trace-generate-help": ["trace", "generate", "--help"],
    "trace-simulate-help": ["trace", "simulate", "--help"],
    "trace-replay-help": ["trace", "replay", "--help"],
    "trace-drive-help": ["trace", "drive", "--help"],
}


@pytest.mark.parametrize("name", CASES)
def test_text(perdure: Any, name: str) -> None:
    text = "\n".join(line.rstrip() for line in perdure(*CASES[name]).splitlines()) + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_report_json(perdure: Any) -> None:
    report = json.loads(perdure("report", "job", "--json"))
    assert {
        "job", "state", "wall_s", "slot_s", "steps_committed", "ranks", "ledger", "goodput",
        "recoveries",
    } <= report.keys()  # fmt: skip
    assert tuple(report["ledger"]) == ACCOUNTS
    assert sum(account["fraction"] for account in report["ledger"].values()) == pytest.approx(1)
    assert report["goodput"] == report["ledger"]["useful"]["fraction"]
    crash = report["recoveries"][0]
    assert crash["culprit"] == "rank 1"
    assert {"cause", "at_step", "lost_steps", "lost_microbatches", "rung", *PHASES} <= crash.keys()
    assert sum(crash[p] for p in PHASES[:-1]) == pytest.approx(crash["total_s"])


def test_diagnose_json(perdure: Any) -> None:
    verdicts = json.loads(perdure("diagnose", "job", "--json"))["verdicts"]
    assert [(v["kind"], v["culprit"]) for v in verdicts] == [
        ("Crash", {"rank": 1}),
        ("ComputeHang", {"rank": 0}),
    ]
    for verdict in verdicts:
        assert {"first_seen_s", "confirmed_s", "confidence", "reason", "evidence"} <= verdict.keys()


def test_status_json_of_devices_of_all_jobs_and_of_one(perdure: Any) -> None:
    (device, _) = json.loads(perdure("status", "job", "--devices", "--json"))["devices"]
    assert {"device", "node", "ranks", "replicas", "state", "slots", "health"} <= device.keys()
    (job,) = json.loads(perdure("status", "--json"))["jobs"]
    assert (job["job"], job["state"], job["alive"], job["restarts"]) == ("job", "done", False, 2)
    status = json.loads(perdure("status", "job", "--json"))
    assert (status["state"], status["generation"], status["world_size"]) == ("done", 2, 2)


def test_events_json_are_lines(perdure: Any) -> None:
    rows = [json.loads(line) for line in perdure("events", "job", "--json").splitlines()]
    assert all(list(row)[:3] == ["seq", "t", "kind"] for row in rows)
    assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
    assert (rows[0]["kind"], rows[-1]["kind"]) == ("JobSubmitted", "JobEnded")


def test_logs_json(perdure: Any) -> None:
    (first, _) = perdure("logs", "job", "--rank", "1", "--json").splitlines()
    assert json.loads(first) == {"generation": 2, "rank": 1, "stream": "out", "text": "hello"}


def test_html_is_one_file_without_references(perdure: Any, tmp_path: Path) -> None:
    perdure("report", "job", "--html", str(tmp_path / "r.html"))
    page = (tmp_path / "r.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "src=" not in page


def test_a_job_that_nobody_ended_is_lost(
    home: Path, perdure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "jobs" / "cut"
    folder.mkdir(parents=True)
    whole = home / "jobs" / "job"
    for name in ("job.json", "endpoint.json"):
        (folder / name).write_bytes((whole / name).read_bytes())
    lines = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:20])
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    assert json.loads(perdure("status", "--json"))["jobs"][0]["state"] == "lost"
    report = json.loads(perdure("report", "cut", "--json"))
    assert report["slot_s"] > 0
    assert (report["state"], "the same --name resumes it" in report["reason"]) == ("lost", True)
    status = json.loads(perdure("status", "cut", "--json"))
    last = {**status, "state": "running", "step": 77, "at_s": status["at_s"] + 1.0}
    last["ranks"] = [{**row, "step": 77 + row["rank"]} for row in status["ranks"]]
    (folder / "state.json").write_text(json.dumps(last))  # What a controller wrote last.
    known = json.loads(perdure("status", "cut", "--json"))
    assert (known["state"], known["step"]) == ("lost", 77)


def test_what_the_disk_refuses_is_one_line_and_no_traceback(
    home: Path, perdure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "jobs" / "odd"
    (folder / "journal.jsonl").mkdir(parents=True)
    for name in ("job.json", "endpoint.json"):
        (folder / name).write_bytes((home / "jobs" / "job" / name).read_bytes())
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    assert run_command(["events", "odd"]) == 3
    told = capsys.readouterr().err
    journal = f"{folder}/journal.jsonl"
    hint = f"hint: move it away: mv {journal} {journal}.unfit"
    assert told == f"perdure: error: {journal} is a directory\n{hint}\n"
