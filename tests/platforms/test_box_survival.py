"""A job on a box behind sshd, through reboots, cut transfers and killed parts, exact to the bit."""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from perdure.launch.ssh.render import fill
from tests.e2e.box import Laptop, make_boxes, needs_sshd, read_json
from tests.e2e.exact import check_equal
from tests.e2e.harness import SCRIPTS
from tests.waiting import wait_until

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


def cut_when(laptop: Laptop, condition: Callable[[], object]) -> None:
    wait_until(condition, "a transfer to cut")
    assert laptop.box.cut()


def wait_asleep(laptop: Laptop) -> None:
    """Wait until the job's script has looked for `done`, and sleeps."""

    def sleeps() -> bool:
        with contextlib.suppress(psutil.Error):
            processes = laptop.box.find_processes()
            return any(process.cmdline() == ["sleep", "600"] for process in processes)
        return False

    wait_until(sleeps, "sleep")


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
    laptop.train_reference(STEPS)
    (laptop.folder / "killed").symlink_to(target)
    check_equal(laptop.folder, STEPS, 2)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not CAN_UNSHARE, reason="no mount namespaces: the boot id cannot be another")
@pytest.mark.skipif(shutil.which("cron") is None, reason="no cron")
def test_cron_starts_a_job_again_after_a_reboot_and_only_then(make: Callable[..., Laptop]) -> None:
    laptop = make(boot_id=str(uuid.uuid4()), relaunch="cron")
    there = write_job(laptop, SLEEPER)
    home = f"HOME={laptop.box.home}\n"  # Of root there is one on this machine, elsewhere.
    laptop.ssh("crontab -", stdin=home + "17 3 * * * true\n")
    if not any(process.name() == "cron" for process in psutil.process_iter()):
        refused = laptop.cli("launch", "job.toml", "--on", "box", code=4).stderr
        assert "no cron runs on the box" in refused
    laptop.ssh("cron")
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.cli("stop", "sleeper", "--now")
    laptop.cli("attach", "sleeper", code=1)
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.box.reboot()
    laptop.ssh("cron")
    wait_until(lambda: "box: running" in laptop.cli("status", "sleeper").stderr, "the job")
    assert read_json(there / "launch" / "start.json")["attempt"] == 3
    entries = laptop.ssh("crontab -l").splitlines()
    assert entries[:2] == [home.strip(), "17 3 * * * true"], "the user's own lines stay"
    assert sum("@reboot" in line for line in entries) == 1

    wait_asleep(laptop)
    (there / "project" / "done").touch()
    start = read_json(there / "launch" / "start.json")
    laptop.cli("stop", "sleeper")
    laptop.cli("attach", "sleeper")
    laptop.box.reboot()
    laptop.ssh("cron")
    laptop.cli("pull", "sleeper", "pulled")
    assert read_json(there / "launch" / "start.json") == start, "what has ended stays ended"
    laptop.cli("verify", "pulled", "--nothing-to-keep")
    laptop.cli("teardown", "sleeper", "--confirm", "sleeper", "--others-agree")
    assert "@reboot" not in laptop.ssh("crontab -l")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_for_systemd_is_one_and_is_taken_out_again(tmp_path: Path) -> None:
    """systemd does not run here: the unit is enabled, and judged by systemd's own reader."""
    home, launch = tmp_path / "home", tmp_path / "launch"
    launch.mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "loginctl").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "bin" / "loginctl").chmod(0o755)
    (launch / "env.sh").write_text(f"JOB_DIR={tmp_path}\n")
    (launch / "relaunch.sh").write_text(fill("systemd.sh", job="gpt"))
    (launch / "start.sh").write_text("exit 0\n")
    env = {"HOME": str(home), "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "XDG_RUNTIME_DIR": "/run"}
    subprocess.run(["sh", launch / "relaunch.sh"], env=env, check=True, timeout=60)
    unit = home / ".config/systemd/user/perdure-gpt.service"
    wanted = unit.parent / "default.target.wants" / unit.name
    assert wanted.resolve() == unit
    judged = subprocess.run(
        ["systemd-analyze", "verify", "--user", unit],
        env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (judged.returncode, judged.stderr) == (0, "")
    subprocess.run(["sh", launch / "relaunch.sh", "off"], env=env, check=True, timeout=60)
    assert not wanted.is_symlink()
    assert not unit.exists()


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
@pytest.mark.skipif(not CAN_UNSHARE, reason="no mount namespaces: the boot id cannot be another")
def test_causes_of_a_death_are_told_apart_from_here(make: Callable[..., Laptop]) -> None:
    laptop = make(boot_id=str(uuid.uuid4()))
    launch = write_job(laptop, SLEEPER) / "launch"

    def start() -> dict[str, int]:
        laptop.cli("launch", "job.toml", "--on", "box")
        return read_json(launch / "start.json")

    def diagnose() -> str:
        done = laptop.cli("diagnose", "sleeper")
        return done.stdout + done.stderr

    started = start()
    tmux = psutil.Process(started["pid"]).parent()
    assert tmux is not None
    assert "tmux" in tmux.name()
    tmux.kill()
    tmux.wait(10)
    assert "box: running" in laptop.cli("status", "sleeper").stderr, "its terminal is gone, not it"
    os.kill(started["child"], signal.SIGHUP)
    wait_until(lambda: "box: ended" in laptop.cli("status", "sleeper").stderr, "its end")
    assert "is gone: hang-up" in diagnose()

    started = start()
    os.kill(started["pid"], signal.SIGKILL)
    wait_until(lambda: "box: orphaned" in laptop.cli("status", "sleeper").stderr, "an orphan")
    os.kill(started["child"], signal.SIGKILL)
    wait_until(lambda: "box: killed" in laptop.cli("status", "sleeper").stderr, "its death")
    told = diagnose()
    assert "is gone: killed" in told
    assert "out of memory" not in told.split("no sign of lack of memory")[-1]

    start()
    laptop.box.reboot()
    told = diagnose()
    assert "is gone: reboot" in told
    assert "box: rebooted" in told

    start()
    wait_asleep(laptop)
    (launch.parent / "project" / "done").touch()
    laptop.cli("stop", "sleeper")
    laptop.cli("attach", "sleeper")
    assert "nothing was found wrong" in diagnose()


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
    made = f"making {Path(python).parents[1]}"
    assert made in told
    laptop.cli("attach", "sleeper")
    again = laptop.cli("launch", "job.toml", "--on", "box").stderr
    assert made not in again
