"""What a kill test says of two runs, and what it copies."""

import os
import venv
from pathlib import Path

import pytest

from perdure.cli.adopting.trial import Killed, Trial, judge_losses
from perdure.lab.drill.copies import COPY_BYTES_MAX, check_size, copy_project, list_links
from perdure.model.errors import SafetyError

PLAIN = {step: (1.0 / (step + 1)).hex() for step in range(80)}
KILLED = Killed(rank=1, at=40, resumed_at=31)


def judge(mine: dict[int, str], killed: Killed = KILLED) -> Trial:
    return judge_losses(killed, "loss", mine, PLAIN, {})


def test_equal_losses() -> None:
    trial = judge({step: PLAIN[step] for step in range(60)})
    assert (trial.verdict, trial.passed, trial.steps) == ("equal", True, 29)
    assert trial.text == (
        "rank 1 killed at step 40, resumed at 31, losses equal (loss of 29 steps)"
    )


def test_one_bit_is_a_difference() -> None:
    trial = judge(PLAIN | {50: (float.fromhex(PLAIN[50]) * (1 + 2**-52)).hex()})
    assert (trial.verdict, trial.passed) == ("differs", False)
    assert "from step 50 on: 0.0196" in trial.text
    assert "1 values differ" in trial.text


def test_why_it_is_not_exact_is_said() -> None:
    killed = Killed(1, 40, 31, "static_graph")
    assert "perdure itself says: static_graph" in judge(PLAIN | {70: "0x1p0"}, killed).text


def test_a_script_without_a_seed_is_not_blamed_on_the_resume() -> None:
    trial = judge({step: float(step).hex() for step in range(60)})
    assert trial.verdict == "survived"
    assert "already at step 0, before the kill" in trial.text


def test_what_was_logged_before_the_kill_shows_a_script_without_a_seed() -> None:
    mine = {step: float(step).hex() for step in range(40, 60, 5)}  # None before the checkpoint.
    trial = judge_losses(KILLED, "loss", mine, PLAIN, {35: "0x1p0"})
    assert trial.verdict == "survived"
    assert "already at step 35, before the kill (0.0277" in trial.text
    mended = judge_losses(KILLED, "loss", mine, PLAIN, {35: PLAIN[35]})
    assert mended.verdict == "differs"


def test_nothing_to_compare() -> None:
    assert judge({}).verdict == "survived"
    assert "prints none" in judge({}).text
    assert "no loss was logged after it resumed" in judge({3: PLAIN[3]}).text


def test_no_checkpoint_was_used() -> None:
    trial = judge(PLAIN, Killed(1, 40, 0))
    assert (trial.verdict, trial.passed) == ("not resumed", False)


def test_printed_lines_are_compared_by_what_stands_before_the_loss() -> None:
    lines = {"step 40 loss ": "0.5", "step 50 loss ": "0.4"}
    assert judge_losses(KILLED, "lines", lines, lines, {}).verdict == "equal"
    other = judge_losses(KILLED, "lines", lines | {"step 50 loss ": "0.41"}, lines, {})
    assert other.verdict == "differs"
    assert "`step 50 loss`" in other.text


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "train.py").write_text("x = 1\n")
    (folder / "src" / "a.py").write_text("y = 1\n")
    (folder / ".git" / "config").write_text("secret")
    (tmp_path / "data").mkdir()
    os.symlink("../data", folder / "data")
    os.symlink("train.py", folder / "again.py")
    os.symlink("nowhere", folder / "broken")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_copy_has_what_a_script_needs(project: Path, tmp_path: Path) -> None:
    check_size(project)
    copy_project(project, tmp_path / "copy")
    copied = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*")}
    assert copied == {"train.py", "src", "src/a.py", "data", "again.py", "broken"}
    assert (tmp_path / "copy" / "data").samefile(tmp_path / "data")
    assert list_links(project) == ["data"]


def test_a_link_within_the_folder_leads_into_the_copy(project: Path, tmp_path: Path) -> None:
    copy_project(project, tmp_path / "copy")
    (tmp_path / "copy" / "again.py").write_text("changed")
    assert (project / "train.py").read_text() == "x = 1\n"


def test_an_environment_of_any_name_is_not_copied(project: Path, tmp_path: Path) -> None:
    """`python -m venv env` beside the script: torch is in it, and 256 MiB are the limit."""
    venv.create(project / "env")
    with open(project / "env" / "libtorch.so", "wb") as file:
        file.truncate(2 * COPY_BYTES_MAX)
    check_size(project)
    copy_project(project, tmp_path / "copy")
    assert not (tmp_path / "copy" / "env").exists()


def test_a_folder_that_is_too_large_is_not_copied(project: Path) -> None:
    with open(project / "model.bin", "wb") as file:
        file.truncate(COPY_BYTES_MAX)
    with pytest.raises(SafetyError, match=r"too large: model.bin \(256 MiB\)"):
        check_size(project)
