"""A message that names a document leads to it, wherever the command is run."""

import re
from pathlib import Path

import pytest

from perdure.cli.app import run_command
from perdure.cli.speech.pages import find_pages, point_to_pages

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def test_a_hint_names_a_file_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text("{}")
    words = ["plan", "p.json", "--devices", "4", "--global-batch", "8", "--memory", "1GB"]
    assert run_command(words) == 2
    (named,) = re.findall(r"^hint: (\S+\.md) ", capsys.readouterr().err, re.MULTILINE)
    assert Path(named).is_absolute()
    assert "# Planning" in Path(named).read_text()


def test_in_the_checkout_a_page_keeps_its_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert point_to_pages("see docs/lab.md") == "see docs/lab.md"


def test_what_is_no_page_of_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("docs/nowhere.md", "/home/me/docs/lab.md", "my-docs/lab.md", "docs/lab.mdx"):
        assert point_to_pages(text) == text


def test_every_page_that_the_code_names_is_there() -> None:
    folder = find_pages()
    assert folder is not None
    named = {
        name
        for folder in ("src", "lab/src")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"(?<![\w/])docs/([a-z-]+\.md)\b", path.read_text("utf-8"))
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not (folder / name).is_file()] == []
