"""What only looks at a job elsewhere: how often a box is asked, and how long it may be silent."""

import os
import select
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from perdure.launch import exchange
from perdure.launch.catalog import load_profile, overlay
from perdure.launch.channel import Channel
from perdure.launch.exchange import UnfinishedError, UnreachedError
from perdure.launch.platforms import Here
from perdure.launch.ssh import ask
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.platforms.profile import LaunchSection

LOOKS = [["logs", "gpt"], ["events", "gpt", "--json"]]
HERE = Here("", {}, print)
BEGUN = "echo '@@perdure begin@@'"


def make_box(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> LaunchRecord:
    """Return the record of a job on a box that does as `script` says whenever it is asked."""
    ssh = folder / "ssh"
    close = 'case "$*" in *"-O exit"*) exit 0;; esac'
    ssh.write_text(f"#!/bin/sh\n{close}\necho >> {folder}/asked\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    profile = overlay(
        load_profile("generic-ssh", "/nonexistent"), {"launch.host": "box"}, "test"
    ).profile
    return LaunchRecord(
        job="gpt", profile=profile, place="/b/gpt", home="/b/state", python="python3"
    )


def count_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return where the pauses between two connections are noted, which last no time."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", lambda s: pauses.append(s) if s >= 0.5 else None)
    return pauses


@pytest.mark.parametrize("argv", LOOKS, ids=lambda argv: argv[0])
def test_a_box_that_is_not_reached_is_asked_four_times_and_this_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
) -> None:
    pauses = count_pauses(monkeypatch)
    record = make_box(tmp_path, monkeypatch, "exit 255")
    with pytest.raises(UnreachedError, match="box does not answer any more") as caught:
        ask.run(record, argv, HERE)
    assert "perdure status gpt" in caught.value.hint
    assert (pauses, len((tmp_path / "asked").read_text())) == ([1.0, 2.0, 4.0], 4)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"box: no connection; it is asked again in {s} s" for s in (1, 2, 4)]


def test_a_stream_that_is_followed_is_taken_up_for_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = count_pauses(monkeypatch)
    record = make_box(tmp_path, monkeypatch, "exit 255")
    with pytest.raises(UnreachedError):
        ask.run(record, ["logs", "gpt", "-f"], HERE)
    assert sum(pauses) > 60


@pytest.mark.parametrize("argv", LOOKS, ids=lambda argv: argv[0])
@pytest.mark.parametrize("script", ["", f"{BEGUN};", f"{BEGUN}; exec >&-;"])
def test_a_box_that_hangs_is_waited_for_no_longer_than_it_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], script: str
) -> None:
    monkeypatch.setattr(ask, "SILENCE_S", 0.3)
    record = make_box(tmp_path, monkeypatch, f"{script} exec sleep 3600")
    with pytest.raises(UnfinishedError, match="box says nothing, and does not end") as caught:
        ask.run(record, argv, HERE)
    assert "says nothing about a job" in caught.value.hint
    asked = tmp_path / "asked"
    assert not asked.exists() or len(asked.read_text()) <= 1, "it may be ended before it begins"


def test_a_reader_that_is_slow_makes_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for a byte may take as long as the first one, whatever the reader took before."""
    seen: list[str] = []
    waits_s: list[float] = []

    def wait(read: Any, write: Any, except_: Any, timeout_s: float) -> Any:
        waits_s.append(timeout_s)
        return select.select(read, write, except_, timeout_s)

    monkeypatch.setattr(exchange, "select", SimpleNamespace(select=wait))
    script = "echo one; echo two; sleep 0.1; printf three"
    assert Channel(LaunchSection()).stream(script, seen.append, silence_s=3600.0) == 0
    assert seen == ["one\n", "two\n", "three"]
    assert len(waits_s) > 1
    assert set(waits_s) == {3600.0}


def make_boxes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]
) -> LaunchRecord:
    """Return the record of a job on several boxes, each of which does as its script says."""
    cases = " ".join(f'*"{name}"*) {script};;' for name, script in scripts.items())
    record = make_box(folder, monkeypatch, f'case "$*" in {cases} esac')
    replace = msgspec.structs.replace
    first, *others = (
        replace(
            record,
            profile=replace(record.profile, launch=replace(record.profile.launch, host=name)),
        )
        for name in scripts
    )
    return replace(first, others=tuple(others))


def say_line(rank: int) -> str:
    return f"""echo '{{"generation":0,"rank":{rank},"stream":"out","text":"hello"}}'"""


END = "echo '@@perdure rc=0 boot=x@@' >&2"


def test_boxes_are_asked_at_once_and_their_lines_come_one_box_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first box ends only once the last one was asked."""
    met = tmp_path / "met"
    meets = f"while [ ! -e {met} ]; do sleep 0.05; done"
    record = make_boxes(
        tmp_path,
        monkeypatch,
        {
            "one": f"{BEGUN}; {meets}; {say_line(0)}; {END}",
            "two": f"{BEGUN}; {say_line(1)}; {END}",
            "six": f"{BEGUN}; {say_line(2)}; : > {met}; {say_line(2)}; {END}",
        },
    )
    assert ask.run(record, ["logs", "gpt"], HERE) == 0
    said = capfd.readouterr().out.splitlines()
    assert said == [f"[rank {rank}] hello" for rank in (0, 1, 2, 2)]


def test_a_box_that_hangs_keeps_no_other_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = Channel.stream

    def stream_shortly(box: Channel, *words: Any, silence_s: float | None) -> int | None:
        return stream(box, *words, silence_s=PATIENCE_S if box.host == "two" else 0.5)

    monkeypatch.setattr(Channel, "stream", stream_shortly)
    hangs = f"{BEGUN}; : > {tmp_path}/$$.hangs; exec sleep 3600"
    record = make_boxes(
        tmp_path, monkeypatch,
        {"one": hangs, "two": f"{BEGUN}; {say_line(1)}; {END}", "six": hangs},
    )  # fmt: skip
    assert ask.run(record, ["logs", "gpt"], HERE) == 0
    said = capfd.readouterr()
    assert said.out == "[rank 1] hello\n"
    assert [f"{box} says nothing, and does not end" in said.err for box in ("one", "six")] == [
        True, True,
    ]  # fmt: skip
