"""`make check` refuses sentences that have to be read twice, and code beyond its budget."""

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CLEAN = '"""Return the ranks that have not entered the collective."""\n'
UNCLEAR = [
    '"""Return what is told of by whoever has it."""\n',
    "# Nobody reads this comment, which has a long way to go.\n",
    "print(f'the agent of {1} is told of a mended disk')\n",
    f'"""{"word " * 26}."""\n',
]


def load(name: str, root: Path) -> ModuleType:
    """Import a script of `make check` that looks at the repository in `root`."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = root  # type: ignore[attr-defined]
    for constant in ("BUDGET", "EXEMPT"):
        if hasattr(module, constant):
            setattr(module, constant, root / "scripts" / getattr(module, constant).name)
    return module


def git(root: Path, *words: str) -> None:
    """Run git in `root` as an author that needs no configuration."""
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a repository with one clean file and an empty list of exempt files."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "prose_exempt.txt").write_text("old.py\n")
    (tmp_path / "old.py").write_text(UNCLEAR[0])
    (tmp_path / "new.py").write_text(CLEAN)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def check_prose(root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the check of prose; return its exit code."""
    monkeypatch.setattr("sys.argv", ["check_prose.py"])
    return int(load("check_prose", root).main())


@pytest.mark.parametrize("text", UNCLEAR)
def test_a_sentence_to_be_read_twice_fails_a_file_that_is_not_exempt(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert check_prose(root, monkeypatch) == 0
    (root / "new.py").write_text(text)
    assert check_prose(root, monkeypatch) == 1
    assert "new.py:1: " in capsys.readouterr().out


def test_the_list_of_exempt_files_only_shrinks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exempt = root / "scripts" / "prose_exempt.txt"
    (root / "new.py").write_text(UNCLEAR[0])
    exempt.write_text("new.py\nold.py\n")
    assert check_prose(root, monkeypatch) == 1
    git(root, "commit", "-qam", "second")
    assert check_prose(root, monkeypatch) == 1
    (root / "new.py").write_text(CLEAN)
    (root / "old.py").write_text(CLEAN)
    assert check_prose(root, monkeypatch) == 0
    assert exempt.read_text() == ""


def test_without_git_nothing_is_checked_and_the_list_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / ".git").rename(root / "not-git")
    assert check_prose(root, monkeypatch) == 0
    assert (root / "scripts" / "prose_exempt.txt").read_text() == "old.py\n"


def test_a_renamed_file_stays_exempt(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "old.py").rename(root / "moved.py")
    (root / "scripts" / "prose_exempt.txt").write_text("moved.py\n")
    assert check_prose(root, monkeypatch) == 0


@pytest.mark.parametrize("data", [b"# caf\xe9 of the harbour\n", b"def test_it(:\n"])
def test_a_file_that_cannot_be_read_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    (root / "new.py").write_bytes(data)
    assert check_prose(root, monkeypatch) == 1
    assert "new.py:1: cannot be read: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        f"- An item of a list:\n\n  ```\n  {'word ' * 30}\n  ```\n",
        f"~~~\n{'word ' * 30}\n~~~\n",
        "A list of short items follows here:\n" + "- An item has only a few words\n" * 9,
    ],
)
def test_programs_and_lists_are_no_long_sentences(
    root: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (root / "new.md").write_text(text)
    assert check_prose(root, monkeypatch) == 0


def test_code_beyond_the_budget_fails_and_code_below_it_lowers_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src" / "it").mkdir(parents=True)
    source = tmp_path / "src" / "it" / "it.py"
    budget = tmp_path / "scripts" / "size_budget.json"
    budget.write_text('{".": 2}')
    check = load("check_size", tmp_path)
    source.write_text('"""No statement."""\na = 1\nb = 2\n')
    assert check.main() == 0
    source.write_text("a = 1\nb = 2\nc = 3\n")
    assert check.main() == 1
    assert "has 3 statements, and its budget is 2" in capsys.readouterr().out
    assert json.loads(budget.read_text()) == {".": 2}
    source.write_text("a = 1\n")
    assert check.main() == 0
    assert json.loads(budget.read_text()) == {".": 1}
