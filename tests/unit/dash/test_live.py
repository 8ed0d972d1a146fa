"""Progress on a terminal and without one."""

import io

import msgspec
import pytest

from perdure.dash.live import (
    LiveScreen,
    describe_long_step,
    describe_open_step,
    render_status,
)
from perdure.model.report import Snapshot
from perdure.model.verdicts import Culprit, Verdict

SNAPSHOT = Snapshot(
    version=1,
    job="demo",
    state="running",
    at_s=100.0,
    started_s=90.0,
    generation=0,
    restarts=0,
    step=12,
    steps_per_s=4.0,
    world_size=2,
    depth="resumable",
    reason="",
    metrics={"loss": 2.34567},
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_status_names_the_last_verdict() -> None:
    verdict = Verdict(
        kind="Crash",
        culprit=Culprit(rank=1),
        generation=0,
        first_seen_s=1,
        confirmed_s=2,
        confidence=1,
        reason="",
    )
    text = render_status(msgspec.structs.replace(SNAPSHOT, verdicts=(verdict,), restarts=2))
    assert text == (
        "demo running  step 12  4.0 steps/s  loss 2.346  2 ranks  2 restarts  "
        "last verdict: Crash of rank 1"
    )


def test_without_a_terminal_only_changes_are_written() -> None:
    output = io.StringIO()
    with LiveScreen(output) as screen:
        for at_s, state in ((100, "running"), (101, "running"), (102, "done"), (140, "done")):
            screen.show_snapshot(msgspec.structs.replace(SNAPSHOT, at_s=at_s, state=state))
        screen.show_line("[rank 0] hello")
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "[perdure] demo running",
        "[perdure] demo done",
        "[perdure] demo done",
        "[rank 0] hello",
    ]


def test_on_a_terminal_lines_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    output = Terminal()
    with LiveScreen(output) as screen:
        screen.show_snapshot(SNAPSHOT)
        screen.show_line("[rank 0] [bold]no markup[/bold] :smile: " + "x" * 80)
    text = output.getvalue()
    assert "[rank 0] [bold]no markup[/bold] :smile: " + "x" * 80 in text
    assert "demo running" in text


def test_a_trainers_loss_comes_before_what_else_it_logs() -> None:
    metrics = {
        "epoch": 0.8,
        "grad_norm": 0.8,
        "learning_rate": 1e-4,
        "train_loss": 4.4,
        "loss": 4.2,
    }
    line = render_status(msgspec.structs.replace(SNAPSHOT, metrics=metrics))
    assert "loss 4.2  train_loss 4.4  2 ranks" in line


def test_a_step_that_is_longer_than_a_notice_is_told() -> None:
    long = msgspec.structs.replace(SNAPSHOT, steps_per_s=0.01, step_open_s=40.0)
    told = "step 13 has been in progress for 40 s; a step takes about 100 s"
    assert describe_open_step(long) == told
    assert describe_long_step(long, 30.0).startswith(f"{told}: longer than a notice of 30 s;")
    first = msgspec.structs.replace(SNAPSHOT, step=0, steps_per_s=0.0, step_open_s=40.0)
    assert describe_open_step(first) == "step 1 has been in progress for 40 s"
    assert describe_long_step(first, 120.0) == ""
    assert describe_open_step(msgspec.structs.replace(SNAPSHOT, step_open_s=0.2)) == ""
