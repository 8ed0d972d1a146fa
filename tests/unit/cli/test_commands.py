"""The table of commands says what the commands say of themselves, and imports none of them."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
from tests.waiting import PATIENCE_S

from perdure.cli.app import load_command, run_command
from perdure.cli.commands import COMMANDS, PANELS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_what_the_command_says(name: str) -> None:
    help_ = inspect.cleandoc(load_command(name).help)
    assert help_.split("\n\n")[0].replace("\n", " ") == COMMANDS[name].summary
    assert len(COMMANDS[name].summary) <= 66, "longer than a line of the help at 80 columns"


def test_each_command_is_in_one_panel() -> None:
    assert sum(map(len, PANELS.values())) == len(COMMANDS)


def test_a_module_of_commands_has_none_that_nobody_can_type() -> None:
    for module in {entry.module for entry in COMMANDS.values()}:
        assert import_module(f"perdure.cli.{module}").__doc__


def test_a_command_that_is_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["statu", "job"]) == 2
    assert "hint: did you mean `perdure status`?" in capsys.readouterr().err


MODULES_MAX = 300
"""Modules that a command may import before it looks for its job: a person waits for each.

Of these 200 are Python's own and 60 Typer's.
"""


@pytest.mark.parametrize(
    "line",
    [
        "--version",
        "--help",
        "status",
        "status nosuch",
        "set nosuch lr=1",
        "logs nosuch",
        "events nosuch",
        "stop nosuch",
        "profiles",
        "queue ls",
    ],
)
def test_what_a_command_imports_is_bounded(line: str) -> None:
    code = (
        "import sys; from perdure.cli.app import run_command; "
        f"run_command({line.split()}); print(len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert int(done.stderr.split()[-1]) <= MODULES_MAX, line


def test_a_command_that_a_notebook_does_not_carry_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "perdure.lab", None)
    for name in [
        name for name in sys.modules if name.startswith(("perdure.cli.drive", "perdure.lab."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert run_command(["trace", "show", "x"]) == 3
    assert "perdure trace is not part of this installation" in capsys.readouterr().err
