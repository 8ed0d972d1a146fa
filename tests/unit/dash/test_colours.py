"""Colours only where a person looks and wants them, and never by what a rank has printed."""

import io

import pytest

from perdure.dash import colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(monkeypatch: pytest.MonkeyPatch, text: str, stream: io.StringIO, **env: str) -> str:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream)
    colours.print_painted(text)
    return stream.getvalue()


def test_states_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = show(monkeypatch, "demo: running, step 3\nold   failed  -\nover, 3 s ago: x", Terminal())
    assert "\x1b[32mrunning\x1b[0m" in out
    assert "\x1b[31mfailed\x1b[0m" in out
    assert "\x1b[2mover, 3 s ago: x\x1b[0m" in out


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_nobody_is_coloured_who_does_not_want_it(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    assert "\x1b" not in show(monkeypatch, "demo: running", Terminal(), **env)


def test_a_pipe_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, "demo: running", io.StringIO()) == "demo: running\n"


def test_what_a_rank_printed_colours_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[31m" not in show(monkeypatch, "demo: x\x1b[31mred", Terminal())
