"""What the variable may say, when a fault happens, and that table, sources and document agree."""

import ast
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure import failpoints
from perdure.failpoints import FOLDER, SWITCH, failpoint, switch
from perdure.failpoints.points import POINTS
from perdure.failpoints.terms import parse_terms
from perdure.files import replace_file
from perdure.model.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "perdure"
DOCUMENT = ROOT / "docs" / "failpoints.md"


@pytest.fixture(autouse=True)
def nothing_is_switched_afterwards() -> Iterator[None]:
    yield
    switch({})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("journal/apend=crash", "there is no failpoint `journal/apend`"),
        ("crash", "there is no failpoint `crash`"),
        ("journal/append", "`` cannot happen at `journal/append`, but one of crash, delay can"),
        ("journal/append=error(EIO)", "`error(EIO)` cannot happen at `journal/append`"),
        ("file/write=error(28)", "`28` is no errno, such as ENOSPC"),
        ("file/write=error", "`` is no errno"),
        ("file/write=crash(1)", "`crash` takes no number"),
        ("file/write=delay(soon)", "`delay(soon)` lacks its number"),
        ("file/write=delay(nan)", "`delay(nan)` lacks its number"),
        ("file/write=delay(-1)", "`delay(-1)` lacks its number"),
        ("file/write=crash,2nd", "`2nd` is no condition; there are about, node"),
        ("file/write=crash,nth=last", "`nth=last` is no number"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_names_the_place(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        switch({SWITCH: text})
    assert raised.value.message.startswith(f"{SWITCH}: {why}")
    assert "\n" not in raised.value.message
    assert "docs/failpoints.md" in raised.value.hint


def test_a_command_refuses_a_variable_that_it_cannot_read() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "status"],
        env=os.environ | {SWITCH: "nowhere=crash"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"perdure: error: {SWITCH}: there is no failpoint `nowhere`\n")


def test_nothing_is_switched_in_a_job_that_somebody_needs() -> None:
    switch({"PATH": "/bin"})
    assert failpoints._switched == {}
    assert failpoint("journal/append") is None


def test_terms_are_read_with_their_conditions() -> None:
    text = " file/write = error(ENOSPC), about=latest, rank=0, nth=2 ; outbox/send=delay(.5),p=.25;"
    first, second = parse_terms(text)
    assert (first.name, first.fault, first.value) == ("file/write", "error", errno.ENOSPC)
    assert (first.about, first.rank, first.nth) == ("latest", "0", 2)
    assert (second.name, second.fault, second.value, second.p) == (
        "outbox/send",
        "delay",
        0.5,
        0.25,
    )


def count_faults(times: int, about: str = "") -> list[int]:
    """Pass a point so often; return the times at which an error was made."""
    made = []
    for number in range(1, times + 1):
        try:
            failpoint("file/rename", about)
        except OSError:
            made.append(number)
    return made


def test_a_fault_happens_when_its_conditions_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    switch({SWITCH: "file/rename=error(EIO),nth=2"})
    assert count_faults(4) == [2]
    switch({SWITCH: "file/rename=error(EIO),times=2"})
    assert count_faults(4) == [1, 2]
    switch({SWITCH: "file/rename=error(EIO),about=lat*,nth=1"})
    assert (count_faults(2, "manifest"), count_faults(2, "latest")) == ([], [1])
    switch({SWITCH: "file/rename=error(EIO),node=1"})
    assert count_faults(1) == []
    monkeypatch.setenv("PERDURE_NODE", "1")
    assert count_faults(1) == [1]


def test_a_fault_is_switched_by_a_file_while_the_process_runs(tmp_path: Path) -> None:
    there = tmp_path / "full"
    switch({SWITCH: f"file/rename=error(ENOSPC),file={there}"})
    assert count_faults(2) == []
    there.touch()
    assert count_faults(2) == [1, 2]
    there.unlink()
    assert count_faults(2) == []


def test_a_seed_has_the_same_faults_each_run() -> None:
    found = []
    for seed in (1, 1, 2):
        switch({SWITCH: f"file/rename=error(EIO),p=0.3,seed={seed}"})
        found.append(count_faults(100))
    assert found[0] == found[1] != found[2]
    assert 10 < len(found[0]) < 50


def test_times_are_counted_over_all_processes_of_a_folder(tmp_path: Path) -> None:
    """A part that is started again after its crash is not killed again."""
    program = (
        "from perdure.failpoints import failpoint\n"
        "for number in range(2): failpoint('journal/appended')\n"
        "print('lives')"
    )
    env = os.environ | {SWITCH: "journal/appended=crash,nth=2", FOLDER: str(tmp_path)}
    command = [sys.executable, "-c", program]
    first, second = (
        subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE_S) for _ in range(2)
    )
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, b"")
    assert (second.returncode, second.stdout) == (0, b"lives\n")
    hits = (tmp_path / "hits").read_text().splitlines()
    assert [line.split("\t")[0] for line in hits] == 4 * ["journal/appended"]
    assert len((tmp_path / "fired").read_text().splitlines()) == 1


def test_a_write_that_is_left_short_is_short(tmp_path: Path) -> None:
    switch({SWITCH: "file/write=take(3),about=whole,nth=2"})
    for _ in range(2):
        replace_file(tmp_path / "whole", b"123456")
    assert (tmp_path / "whole").read_bytes() == b"123"


def find_points(path: Path) -> list[str]:
    """Return the names at which a file has a point; each is a constant."""
    text = path.read_text()
    if "failpoint(" not in text:
        return []
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    found = []
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "failpoint":
            assert isinstance(call.args[0], ast.Constant), f"{path}:{call.lineno}"
            found.append(call.args[0].value)
    return found


def test_the_points_of_the_table_are_those_of_the_sources() -> None:
    found = {name for path in PACKAGE.rglob("*.py") for name in find_points(path)}
    assert found == set(POINTS)


def test_the_path_of_a_step_has_no_point() -> None:
    files = (p for name in ("worker", "elastic.py") for p in (PACKAGE / name).rglob("*.py"))
    having = {str(path.relative_to(PACKAGE)) for path in files if find_points(path)}
    assert having == {
        "worker/checkpoint/checkpointer.py",  # Of its thread, and of the restoring.
        "worker/checkpoint/files.py",
        "worker/control.py",  # A thread beside training.
        "worker/elastic/trainer.py",  # Between two worlds.
    }


def test_the_document_has_the_table() -> None:
    rows = [
        f"| `{name}` | {point.what} | {', '.join(point.faults)} |" for name, point in POINTS.items()
    ]
    text = DOCUMENT.read_text()
    head, _, rest = text.partition("|---|---|---|\n")
    if os.environ.get("UPDATE_GOLDEN"):
        after = "\n".join(line for line in rest.splitlines() if not line.startswith("|"))
        DOCUMENT.write_text(f"{head}|---|---|---|\n" + "\n".join(rows) + f"\n{after}\n")
        return
    assert [line for line in rest.splitlines() if line.startswith("|")] == rows
