"""perdure-lab is found by entry points; if it is missing, a line says what installs it."""

import json
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.results import REPLAY

from perdure import __version__
from perdure.cli import plugins
from perdure.cli.app import run_command
from perdure.cli.commands import LAB, PANELS
from perdure.cli.page.results import Results
from perdure.service.results import keep_result
from perdure_lab.results import KeptReplay

ROOT = Path(__file__).resolve().parents[3]
GIT = "https://example.org/perdure.git"
OWN = (sys.executable, "-m", "pip", "install")


def install(monkeypatch: pytest.MonkeyPatch, origin: object, lab: Any = None) -> None:
    """Have perdure be installed from `origin`, unless False, and perdure-lab not, or as `lab`."""

    perdure = SimpleNamespace(read_text=lambda _: json.dumps(origin) if origin else None)
    there = {
        "perdure": [perdure] if origin is not False else [],
        "perdure-lab": [lab] if lab else [],
    }
    monkeypatch.setattr(metadata, "distributions", lambda name: there[name])


def test_both_distributions_have_one_version() -> None:
    perdure, lab = (
        tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        for name in (".", "lab")
    )
    assert perdure["version"] == lab["version"] == __version__
    assert lab["dependencies"] == [f"perdure=={__version__}"]


def test_each_command_of_the_lab_is_an_entry_point() -> None:
    assert plugins.list_plugins().keys() == {*PANELS[LAB], "drill-on", "results"}
    for entry in plugins.list_plugins().values():
        assert entry.load()


@pytest.mark.parametrize("line", ["plan x", "profile x.py", "trace show x", "drill x.toml --on y"])
def test_a_command_that_is_not_installed_names_an_install_command(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    install(monkeypatch, {"url": ROOT.as_uri(), "dir_info": {"editable": True}})
    assert run_command(line.split()) == 3
    out, err = capsys.readouterr()
    first, hint = err.splitlines()
    assert f"is part of perdure-lab {__version__}, which is not installed" in first
    assert shlex.split(hint.removeprefix("hint: ")) == [*OWN, str(ROOT / "lab")]
    assert out == ""


def test_the_help_of_all_other_commands_needs_no_lab(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, {})
    for panel, names in PANELS.items():
        for name in names if panel != LAB else ():
            assert run_command([name, "--help"]) == 0
    capsys.readouterr()


def test_a_shell_completes_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_WORDS", "perdure p")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_PERDURE_COMPLETE", "complete_bash")
    for missing, named in ((False, {"plan", "profile"}), (True, set())):
        if missing:
            install(monkeypatch, {})
        run_command([])
        offered = set(capsys.readouterr().out.split())
        assert offered & {"plan", "profile", "pause"} == {"pause", *named}


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, [*OWN, f"perdure-lab=={__version__}"]),
        (
            {"url": GIT, "vcs_info": {"vcs": "git", "commit_id": "0ff1ce"}},
            [*OWN, f"perdure-lab @ git+{GIT}@0ff1ce#subdirectory=lab"],
        ),
        (
            {"url": "https://example.org/perdure-9-py3-none-any.whl", "archive_info": {}},
            ["pip install ./lab", "in", "a", "checkout", "of", "perdure", __version__],
        ),
        (False, ["pip install ./lab", "in", "a", "checkout", "of", "perdure", __version__]),
    ],
)
def test_the_install_command_is_of_where_perdure_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: object, words: list[str]
) -> None:
    install(monkeypatch, origin)
    assert shlex.split(plugins.tell_install().replace("`", "'")) == words


def test_beside_a_wheel_of_perdure_the_lab_is_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    wheel = folder / f"perdure_lab-{__version__}-py3-none-any.whl"
    url = (folder / f"perdure-{__version__}-py3-none-any.whl").as_uri()
    install(monkeypatch, {"url": url, "archive_info": {}})
    assert "in a checkout" in plugins.tell_install()
    wheel.touch()
    assert shlex.split(plugins.tell_install()) == [*OWN, str(wheel)]


def test_without_pip_the_command_is_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    assert shlex.split(plugins.tell_install())[:4] == ["uv", "pip", "install", "--python"]


def test_a_lab_of_another_version_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = metadata.distribution("perdure-lab")
    for version, found in ((__version__, True), ("0.0.1", False)):
        install(monkeypatch, {}, SimpleNamespace(version=version, entry_points=lab.entry_points))
        assert ("plan" in plugins.list_plugins()) is found


def test_a_result_of_the_lab_is_named_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = keep_result(str(tmp_path), KeptReplay(result=REPLAY))
    assert Results(str(tmp_path)).look().faults == []
    install(monkeypatch, {})
    listing = Results(str(tmp_path)).look()
    assert listing.rows == {}
    assert listing.faults == [
        (path.name, "its kind is unknown here; perdure-lab shows plans and traces")
    ]
