"""The table of commands says what the commands say of themselves, and imports none of them."""

import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.cli.app import load_command, run_command
from perdure.cli.commands import COMMANDS, FIRST_DAY, LAB, PANELS, RENAMED


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_what_the_command_says(name: str) -> None:
    help_ = inspect.cleandoc(load_command(name).help)
    assert help_.split("\n\n")[0].replace("\n", " ") == COMMANDS[name].summary
    assert len(COMMANDS[name].summary) <= 66, "longer than a line of the help at 80 columns"


def test_each_command_is_in_one_panel() -> None:
    assert sum(map(len, PANELS.values())) == len(COMMANDS)
    assert len(COMMANDS) - len(PANELS[LAB]) <= 32


def test_the_help_has_a_line_for_each_command_of_the_first_day_and_names_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["--help"]) == 0
    first, others = capsys.readouterr().out.split("All others")
    rows = first.split("Begin with:\n")[1].splitlines()
    assert [row.split()[0] for row in rows if row] == list(FIRST_DAY)
    assert all(COMMANDS[name].summary in first for name in FIRST_DAY)
    assert set(others.split()) >= COMMANDS.keys() - set(FIRST_DAY)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_runs_the_new_command_and_says_its_name_in_a_line(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = RENAMED[old][0].split()
    assert run_command(["--help"]) == 0
    assert f" {old} " not in capsys.readouterr().out.replace("\n", " ")
    assert old not in COMMANDS, "a shell would complete it"
    assert run_command([*words, "--help"]) == 0
    help_, _ = capsys.readouterr()
    assert run_command([old, "--help"]) == 0
    assert capsys.readouterr() == (
        help_,
        f"perdure: `perdure {old}` is now `perdure {' '.join(words)} --help`\n",
    )


def test_an_old_option_has_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    for given, now in (
        ("--free=20", "--checkpoints-until=20"),
        ("--free 2", "--checkpoints-until 2"),
    ):
        assert run_command(["prune", "j", *given.split(), "--json"]) == 2
        out, err = capsys.readouterr()
        assert err == f"perdure: `perdure prune` is now `perdure rm j {now} --json`\n"
        assert "unknown job `j`" in json.loads(out)["error"]
    assert run_command(["drain", "j", "1", "--why", "two\nlines"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3, "a line, and the two of the error"


def test_a_module_of_commands_has_none_that_nobody_can_type() -> None:
    for module in {entry.module for entry in COMMANDS.values()} - {""}:
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
    monkeypatch.setitem(sys.modules, "perdure.drill", None)
    for name in [
        name for name in sys.modules if name.startswith(("perdure.cli.drill", "perdure.drill."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert run_command(["drill", "x.toml"]) == 3
    assert "perdure drill is not part of this installation" in capsys.readouterr().err
