"""A queue on a laptop whose jobs run on a box or on a cluster behind a login node."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.box import Laptop, make_boxes, needs_sshd
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_login import add_profile
from tests.waiting import wait_until

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900), needs_sshd]

JOB = """\
name = "unused"
script = "train.py"
nproc = 1
restart.max_restarts = 0
[launch]
project = "project"
"""
# Leaves a line for each start; `first` fails the first time, the others wait until they may end.
SCRIPT = """\
import os, pathlib, sys, time
name, marks = os.environ["NAME"], pathlib.Path({marks!r})
with open(marks / name, "a") as file:
    file.write(str(os.getpid()) + "\\n")
if name == "first":
    sys.exit(len((marks / name).read_text().splitlines()) == 1)
deadline = time.monotonic() + 300
while not (marks / f"{{name}}-may-end").exists():
    assert time.monotonic() < deadline
    time.sleep(0.1)
"""
QUEUE = """\
[defaults]
on = "{profile}"
backoff_s = 1
[[item]]
name = "first"
job = "job.toml"
set = {{ "env.NAME" = "first" }}
[[item]]
name = "second"
job = "job.toml"
after = ["first"]
set = {{ "env.NAME" = "second" }}
[[item]]
name = "made"
command = ["false"]
done = ["job.toml"]
"""
STOPPED = """\
[[item]]
name = "third"
job = "job.toml"
on = "{profile}"
set = {{ "env.NAME" = "third" }}
"""


@pytest.fixture(params=["box", "cluster"])
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def laptop(profile: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Laptop]:
    cluster: Cluster | None = None
    if profile == "cluster":
        cluster = request.getfixturevalue("cluster")
    for make in make_boxes(tmp_path):
        made = make()
        if cluster is not None:
            add_profile(made, cluster)
        (made.folder / "marks").mkdir()
        (made.folder / "project").mkdir()
        script = SCRIPT.format(marks=str(made.folder / "marks"))
        (made.folder / "project" / "train.py").write_text(script)
        (made.folder / "job.toml").write_text(JOB)
        yield made
        shut_down(made)
        if cluster is not None:
            cluster.end_jobs()


def shut_down(laptop: Laptop) -> None:
    """Kill all that runs on the laptop, at once."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PERDURE_HOME") == str(laptop.home):
                process.kill()


def read_starts(laptop: Laptop, name: str) -> list[str]:
    path = laptop.folder / "marks" / name
    return path.read_text().splitlines() if path.exists() else []


def list_states(laptop: Laptop) -> dict[str, tuple[str, int]]:
    rows = laptop.ask("queue", "ls")["items"]
    return {row["name"]: (row["state"], row["attempts"]) for row in rows}


def run_queue(laptop: Laptop) -> "subprocess.Popen[str]":
    return laptop.start("queue", "run")


def test_a_queue_on_a_laptop_that_is_switched_off(laptop: Laptop, profile: str) -> None:
    (laptop.folder / "queue.toml").write_text(QUEUE.format(profile=profile))
    laptop.cli("queue", "add", "queue.toml")
    runner = run_queue(laptop)
    wait_until(lambda: read_starts(laptop, "second"), "the second job", 300)
    shut_down(laptop)
    runner.communicate(timeout=30)
    (pid,) = read_starts(laptop, "second")
    assert psutil.pid_exists(int(pid)), "the job goes on"

    runner = run_queue(laptop)
    wait_until(lambda: list_states(laptop)["second"] == ("running", 2), "another attempt", 120)
    (laptop.folder / "marks" / "second-may-end").touch()
    out, err = runner.communicate(timeout=240)
    assert runner.returncode == 0, out + err
    assert read_starts(laptop, "second") == [pid], "it was found where it was"
    assert len(read_starts(laptop, "first")) == 2, "it failed, and was launched again"
    assert list_states(laptop) == {"first": ("done", 2), "second": ("done", 2), "made": ("done", 0)}

    (laptop.folder / "queue.toml").write_text(STOPPED.format(profile=profile))
    laptop.cli("queue", "add", "queue.toml")
    runner = run_queue(laptop)
    wait_until(lambda: read_starts(laptop, "third"), "the third job", 240)
    laptop.cli("queue", "rm", "--stop", "third")
    (pid,) = read_starts(laptop, "third")
    wait_until(lambda: not psutil.pid_exists(int(pid)), "the end of the job itself", 240)
    runner.communicate(timeout=120)
    assert "stopped" in laptop.cli("status", "third").stdout
