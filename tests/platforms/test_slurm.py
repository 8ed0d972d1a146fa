"""Jobs on a real Slurm: warned, preempted, killed for memory, on lost nodes; losses bitwise."""

import json
from pathlib import Path

import psutil
import pytest

from perdure.launch.slurm.client import Slurm
from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import EXACT, Site, make_words

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]


def test_a_job_is_carried_over_its_walltime_exactly(cluster: Cluster, place: Path) -> None:
    # Slurm's own clock fires the first warning, a minute or so after the start; a person the next.
    site = Site(cluster, place, time_limit="00:02:00", warn_s=30)
    job = site.launch(EXACT, *make_words(place, 400, 0.4))
    site.wait_back(job, 1, 200)
    first = site.runs()[0]
    assert (first["state"], first["warned"], first["code"]) == ("stopped", True, 0)
    assert first["checkpoint"] > 0
    site.wait_step(first["checkpoint"] + 5)
    told = json.loads(site.perdure("status", "job", "--json").stdout)  # By srun, into the job.
    assert (told["job"], told["state"]) == ("job", "running")
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    site.wait_back(job, 2)
    site.wait_state(job, "COMPLETED", 300)
    restarts = [run["restart"] for run in site.runs()]  # More where Slurm's clock fired again.
    assert restarts == list(range(len(restarts)))
    assert len(restarts) >= 3
    assert {run["job"] for run in site.runs()} == {job}
    assert site.find_end().state == "ended"
    site.check_equal(400)


def test_a_preempted_job_saves_and_comes_back_by_itself(cluster: Cluster, place: Path) -> None:
    on_first = f"--nodelist={cluster.nodes[0]}"
    site = Site(cluster, place, partition="gpu", extra=["--exclusive", on_first])
    job = site.launch(EXACT, *make_words(place, 300, 0.2))
    site.wait_step(10)
    urgent = cluster.call(
        "sbatch", "--parsable", "-p", "urgent", on_first, "--exclusive", "-o", "/dev/null",
        "--wrap", "sleep 1",
    ).strip()  # fmt: skip
    site.wait_state(urgent, "COMPLETED")
    (run,) = site.runs()
    assert (run["state"], run["ended_by"], run["warned"]) == ("stopped", "TERM", False)
    site.wait_back(job, 1)
    site.wait_state(job, "COMPLETED", 300)
    assert site.runs()[-1]["restart"] == 1
    site.check_equal(300)


@pytest.mark.parametrize("accounting", [False, True])
def test_a_rank_that_is_killed_for_memory_is_told_so(
    cluster: Cluster, place: Path, accounting: bool
) -> None:
    if not cluster.cgroups:
        pytest.skip("no memory cgroups of version 1")
    script = place / "hungry.py"
    script.write_text("kept = []\nwhile True:\n    kept.append(bytearray(64 << 20))\n")
    site = Site(cluster, place, mem="600M")
    job = site.launch(script, name="hungry", nproc=1, restart={"max_restarts": 0})
    cluster.wait(lambda: cluster.job(job)["JobState"] not in ("PENDING", "RUNNING"), "an end", 120)
    end = site.find_end("hungry")
    assert (end.state, "out of memory" in end.reason) == ("killed", True)
    home = str(place / "durable" / "state")
    told = site.perdure("diagnose", "hungry", home=home).stdout
    assert "OOM kill" in told


# The first life of the last rank takes what the step has, and the kernel kills it.
FED = """\
import os, time, perdure
run = perdure.init()
for step in run.steps(30):
    if step == 10 and run.rank == run.world_size - 1 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        kept = []
        while True:
            kept.append(bytearray(64 << 20))
    time.sleep(0.1)
"""


@pytest.mark.parametrize(("accounting", "nodes"), [(False, 1), (True, 2)])
def test_a_job_that_has_recovered_from_a_kill_for_memory_is_done(
    cluster: Cluster, place: Path, accounting: bool, nodes: int
) -> None:
    if not cluster.cgroups:
        pytest.skip("no memory cgroups of version 1")
    script = place / "fed.py"
    script.write_text(FED.format(mark=str(place / "fed")))
    site = Site(cluster, place, mem="600M")
    job = site.launch(script, name="fed", nproc=1, nodes=nodes)
    site.cluster.wait(lambda: Slurm().look(job)[0].over, "an end", 180)
    assert (place / "fed").exists()
    assert Slurm().look(job)[0].state == "out of memory"
    end = site.find_end("fed")
    assert (end.state, end.code) == ("ended", 0), end
    assert "although Slurm calls it OUT_OF_MEMORY" in end.reason
    assert site.perdure("attach", "fed").returncode == 0


def test_two_nodes_survive_the_death_of_an_agent(cluster: Cluster, place: Path) -> None:
    site = Site(cluster, place, gres="gpu:a100:1")
    job = site.launch(EXACT, *make_words(place, 100, 0.2), nproc=1, nodes=2)
    site.wait_step(10)
    steps = cluster.call("squeue", "-s", "-h", "-j", job, "-o", "%i %N").split()
    assert set(cluster.nodes) <= set(steps)
    home = str(place / "durable" / "state")
    agents = [
        process
        for process in psutil.process_iter()
        if process.cmdline()[1:] == ["-P", "-m", "perdure", "agent", "job", "1"]
        and process.environ().get("PERDURE_HOME") == home
    ]
    assert len(agents) == 1
    agents[0].kill()
    site.wait_state(job, "COMPLETED", 300)
    site.check_equal(100)


def test_a_job_on_a_node_that_failed_comes_back_on_another(cluster: Cluster, place: Path) -> None:
    first, second = cluster.nodes
    site = Site(cluster, place, extra=[f"--nodelist={second}"])
    job = site.launch(EXACT, *make_words(place, 150, 0.2))
    site.wait_step(25)
    cluster.lose_node(second)
    try:
        site.wait_back(job, 1)
        cluster.call("scontrol", "update", f"jobid={job}", f"ReqNodeList={first}")
        site.wait_state(job, "COMPLETED", 300)
        assert cluster.job(job)["NodeList"] == first
    finally:
        cluster.start_node(second)
    site.check_equal(150)


def test_what_is_cancelled_stays_so(cluster: Cluster, place: Path) -> None:
    site = Site(cluster, place)
    job = site.launch(EXACT, *make_words(place, 500, 0.2))
    site.wait_step(3)
    cluster.call("scancel", job)
    site.wait_state(job, "CANCELLED")
    end = site.find_end()
    assert (end.state, end.reason.split(":")[0]) == ("killed", "cancelled")
