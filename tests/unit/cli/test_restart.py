"""`perdure restart` saves first, unless nothing can be saved or a person says so."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.cli.app import run_command
from perdure.cli.steering import act


@pytest.mark.parametrize(
    ("step", "words", "asked"),
    [
        (7, (), ["checkpoint", "restart"]),
        (7, ("--rank", "1"), ["checkpoint", "restart"]),
        (7, ("--now",), ["restart"]),
        (-1, (), ["restart"]),
    ],
)
def test_a_restart_saves_first_where_steps_would_be_lost(
    monkeypatch: pytest.MonkeyPatch, step: int, words: tuple[str, ...], asked: list[str]
) -> None:
    sent: list[str] = []

    def send(job: object, kind: str, args: object, **named: object) -> dict[str, Any]:
        sent.append(kind)
        return {}

    found = SimpleNamespace(name="j", snapshot=lambda: SimpleNamespace(step=step))
    monkeypatch.setattr(act, "find_job", lambda name: found)
    monkeypatch.setattr(act, "send_command", send)
    monkeypatch.setattr(act, "_telling_of_hangs", nullcontext)
    assert run_command(["restart", "j", *words]) == 0
    assert sent == asked
