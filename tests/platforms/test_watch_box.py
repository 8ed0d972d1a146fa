"""`perdure watch` of a job on a box behind sshd: the screen is drawn there, and used here."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.box import Laptop, make_boxes, needs_sshd
from tests.e2e.harness import SCRIPTS
from tests.e2e.test_watch_tmux import TMUX, Tmux

pytestmark = [
    pytest.mark.serial,
    needs_sshd,
    pytest.mark.skipif(not TMUX, reason="no tmux"),
    pytest.mark.timeout(300),
]
JOB = """\
name = "seen"
script = "train_settings.py"
args = ["--steps", "100000", "--pace-s", "0.05", "--trail", "."]
nproc = 2
[launch]
project = "project"
"""


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    """Return a person's machine with a box on which a job trains."""
    makers: Iterator[Callable[..., Laptop]] = make_boxes(tmp_path)
    made = next(makers)()
    project = made.folder / "project"
    project.mkdir()
    (project / "train_settings.py").write_text((SCRIPTS / "train_settings.py").read_text())
    (made.folder / "job.toml").write_text(JOB)
    made.cli("launch", "job.toml", "--on", "box")
    made.wait_step("seen", 5)
    yield made
    made.cli("stop", "seen")
    next(makers, None)


def test_the_screen_of_a_job_on_a_box_is_seen_and_steers_it(laptop: Laptop) -> None:

    command = f"{sys.executable} -m perdure watch seen; echo left with $?; cat"
    terminal = Tmux(laptop.folder, laptop.env, f"sh -c '{command}'")
    try:
        terminal.wait("seen running", "goodput", "2 ranks", "1 Ranks")
        terminal.press("p")
        terminal.wait("all ranks stand still before one step")
        terminal.press("y")
        terminal.wait("seen paused", "r resume")
        assert laptop.ask("status", "seen")["paused"]
        terminal.press("q")
        terminal.wait("left with 0")
    finally:
        terminal.ask("kill-server", check=False)
    assert laptop.ask("status", "seen")["paused"], "the job is as it was"
