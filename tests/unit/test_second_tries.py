"""T13: second tries have a budget over all runs that share it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.second_tries import VARIABLE

ROOT = Path(__file__).resolve().parent.parent.parent
FLAKY = """
import pathlib

def check(name):
    path = pathlib.Path(__file__).with_name(name)
    if not path.exists():
        path.touch()
        assert False, "for once"
"""


def play(folder: Path, flaky: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over so many tests that pass at their second try."""
    folder.mkdir()
    tests = "".join(f"\ndef test_{n}():\n    check('{n}')\n" for n in range(flaky))
    (folder / "test_it.py").write_text(FLAKY + tests + "\ndef test_sound():\n    pass\n")
    (folder / "conftest.py").write_text(
        "from tests.second_tries import watch_second_tries as pytest_configure\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "--reruns", "1", *options, str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), VARIABLE: str(folder.parent / "build" / "tries")}
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:randomly"],
        env=env, cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.long)], ids=["alone", "xdist"]
)
def test_more_second_tries_than_the_budget_fail_the_run(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    first = play(tmp_path / "a", 2, *options)
    assert first.returncode == 0, first.stdout
    assert "second tries: 2, of which 2 are allowed" in first.stdout
    assert first.stdout.count("second try: ") == 2
    second = play(tmp_path / "b", 1, *options)
    assert second.returncode == 1, second.stdout
    assert "second tries: 3, of which 2 are allowed" in second.stdout
    assert second.stdout.count("second try: ") == 3
    assert "test_it.py::test_0: AssertionError: for once" in second.stdout


@pytest.mark.long
def test_a_run_without_second_tries_says_so(tmp_path: Path) -> None:
    done = play(tmp_path / "a", 0)
    assert done.returncode == 0
    assert "second tries: 0, of which 2 are allowed" in done.stdout
