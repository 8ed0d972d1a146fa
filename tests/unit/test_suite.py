"""A failed test runs again alone, up to twice, and the last lines name it."""

from pathlib import Path

import pytest
from tests import suite

FLAKY = """
import pathlib
def test_flaky():
    tries = pathlib.Path(__file__).with_name("tries")
    with tries.open("a") as file:
        file.write("x")
    assert len(tries.read_text()) >= {passes_at}, "too early"
def test_steady():
    pass
"""


@pytest.fixture(autouse=True)
def plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each pytest of these tests import no plugin that is installed: a second of CPU."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(
    folder: Path, capfd: pytest.CaptureFixture[str], text: str, *, strict: bool = False
) -> tuple[int, list[str]]:
    """Run the suite over a file with `text`; return its exit code and the lines that it printed."""
    (folder / "test_it.py").write_text(text)
    code = suite.run_suite({"only": ["-p", "no:cacheprovider"]}, strict, folder)
    return code, capfd.readouterr().out.splitlines()


def test_a_test_that_passes_alone_passes_and_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(tmp_path, capfd, FLAKY.format(passes_at=3))
    assert code == 0
    assert "test_it.py::test_flaky passed at try 3, alone" in lines[-2]
    assert "first failure: AssertionError: too early" in lines[-2]
    assert "1 second tries, 0 failed" in lines[-1]


def test_a_test_that_fails_three_times_fails_the_suite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(tmp_path, capfd, FLAKY.format(passes_at=4))
    assert code == 1
    assert "test_it.py::test_flaky FAILED" in lines[-2]
    assert (tmp_path / "tries").read_text() == "xxx"


def test_a_second_try_fails_a_strict_suite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(tmp_path, capfd, FLAKY.format(passes_at=2), strict=True)
    assert code == 1
    assert "passed at try 2, alone" in lines[-2]


def test_a_second_try_that_is_skipped_has_not_passed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import pathlib, pytest\n"
        "def test_it():\n"
        "    tried = pathlib.Path(__file__).with_name('tried')\n"
        "    if tried.exists():\n        pytest.skip()\n"
        "    tried.touch()\n    assert False\n"
    )
    code, lines = run(tmp_path, capfd, text)
    assert code == 1
    assert "test_it.py::test_it FAILED" in lines[-2]


def test_a_suite_without_failures_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = run(tmp_path, capfd, FLAKY.format(passes_at=1), strict=True)
    assert code == 0
    assert "0 second tries, 0 failed" in lines[-1]


def test_a_file_that_cannot_be_collected_fails_the_suite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, lines = run(tmp_path, capfd, "import nothing_of_this_name\n")
    assert code == 1
    assert "FAILED" in lines[-1]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("import os\ndef test_it():\n    os._exit(0)\n", id="dies"),
        pytest.param(
            "import atexit, os\ndef test_it():\n    atexit.register(os.kill, os.getpid(), 9)\n",
            id="dies-late",
        ),
        pytest.param("import pytest\ndef test_it():\n    pytest.skip()\n", id="runs-nothing"),
    ],
)
def test_a_pytest_that_does_not_end_well_fails_the_suite(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str
) -> None:
    code, lines = run(tmp_path, capfd, text)
    assert code == 1
    assert "pytest did not finish, or ran no test: only" in "\n".join(lines)


def test_if_too_many_tests_fail_none_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import pytest\n"
        f"@pytest.mark.parametrize('n', range({suite.MOST_TRIED_AGAIN + 1}))\n"
        "def test_it(n):\n    assert n < 0\n"
    )
    code, lines = run(tmp_path, capfd, text)
    assert code == 1
    assert "none was tried again" in "\n".join(lines)


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_command_runs_beside_the_first_part_and_ends_the_suite_if_it_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exit_code: int
) -> None:
    """Each waits for the other one, so that neither ends if they do not run at once."""
    (tmp_path / "check").write_text(
        f"touch here; until [ -e there ]; do sleep 0.01; done; exit {exit_code}"
    )
    (tmp_path / "test_later.py").write_text(FLAKY.format(passes_at=1))
    (tmp_path / "test_first.py").write_text(
        "import pathlib, time\n"
        "def test_first():\n"
        "    while not pathlib.Path('here').exists():\n"
        "        time.sleep(0.01)\n"
        "    pathlib.Path('there').touch()\n"
    )
    runs = {part: ["-p", "no:cacheprovider", f"test_{part}.py"] for part in ("first", "later")}
    code = suite.run_suite(runs, False, tmp_path, "sh check")
    assert code == (1 if exit_code else 0)
    assert (tmp_path / "tries").exists() is (exit_code == 0)
    said = f"suite: FAILED: `sh check` ended with exit code {exit_code}"
    assert (said in capfd.readouterr().out) is (exit_code != 0)
