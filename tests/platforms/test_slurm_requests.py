"""What a profile asks of a real Slurm: arrays, devices, dependencies; the commands beside them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.slurm_cluster import Cluster
from tests.platforms.slurm_site import Site

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]

# Each task says which device is its own, and waits until both have.
TASK = """\
import os, pathlib, time
task, trail = os.environ["SLURM_ARRAY_TASK_ID"], pathlib.Path({trail!r})
(trail / f"tmp-{{task}}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
(trail / f"tmp-{{task}}").rename(trail / task)
deadline = time.monotonic() + 120
while not all((trail / other).exists() for other in "01"):
    assert time.monotonic() < deadline
    time.sleep(0.1)
print("task", task, "is done")
"""


@pytest.mark.parametrize("accounting", [False, True])
def test_tasks_of_an_array_are_jobs_of_their_own(
    cluster: Cluster, place: Path, accounting: bool
) -> None:
    script = place / "task.py"
    script.write_text(TASK.format(trail=str(place / "trail")))
    extra = [f"--nodelist={cluster.nodes[0]}"]
    site = Site(cluster, place, array="0-1", mem="800M", gres="gpu:a100:1", extra=extra)
    job = site.launch(script, name="sweep", nproc=1)
    assert site.perdure("attach", "sweep-1").returncode == 0
    cluster.wait(lambda: site.find_end("sweep").over, "end of the array", 120)
    devices = {path.name: path.read_text() for path in (place / "trail").iterdir()}
    assert set(devices) == {"0", "1"}
    assert sorted(devices.values()) == ["0", "1"]  # Both on one node, each with its own.
    assert "task 1 is done" in site.perdure("logs", "sweep-1").stdout
    assert json.loads(site.perdure("status", "sweep-0", "--json").stdout)["state"] == "done"
    assert "all 2 tasks are done" in site.perdure("status", "sweep").stderr
    refused = site.perdure("logs", "sweep")
    assert (refused.returncode, "perdure logs sweep-0" in refused.stderr) == (2, True)
    assert site.perdure("pull", "sweep", "pulled").returncode == 0
    assert (place / "pulled" / "tasks" / "1" / "journal.jsonl").exists()
    assert cluster.job(job)["ExitCode"] == "0:0"


def test_a_job_waits_for_another_and_is_cancelled_where_that_failed(
    cluster: Cluster, place: Path
) -> None:
    script = place / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.1)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    site = Site(cluster, place, mem="800M")
    go = str(place / "go")
    fields = {"nproc": 1, "restart": {"max_restarts": 0}}
    jobs = {}
    for name, code in (("good", "0"), ("bad", "3")):
        jobs[name] = site.launch(script, go, code, name=name, **fields)
    for name, before in (("after-good", "good"), ("after-bad", "bad")):
        site.settings["dependency"] = f"afterok:{jobs[before]}"
        jobs[name] = site.launch(script, go, "0", name=name, **fields)
    assert site.find_end("after-good").state == "waiting"
    early = site.perdure("logs", "after-good")
    assert (early.returncode, "has written nothing yet" in early.stderr) == (3, True)
    Path(go).touch()
    site.wait_state(jobs["after-good"], "COMPLETED")
    site.wait_state(jobs["after-bad"], "CANCELLED")
    assert site.find_end("bad").code == 3
    assert site.find_end("after-bad").reason.startswith("cancelled")


def test_a_job_that_waits_is_taken_out_of_the_queue(cluster: Cluster, place: Path) -> None:
    script = place / "train.py"
    script.write_text("")
    site = Site(cluster, place, mem="800M", extra=["--begin=now+1hour"])
    job = site.launch(script, name="later", nproc=1)
    assert site.find_end("later").state == "waiting"
    again = site.perdure("launch", "job.json", "--on", "site.toml")
    assert (again.returncode, f"Slurm job {job} already" in again.stderr) == (4, True)
    assert site.perdure("stop", "later").returncode == 0
    site.wait_state(job, "CANCELLED")
    assert site.find_end("later").over


@pytest.mark.parametrize("accounting", [True])
def test_what_slurm_refuses_or_never_starts_is_told_with_the_reason(
    cluster: Cluster, place: Path, accounting: bool
) -> None:
    for words in (
        ("qos", "small", "set", "MaxTRESPerJob=cpu=2", "flags=DenyOnLimit"),
        ("account", "broke"),
        ("user", "root", "account=broke", "GrpTRES=cpu=1"),
    ):
        cluster.call("sacctmgr", "-i", "add", *words)
    cluster.call("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=small")
    cluster.call("scontrol", "create", "partition=tiny", f"Nodes={cluster.nodes[0]}", "MaxTime=8")
    script = place / "train.py"
    script.write_text("")
    site = Site(cluster, place, mem="800M")
    common = dict(site.settings)
    for settings, text, hint in (
        ({"account": "nope"}, "Invalid account", "your accounts: broke, root"),
        ({"partition": "nope"}, "invalid partition specified: nope", "partitions: gpu, urgent"),
        ({"qos": "nope"}, "Invalid qos", "your QOS: normal, small"),
        ({"qos": "small", "cpus_per_task": 4}, "QOSMaxCpuPerJobLimit: its QOS gives no job so much",
         "slurm.qos"),
    ):  # fmt: skip
        site.settings = common | settings
        site.write(script, name="job", nproc=1)
        done = site.perdure("launch", "job.json", "--on", "site.toml", "--json")
        told = json.loads(done.stdout.splitlines()[-1])
        assert (done.returncode, told.get("exit_code")) == (4, 4), (settings, done.stderr)
        assert text in told["error"]
        assert hint in told["hint"]
    assert not (place / "durable").exists(), "nothing was sent"
    site.settings = common | {"partition": "tiny"}
    site.write(script, name="job", nproc=1)
    dry = site.perdure("launch", "job.json", "--on", "site.toml", "--dry-run")
    assert (dry.returncode, "partition tiny gives a job 00:08:00 at most" in dry.stderr) == (
        0,
        True,
    )

    site.settings = common | {"account": "broke"}
    job = site.launch(script, nproc=2)
    try:
        cluster.wait(lambda: cluster.job(job)["Reason"] == "AssocGrpCpuLimit", "a reason")
        told = json.loads(site.perdure("status", "job", "--json").stdout)
        assert (told["state"], "its account have as much" in told["reason"]) == ("waiting", True)
        with subprocess.Popen(
            [sys.executable, "-m", "perdure", "attach", "job"],
            env=site.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as attached:  # fmt: skip
            assert attached.stderr is not None
            assert "site: waiting: AssocGrpCpuLimit: all jobs in its" in attached.stderr.readline()
            attached.terminate()
    finally:
        assert site.perdure("stop", "job").returncode == 0
        cluster.call("sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal")
        cluster.call("scontrol", "delete", "partition=tiny")


QUEUE = """\
[defaults]
on = "site.toml"
backoff_s = 1
[[item]]
name = "first"
job = "job.json"
set = { "env.OUT" = "first" }
[[item]]
name = "second"
job = "job.json"
after = ["first"]
set = { "env.OUT" = "second" }
[[item]]
name = "here"
command = ["touch", "here"]
after = ["second"]
"""


def test_a_queue_waits_for_jobs_on_slurm(cluster: Cluster, place: Path) -> None:
    # The first attempt at the first item fails there; the queue launches it again.
    script = place / "train.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        f"mark = pathlib.Path({str(place)!r}) / ('ran-' + os.environ['OUT'])\n"
        "if not mark.exists():\n    mark.touch()\n    sys.exit(os.environ['OUT'] == 'first')\n"
    )
    site = Site(cluster, place, mem="800M")
    site.write(script, name="unused", nproc=1, env={"OUT": "x"}, restart={"max_restarts": 0})
    (place / "queue.toml").write_text(QUEUE)
    assert site.perdure("queue", "add", "queue.toml").returncode == 0
    done = site.perdure("queue", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(site.perdure("queue", "ls", "--json").stdout)["items"]
    assert {row["name"]: (row["state"], row["attempts"]) for row in rows} == {
        "first": ("done", 2), "second": ("done", 1), "here": ("done", 1),
    }  # fmt: skip
    assert (place / "here").exists()
    assert site.find_end("second").state == "ended"
