"""A job on two nodes of a real Slurm: put back, nodes lost, and nodes that come and go."""

import json
import time
from pathlib import Path

import pytest

from perdure.launch.slurm.client import Slurm
from tests.e2e.harness import SCRIPTS
from tests.e2e.test_elastic_nodes import read
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import EXACT, Site, make_words

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
STEPS = 160


@pytest.mark.parametrize("accounting", [True])
def test_two_nodes_are_put_back_and_lost_and_go_on(
    cluster: Cluster, place: Path, accounting: bool
) -> None:
    first, second = cluster.nodes
    site = Site(cluster, place)
    job = site.launch(EXACT, *make_words(place, STEPS, 0.2), nproc=1, nodes=2)
    site.wait_step(25)
    # TERM reaches all steps: their ranks stay until all have saved at one step.
    cluster.call("scontrol", "requeue", job)
    site.wait_back(job, 1)
    (run,) = site.runs()
    assert (run["state"], run["ended_by"]) == ("stopped", "TERM"), run
    assert run["checkpoint"] == site.find_step() + 1

    site.wait_step(run["checkpoint"] + 20)
    # The second time it is the node of the batch script and of `perdure run`.
    for restarts, node in ((2, second), (3, first)):
        cluster.lose_node(node)
        try:
            cluster.wait(
                lambda restarts=restarts: cluster.job(job)["Restarts"] == str(restarts),
                "a job put back", 120,
            )  # fmt: skip
        finally:
            cluster.start_node(node)
        site.wait_back(job, restarts)
        site.wait_step(run["checkpoint"] + 20 * restarts)
    site.wait_state(job, "COMPLETED", 300)
    found = [end.state for end in Slurm().list_attempts(job)]
    assert found == ["put back", "node failed", "node failed", "done"]
    site.check_equal(STEPS)


def test_a_second_job_s_node_joins_a_running_one_and_leaves(cluster: Cluster, place: Path) -> None:
    site, trail = Site(cluster, place, mem="1G"), place / "trail"
    words = ["--trail", str(trail), "--steps", "100000"]
    job = site.launch(SCRIPTS / "elastic.py", *words, nproc=1, nodes=2, remote=1)
    cluster.wait(lambda: cluster.job(job)["JobState"] == "RUNNING", "a job that runs")
    assert cluster.job(job)["NumNodes"] == "1", "the other one comes from elsewhere"
    # As docs/slurm.md has it; it waits for the job by itself.
    command = ["sbatch", "--parsable", "-o", str(place / "join.out")]
    script = place / "durable" / "launched" / "job" / "join.sbatch"
    second = cluster.call(*command, str(script)).strip()
    cluster.wait(lambda: len(read(trail, 0)) >= 10, "training on both", 120)
    assert read(trail, 0)[-1]["world"] == [0, 1]

    # Slurm ends the second one: the node is left at a step that all agree on.
    cluster.call("scancel", "--batch", "--signal=USR1", second)
    cluster.wait(lambda: read(trail, 0)[-1]["world"] == [0], "a world without it", 60)
    cluster.wait(lambda: cluster.job(second)["JobState"] == "COMPLETED", "its end")
    third = cluster.call(*command, str(script)).strip()
    cluster.wait(lambda: len(read(trail, 0)[-1]["world"]) == 2, "another one that has joined", 120)
    assert site.perdure("stop", "job").returncode == 0
    for each in (job, third):
        site.wait_state(each, "COMPLETED")
    steps = [row["step"] for row in read(trail, 0)]
    assert steps == list(range(len(steps))), "a step was lost or made twice"


