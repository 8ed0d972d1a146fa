"""Slurm behind a login node: a laptop on which only `ssh login` works, and the job goes on."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.box import Laptop, make_boxes, needs_sshd
from tests.e2e.exact import check_equal
from tests.e2e.harness import SCRIPTS
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_login import add_profile
from tests.waiting import wait_until

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900), needs_sshd]
STEPS = 500
JOB = f"""\
name = "exact"
script = "train_exact.py"
args = ["--trail", "trail", "--steps", "{STEPS}", "--pace-s", "0.2"]
nproc = 2
[checkpoint]
every_steps = 20
[launch]
project = "project"
outputs = ["trail"]
secrets = ["HF_TOKEN"]
"""


@pytest.fixture
def laptop(cluster: Cluster, tmp_path: Path) -> Iterator[Laptop]:
    """Return a laptop without Slurm, and a login node that has it."""
    for make in make_boxes(tmp_path):
        made = make()
        add_profile(made, cluster)
        made.env |= {"HF_TOKEN": "hf_very'secret"}
        project = made.folder / "project"
        (project / "trail").mkdir(parents=True)
        script = (SCRIPTS / "train_exact.py").read_text()
        told = script.replace(
            "        row = {", '        print("step", step, flush=True)\n        row = {'
        )
        (project / "train_exact.py").write_text(told)
        (made.folder / "job.toml").write_text(JOB)
        yield made
        cluster.end_jobs()


def test_a_job_is_launched_steered_and_brought_home_over_ssh_alone(
    cluster: Cluster, laptop: Laptop
) -> None:
    told = laptop.ask("launch", "job.toml", "--on", "cluster")
    job = told["id"]
    assert "is Slurm job" in laptop.cli("launch", "job.toml", "--on", "cluster", code=4).stderr
    attached = laptop.start("attach", "exact")
    laptop.wait_step("exact", 15)
    wait_until(laptop.box.cut, "a connection to cut")
    assert laptop.ask("status", "exact")["state"] == "running"
    laptop.cli("checkpoint", "exact")  # On its bus, in the allocation.
    told = laptop.ask("set", "exact", "detect.hang_floor_s=1.5")
    assert (told["changes"], told["ranks"]) == ({"detect.hang_floor_s": 1.5}, [0, 1]), told
    wrong = laptop.cli("set", "exact", "nothing=1", "--json", code=2)
    assert json.loads(wrong.stdout)["error"] == "unknown key `nothing`", wrong
    assert wrong.stderr == "", "no word of srun's own"
    assert "step 3\n" in laptop.cli("logs", "exact", "--rank", "1").stdout

    # Warned as before a walltime, it is put back, and goes on from its checkpoint.
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", "a job put back")
    cluster.wait(lambda: cluster.job(job)["JobState"] == "PENDING", "a job in the queue")
    assert "gpu-box: waiting" in laptop.cli("status", "exact").stderr
    cluster.start_now(job)
    out, err = attached.communicate(timeout=400)
    assert attached.returncode == 0, err
    steps = [int(line.split()[-1]) for line in out.splitlines() if line.startswith("[rank 0] step")]
    assert steps == list(range(STEPS))  # Through a cut connection and two runs, each line once.
    laptop.cli("pull", "exact", "pulled")
    assert laptop.ask("verify", "pulled")["ok"]
    laptop.cli("teardown", "exact", "--confirm", "exact")
    secret = laptop.box.home / ".perdure-credentials-exact"
    assert not secret.exists()
    runs = (laptop.folder / "pulled" / "launch" / "runs.jsonl").read_text().splitlines()
    assert [(json.loads(run)["state"], json.loads(run)["restart"]) for run in runs] == [
        ("stopped", 0), ("done", 1),
    ]  # fmt: skip
    laptop.train_reference(STEPS)
    (laptop.folder / "killed").symlink_to(laptop.folder / "pulled" / "outputs" / "trail")
    check_equal(laptop.folder, STEPS, 2)


def test_a_job_is_stopped_goes_on_and_is_killed_over_ssh_alone(
    cluster: Cluster, laptop: Laptop
) -> None:
    first = laptop.ask("launch", "job.toml", "--on", "cluster")["id"]
    laptop.wait_step("exact", 5)
    stopped = laptop.ask("stop", "exact")
    cluster.wait(lambda: cluster.job(first)["JobState"] == "COMPLETED", "the end of a stopped job")
    assert "stopped by" in laptop.cli("status", "exact").stdout
    refused = laptop.cli("teardown", "exact", "--confirm", "exact", code=4).stderr
    assert "nothing was pulled" in refused

    second = laptop.ask("launch", "job.toml", "--on", "cluster")["id"]
    assert second != first
    laptop.wait_step("exact", stopped["step"] + 5)  # On from its checkpoint.
    refused = laptop.cli("teardown", "exact", "--confirm", "exact", code=4).stderr
    assert "the job is running" in refused, refused
    laptop.cli("stop", "exact", "--now")
    cluster.wait(lambda: cluster.job(second)["JobState"] == "FAILED", "the end of a killed job")
    state = laptop.box.home / "perdure" / "exact" / "launch" / "runs.jsonl"
    states = [json.loads(line)["state"] for line in state.read_text().splitlines()]
    assert states[0] == "stopped"
    assert (len(states), states[1] != "done") == (2, True), states
    trail = laptop.box.home / "perdure" / "exact" / "project" / "trail" / "rank-0.jsonl"
    steps = [json.loads(line)["step"] for line in trail.read_text().splitlines()]
    assert steps == list(range(len(steps))), "no step was made twice"
