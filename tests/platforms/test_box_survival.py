"""A job on a box behind sshd, through reboots, cut transfers and killed parts, exact to the bit."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.box import Laptop, make_boxes, needs_sshd, read_json, wait_until
from tests.e2e.exact import check_equal
from tests.e2e.harness import SCRIPTS

pytestmark = [pytest.mark.serial, needs_sshd]
STEPS = 60
EXACT = f"""\
name = "exact"
script = "train_exact.py"
args = ["--trail", "trail", "--steps", "{STEPS}", "--pace-s", "0.1"]
nproc = 2
[checkpoint]
every_steps = 10
[launch]
project = "project"
outputs = ["trail"]
"""
SLEEPER = """\
name = "sleeper"
script = "sh"
args = ["-c", "test -e done || sleep 600"]
no_python = true
[launch]
project = "project"
"""
CAN_UNSHARE = not os.system("unshare -m true 2>/dev/null")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Laptop]]:
    """Return a function that makes a laptop with a box of its own."""
    yield from make_boxes(tmp_path)


def write_job(laptop: Laptop, text: str) -> Path:
    project = laptop.folder / "project"
    project.mkdir()
    (project / "train_exact.py").write_text((SCRIPTS / "train_exact.py").read_text())
    (project / "trail").mkdir()
    (laptop.folder / "job.toml").write_text(text)
    return laptop.box.home / "perdure" / text.split('"')[1]


def train_reference(laptop: Laptop) -> None:
    """Train the same job here, undisturbed."""
    folder = laptop.folder / "reference"
    folder.mkdir()
    command = [sys.executable, "-m", "perdure", "run", "-n", "2", "--name", "reference"]
    command += [str(laptop.folder / "project" / "train_exact.py"), "--trail", str(folder)]
    subprocess.run(
        [*command, "--steps", str(STEPS)], env=laptop.env, check=True, timeout=170,
        capture_output=True,
    )  # fmt: skip


def cut_when(laptop: Laptop, condition: Callable[[], object]) -> None:
    wait_until(condition, "a transfer to cut")
    assert laptop.box.cut()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not CAN_UNSHARE, reason="no mount namespaces: the boot id cannot be another")
def test_a_reboot_and_a_cut_transfer_change_no_loss(make: Callable[..., Laptop]) -> None:
    laptop = make(boot_id=str(uuid.uuid4()))
    there = write_job(laptop, EXACT)
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.wait_step("exact", 25)
    laptop.box.reboot()
    assert "rebooted" in laptop.cli("status", "exact").stderr
    assert "not ended by itself" in laptop.cli("attach", "exact", code=3).stderr
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.wait_step("exact", 40)
    laptop.cli("attach", "exact")

    (there / "project" / "trail" / "best.bin").write_bytes(os.urandom(300 << 20))
    pulling = laptop.start("pull", "exact", "pulled")
    target = laptop.folder / "pulled" / "outputs" / "trail"
    cut_when(laptop, lambda: list(target.glob(".best.bin.*")))
    _, err = pulling.communicate(timeout=170)
    assert pulling.returncode == 0, err
    assert "going on" in err
    assert laptop.ask("verify", "pulled")["ok"]
    train_reference(laptop)
    (laptop.folder / "killed").symlink_to(target)
    check_equal(laptop.folder, STEPS, 2)


@pytest.mark.timeout(400)
def test_what_is_killed_on_the_box_is_told_apart(make: Callable[..., Laptop]) -> None:
    laptop = make(tools=["setsid"], detach="setsid")
    launch = write_job(laptop, SLEEPER) / "launch"
    laptop.cli("launch", "job.toml", "--on", "box")
    start = read_json(launch / "start.json")
    os.kill(start["pid"], signal.SIGKILL)
    assert "orphaned" in laptop.cli("status", "sleeper").stderr
    refused = laptop.cli("launch", "job.toml", "--on", "box", code=4)
    assert "runs there already" in refused.stderr
    os.kill(start["child"], signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(start["child"]), "death")
    assert "killed" in laptop.cli("status", "sleeper").stderr

    laptop.cli("launch", "job.toml", "--on", "box")
    os.kill(read_json(launch / "start.json")["child"], signal.SIGKILL)
    assert "signal 9" in laptop.cli("attach", "sleeper", code=137).stderr

    laptop.box.power_off()
    told = laptop.cli("status", "sleeper", code=3).stderr
    assert "did not answer" in told
    assert "says nothing about a job" in told
    assert "does not answer" in laptop.cli("teardown", "sleeper", code=4).stderr


@pytest.mark.timeout(400)
def test_an_environment_is_made_and_a_shell_that_talks_is_refused(
    make: Callable[..., Laptop],
) -> None:
    laptop = make(environment="create")
    there = write_job(laptop, SLEEPER)
    (laptop.folder / "project" / "done").touch()
    (laptop.box.home / ".bashrc").write_text("echo Welcome\n")
    refused = laptop.cli("launch", "job.toml", "--on", "box", code=4)
    assert "prints at every login: Welcome" in refused.stderr
    (laptop.box.home / ".bashrc").unlink()
    told = laptop.cli("launch", "job.toml", "--on", "box").stderr
    python = (there / "launch" / "python").read_text().strip()
    assert python.startswith(str(laptop.box.home / "perdure" / "envs"))
    assert f"making {Path(python).parents[1]}" in told
    laptop.cli("attach", "sleeper")
    again = laptop.cli("launch", "job.toml", "--on", "box").stderr
    assert "making" not in again