def test_a_preemption_of_two_nodes_is_heard_of_early_and_the_job_comes_back(
    cluster: Cluster, place: Path
) -> None:
    site = Site(cluster, place)
    job = site.launch(EXACT, *make_words(place, STEPS, 0.2), nproc=1, nodes=2)
    site.wait_step(10)
    nodes = ",".join(cluster.nodes)
    cluster.call("scontrol", "update", "partitionname=gpu", "GraceTime=15")
    try:
        cluster.call(
            "sbatch", "-p", "urgent", "-w", nodes, "-N", "2", "--exclusive", "-o", "/dev/null",
            "--wrap", "true",
        )  # fmt: skip
        cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", "a job put back", 120)
    finally:
        cluster.call("scontrol", "update", "partitionname=gpu", "GraceTime=3")
    site.wait_back(job, 1)
    site.wait_state(job, "COMPLETED", 300)
    # Who leaves within the grace counts as done, and would not come back.
    first, second = site.runs()
    assert (first["state"], first["ended_by"], second["state"]) == ("stopped", "TERM", "done")
    (output,) = (place / "project").glob("slurm-job-*.out")
    said = output.read_text()
    notice, end = said.index("is about to end the job"), said.index("stops at an agreed step")
    assert notice < end, said
    lines = (place / "trail" / "rank-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS))


def put_back(cluster: Cluster, job: str) -> None:
    """Warn a job as before its walltime, and wait until it is in the queue."""
    before = int(cluster.job(job)["Restarts"])
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    cluster.wait(
        lambda: (now := cluster.job(job))["Restarts"] == str(before + 1)
        and now["JobState"] == "PENDING",
        f"{job} put back", 120,
    )  # fmt: skip


def test_an_elastic_job_runs_on_as_many_nodes_as_slurm_has(cluster: Cluster, place: Path) -> None:
    _, second = cluster.nodes
    busy = ["sbatch", "--parsable", "--exclusive", "-w", second, "-o", "/dev/null"]
    other = cluster.call(*busy, "--wrap", "exec sleep 600").strip()
    cluster.wait(lambda: cluster.job(other)["JobState"] == "RUNNING", "a busy node")
    site, trail = Site(cluster, place, mem="1G"), place / "trail"
    words = ["--trail", str(trail), "--steps", "100000", "--pace-s", "0.1"]
    job = site.launch(SCRIPTS / "elastic.py", *words, nproc=1, nodes=1, nodes_max=2)
    cluster.wait(lambda: len(read(trail, 0)) >= 10, "training on one", 120)
    assert cluster.job(job)["NumNodes"] == "1"
    assert read(trail, 0)[-1]["world"] == [0]
    cluster.call("scancel", other)
    put_back(cluster, job)
    made = len(read(trail, 0))
    cluster.start_now(job)
    cluster.wait(lambda: len(read(trail, 0)) >= made + 10, "training on both", 120)
    assert cluster.job(job)["NumNodes"] == "2"
    assert read(trail, 0)[-1]["world"] == [0, 1]
    assert site.perdure("stop", "job").returncode == 0
    site.wait_state(job, "COMPLETED")
    assert [(run["nodes"], run["fixed"]) for run in site.runs()] == [(1, False), (2, False)]
    steps = [row["step"] for row in read(trail, 0)]
    assert steps == list(range(len(steps))), "a step was lost or made twice"


def test_a_job_that_is_not_elastic_goes_on_with_as_many_nodes_as_it_had(
    cluster: Cluster, place: Path
) -> None:
    _, second = cluster.nodes
    site = Site(cluster, place)
    job = site.launch(EXACT, *make_words(place, STEPS, 0.2), nproc=1, nodes=1, nodes_max=2)
    site.wait_step(25)
    assert cluster.job(job)["NumNodes"] == "2"
    put_back(cluster, job)
    cluster.call("scontrol", "update", f"nodename={second}", "state=drain", "reason=test")
    try:
        cluster.start_now(job)
        time.sleep(6.0)  # Three of the scheduler's looks: one node is idle, and is not enough.
        assert cluster.job(job)["JobState"] == "PENDING"
        # Whoever puts it back otherwise says nothing of nodes: it finds out by itself.
        cluster.call("scontrol", "update", f"jobid={job}", "NumNodes=1-2", "StartTime=now")
        cluster.wait(lambda: cluster.job(job)["Restarts"] == "2", "a job put back", 60)
    finally:
        cluster.call("scontrol", "update", f"nodename={second}", "state=resume")
    site.wait_back(job, 2)
    site.wait_state(job, "COMPLETED", 300)
    assert [(run["nodes"], run["fixed"]) for run in site.runs()] == [(2, True), (2, True)]
    (output,) = (place / "project").glob("slurm-job-*.out")
    assert "waits for 2 nodes, and Slurm gave 1" in output.read_text()
    site.check_equal(STEPS)
