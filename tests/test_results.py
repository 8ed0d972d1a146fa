"""What bench/RESULTS.md says of its figures: the command that makes them, and of which commit."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
COMMIT = re.compile(r"`([0-9a-f]{7,12})`")
COMMAND = re.compile(
    r"`(?:nice -n \d+ )?((?:python|pytest|perdure|make) [^`]*|bench_\w+\.py[^`]*)`"
)
FILE = re.compile(r"(?:bench|examples|tests)/[\w/]+\.py|\b(?:bench|campaign)_\w+\.py")


def list_sections() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each section, with those below it."""
    parts = re.split(r"^### (.*)$", TEXT, flags=re.M)
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        yield name, re.split(r"^## ", body, flags=re.M)[0]


def list_headlines() -> list[list[str]]:
    """Return the cells of the headline figures."""
    text = TEXT[TEXT.index("## Headline figures") :].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def find_missing(commits: list[str]) -> list[str]:
    """Return those that are no ancestors of this tree; nothing where there is no history."""
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True, check=False)
    shallow = subprocess.run(
        [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=False
    )
    if known.returncode or shallow.stdout.strip() != "false":
        pytest.skip("no history here")
    history = known.stdout.split()
    return [c for c in commits if not any(full.startswith(c) for full in history)]


SECTIONS = dict(list_sections())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_names_its_commit_and_a_command_that_exists(name: str) -> None:
    text = SECTIONS[name]
    if "|---" not in text and not COMMAND.search(text):
        return  # Prose about the tree itself.
    assert COMMIT.search(text) or "commit not recorded" in text, f"{name}: of which commit?"
    assert COMMAND.search(text), f"{name}: by which command?"


def test_every_file_that_a_command_names_is_there() -> None:
    names = {name for command in COMMAND.findall(TEXT) for name in FILE.findall(command)}
    assert len(names) > 20
    missing = [n for n in names if not (ROOT / n).exists() and not (ROOT / "bench" / n).exists()]
    assert not missing


def test_every_commit_is_in_the_history() -> None:
    commits = sorted(set(COMMIT.findall(TEXT)))
    assert len(commits) > 20
    assert not find_missing(commits)


def test_the_headlines_come_first_with_command_commit_and_load() -> None:
    assert TEXT.index("\n## ") == TEXT.index("\n## Headline figures")
    rows = list_headlines()
    assert len(rows) >= 12
    for what, figure, _, _, command, commit, load in rows:
        assert figure, what
        assert COMMAND.search(command) or command == "the same", what
        assert COMMIT.search(commit), what
        assert load, what
    vanished = next(n for n, row in enumerate(rows) if "whole node vanishes" in row[0])
    ended = next(n for n, row in enumerate(rows) if "a process ends" in row[0])
    assert vanished < ended
