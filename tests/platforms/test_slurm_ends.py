"""How jobs end on a real Slurm, told apart with its accounting and without; what follows of it."""

import json
from pathlib import Path

import pytest

from perdure.launch.slurm.client import Slurm
from perdure.model.platforms.slurm import Allocation
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import EXACT, Site, make_words

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]

EAT = "python3 -c 'kept = []\nwhile True: kept.append(bytearray(32 << 20))'"
ENDS = {
    "out of memory": ("--wrap", f"exec {EAT}"),
    "hidden": ("--wrap", f"srun {EAT}; echo the last command is fine"),
    "time limit": ("-p", "urgent", "-w", "{first}", "--time=1", "--wrap", "exec sleep 600"),
    "failed": ("--wrap", "exit 7"),
    "done": ("--wrap", "true"),
    "cancelled": ("--wrap", "exec sleep 600"),
    "preempted": ("-p", "gpu", "-w", "{first}", "-c", "3", "--wrap", "exec sleep 600"),
    "node failed": ("-w", "{second}", "--wrap", "exec sleep 600"),
}


def submit(cluster: Cluster, *words: str) -> str:
    first, second = cluster.nodes
    words = tuple(w.replace("{first}", first).replace("{second}", second) for w in words)
    command = ["sbatch", "--parsable", "--mem=100M", "-o", "/dev/null", *words]
    return cluster.call(*command).strip()


def wait_end(cluster: Cluster, job: str) -> str:
    cluster.wait(lambda: Slurm().look(job)[0].over, f"end of {job}", 180)
    return Slurm().look(job)[0].state


@pytest.mark.parametrize("accounting", [False, True])
def test_ends_of_attempts_are_told_apart(cluster: Cluster, place: Path, accounting: bool) -> None:
    second = cluster.nodes[1]
    jobs = {name: submit(cluster, "--no-requeue", *words) for name, words in ENDS.items()}
    back = submit(cluster, "--requeue", "-w", "{second}", "--wrap", "exec sleep 600")
    running = [jobs[name] for name in ("cancelled", "preempted", "node failed")]
    for job in (*running, back):
        cluster.wait(lambda job=job: cluster.job(job)["JobState"] == "RUNNING", f"{job} running")
    cluster.call("scancel", jobs["cancelled"])
    cluster.lose_node(second)
    try:
        urgent = submit(cluster, "-p", "urgent", "-w", "{first}", "-c", "3", "--wrap", "true")
        found = {name: wait_end(cluster, job) for name, job in jobs.items()}
        assert found == {name: name for name in ENDS} | {"hidden": "out of memory"}
        assert wait_end(cluster, urgent) == "done"
        cluster.wait(lambda: cluster.job(back)["Restarts"] == "1", "a job put back", 60)
        end = Slurm().query_end(Allocation(back))
        if accounting:
            assert (end.state, end.nodes) == ("node failed", second)
        else:
            assert (end.state, "accounting is off" in end.reason) == ("unknown", True)
        assert Slurm().look(back)[0].state == "waiting"
    finally:
        cluster.start_node(second)
    attempts = [end.state for end in Slurm().list_attempts(back)]
    assert attempts[:1] == (["node failed"] if accounting else [])


@pytest.mark.parametrize("accounting", [True])
def test_a_death_is_explained_by_slurm_s_own_word(
    cluster: Cluster, place: Path, accounting: bool
) -> None:
    second = cluster.nodes[1]
    site = Site(cluster, place, extra=[f"--nodelist={second}", "--no-requeue"])
    job = site.launch(EXACT, *make_words(place, 500, 0.2))
    site.wait_step(5)
    cluster.lose_node(second)
    try:
        site.wait_state(job, "NODE_FAIL")
    finally:
        cluster.start_node(second)
    told = json.loads(site.perdure("diagnose", "job", "--json").stdout)
    assert told["fate"]["state"] == "dead"
    assert (told["vanished"]["cause"], told["vanished"]["evidence"]["nodes"]) == (
        "node failed", second,
    )  # fmt: skip
    assert [attempt["state"] for attempt in told["slurm"]] == ["node failed"]
    status = site.perdure("status", "job")
    assert "site: killed: node failed: NODE_FAIL in" in status.stderr
    again = json.loads(site.perdure("launch", "job.json", "--on", "site.toml", "--json").stdout)
    assert again["id"] != job  # The same launch goes on from the checkpoint.
