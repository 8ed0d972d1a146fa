"""A trace against a job on Slurm: a node's own Slurm job is really killed, and submitted again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box import Laptop, needs_sshd
from tests.e2e.harness import SCRIPTS
from tests.e2e.test_elastic_nodes import read
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import Site
from tests.platforms.test_slurm_login import laptop

__all__ = ["laptop"]

pytestmark = [pytest.mark.serial, pytest.mark.timeout(590)]
TRACE = "0,add,a\n0,add,b\n6000,remove,b\n12000,add,b\n"
"""The second of two nodes is lost, and comes back."""
LENGTH_S = "120"


def list_worlds(trail: Path) -> list[list[int]]:
    """Return the worlds of rank 0, one after another."""
    found: list[list[int]] = []
    for row in read(trail, 0):
        if row["world"] not in found[-1:]:
            found.append(row["world"])
    return found


def list_jobs(cluster: Cluster) -> dict[str, list[str]]:
    """Return the ids of all Slurm jobs by their names."""
    found: dict[str, list[str]] = {}
    for line in cluster.call("squeue", "-h", "-t", "all", "-o", "%j %i").splitlines():
        name, job = line.split()
        found.setdefault(name, []).append(job)
    return found


def test_a_node_s_own_slurm_job_is_killed_and_submitted_again(
    cluster: Cluster, place: Path
) -> None:
    site, trail = Site(cluster, place, mem="1G"), place / "trail"
    words = ["--trail", str(trail), "--steps", "100000", "--pace-s", "0.1"]
    site.write(SCRIPTS / "elastic.py", *words, name="job", nproc=1, nodes=2)
    (place / "trace.csv").write_text(TRACE)
    drive = [sys.executable, "-m", "perdure", "trace", "drive", "trace.csv", "job.json", "--on",
             "site.toml", "--duration", LENGTH_S, "--notice", "3", "--json"]  # fmt: skip

    def ask(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [*drive, *words], env=site.env, cwd=place, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return {"said": done.stderr, **json.loads(done.stdout.splitlines()[-1])}

    dry = ask("--dry-run")
    assert [(n["number"], bool(n["stays"])) for n in dry["nodes"]] == [(0, True), (1, False)]
    assert [act[:3] for act in dry["acts"]] == [
        [3.0, "notice", [1]], [6.0, "leave", [1]], [12.0, "come", [1]],
    ]  # fmt: skip
    assert not (place / "durable").exists(), "a dry run sends nothing"
    assert list_jobs(cluster) == {}

    told = ask()
    assert (told["complete"], told["ended"], told["trouble"]) == (True, "", ""), told
    (row,) = told["systems"]
    assert (row["losses"], row["joins"]) == (1, 1)
    assert sum(row["ledger"].values()) == pytest.approx(1.0)
    assert "waited" in told["said"], "the time in the queue"
    first, alone, *back = list_worlds(trail)
    assert (first, alone, len(back[-1])) == ([0, 1], [0], 2)
    jobs = list_jobs(cluster)
    name = told["job"]
    assert (len(jobs[name]), len(jobs[f"{name}-node"])) == (1, 2)
    ends = {job: cluster.job(job)["JobState"] for job in (*jobs[name], *jobs[f"{name}-node"])}
    assert set(ends.values()) <= {"COMPLETED", "CANCELLED"}, ends
    home = place / "durable" / "state" / "jobs" / name / "journal.jsonl"
    events = [json.loads(line)["body"] for line in home.read_text().splitlines()]
    (notice,) = [body for body in events if body["type"] == "PreemptionNoticed"]
    assert (notice["node"], notice["source"]) == (1, "SIGUSR1")
    steps = [row["step"] for row in read(trail, 0)]
    assert steps == list(range(len(steps))), "left at an agreed step: none was lost"
    refused = site.perdure("trace", "drive", "trace.csv", name, "--json")
    assert (refused.returncode, "its allocation" in refused.stdout) == (2, True)


FROM_A_LAPTOP = """\
name = "el"
script = "elastic.py"
args = ["--trail", "trail", "--steps", "100000", "--pace-s", "0.1"]
nodes = 2
[launch]
project = "project"
"""


@needs_sshd
def test_a_drive_from_a_laptop_takes_a_node_over_the_login_node(
    cluster: Cluster, laptop: Laptop
) -> None:
    shutil.copy(SCRIPTS / "elastic.py", laptop.folder / "project")
    (laptop.folder / "job.toml").write_text(FROM_A_LAPTOP)
    profile = laptop.home / "profiles" / "cluster.toml"
    profile.write_text(profile.read_text().replace("1500M", "1G"))
    (laptop.folder / "trace.csv").write_text(TRACE[: TRACE.index("12000")])
    driving = laptop.start(
        "trace", "drive", "trace.csv", "job.toml", "--on", "cluster", "--duration", "20", "--json"
    )
    out, err = driving.communicate(timeout=400)
    assert driving.returncode == 0, out + err
    told = json.loads(out.splitlines()[-1])
    assert (told["complete"], told["ended"], told["trouble"]) == (True, "", ""), told
    assert [(row["losses"], row["joins"]) for row in told["systems"]] == [(1, 0)]
    (trail,) = (laptop.box.home / "perdure").glob("el-drive*/project/trail")
    assert list_worlds(trail) == [[0, 1], [0]]
    assert cluster.call("squeue", "-h").strip() == "", "nothing is left in the queue"
