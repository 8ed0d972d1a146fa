"""Jobs on a real Kubernetes: pods deleted, evicted, killed for memory; losses bitwise."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.platforms.k8s.cluster import NODE, Kubernetes
from tests.platforms.k8s.tenant import EXACT, Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]
Make = Callable[..., Tenant]
# The exact script with a hole: what the file `hurt` says is done to the pod by one of its ranks.
HURT = """\
import os, pathlib, runpy, threading, time

def hurt():
    while True:
        time.sleep(0.05)
        try:
            os.rename("hurt", "hurting")
        except OSError:
            continue
        what = pathlib.Path("hurting").read_text()
        if what == "fill":
            with open("/root/fill", "wb") as file:
                for _ in range(200):
                    file.write(os.urandom(1 << 20))
            continue
        kept = []
        while True:
            kept.append(bytearray(b"x") * (32 << 20))

threading.Thread(target=hurt, daemon=True).start()
runpy.run_path("train_exact.py", run_name="__main__")
"""


@pytest.fixture
def make(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a tenant with an exact job; afterwards no pod is left."""

    def build(steps: int, pace_s: float, job: dict[str, Any] | None = None,
              **section: Any) -> Tenant:  # fmt: skip
        tenant = Tenant(kubernetes, tmp_path, **section)
        (tenant.project / "train_exact.py").write_text(EXACT.read_text())
        (tmp_path / "hurt.py").write_text(HURT)
        tenant.write_exact(steps, pace_s, script=tmp_path / "hurt.py", **(job or {}))
        return tenant

    yield build
    kubernetes.clear()


def hurt(tenant: Tenant, how: str) -> None:
    path = tenant.trail().parent / "hurt"
    path.with_name("hurt.new").write_text(how)
    path.with_name("hurt.new").rename(path)


def wait_other(tenant: Tenant, before: str) -> str:
    """Wait until another pod runs; return its name."""
    tenant.cluster.wait(lambda: tenant.find_running() != before, "another pod", 120)
    return tenant.find_running()


def test_a_deleted_pod_and_a_drained_one_save_and_come_back(make: Make) -> None:
    tenant = make(120, 0.2)
    tenant.launch()
    tenant.wait_step(10)
    first = tenant.find_running()
    tenant.cluster.kubectl("delete", "pod", first, "--wait=false")
    second = wait_other(tenant, first)
    reached = tenant.find_step()
    tenant.wait_step(reached + 10)
    told = tenant.cli("status", "job")
    assert "running, step" in told.stdout
    assert f"in pod {second}" in told.stderr
    assert f"pod {first}: told to go" in told.stderr  # Its object is gone; its events are not.
    tenant.cluster.evict(second)
    wait_other(tenant, second)
    tenant.cli("attach", "job", timeout_s=250)
    tenant.wait_end()
    tenant.check_equal(120)
    trail = (tenant.trail() / "rank-0.jsonl").read_text().splitlines()
    assert len(trail) <= 122, "a pod that is told to go saves at the step that it has reached"


def test_a_rank_and_a_pod_that_are_killed_for_memory_are_told_so(make: Make) -> None:
    tenant = make(100, 0.2, memory="2Gi")
    tenant.launch()
    tenant.wait_step(25)
    pod = tenant.find_running()
    hurt(tenant, "eat")
    jobs = tenant.durable / "state" / "jobs" / "job"
    tenant.cluster.wait(lambda: '"restarts":1' in (jobs / "state.json").read_text(), "a restart")
    assert tenant.find_running() == pod  # The rank alone was killed, and stands again in its pod.
    assert "OOM kill" in tenant.cli("diagnose", "job").stdout
    tenant.wait_step(45)
    hurt(tenant, "eat")
    tenant.cluster.wait(lambda: '"restarts":2' in (jobs / "state.json").read_text(), "a restart")
    for process in find_inside(tenant):  # As cgroups of version 2 do: all of the container goes.
        process.send_signal(signal.SIGKILL)
    wait_other(tenant, pod)
    told = tenant.cli("status", "job").stderr
    assert f"pod {pod}: out of memory [U9]: OOMKilled" in told
    tenant.wait_end()
    tenant.check_equal(100)


def test_a_pod_whose_disk_is_full_is_evicted_and_another_resumes(make: Make) -> None:
    tenant = make(250, 0.2, ephemeral_storage="100Mi")
    tenant.launch()
    tenant.wait_step(25)
    pod = tenant.find_running()
    hurt(tenant, "fill")
    wait_other(tenant, pod)
    told = tenant.cli("diagnose", "job").stderr
    assert f"pod {pod}: evicted [K8S5]: Evicted" in told
    tenant.wait_end(timeout_s=240)
    tenant.check_equal(250)


def test_all_processes_of_a_pod_killed_at_once_cost_what_is_since_the_checkpoint(
    make: Make,
) -> None:
    tenant = make(80, 0.2)
    tenant.launch()
    tenant.wait_step(45)
    pod = tenant.find_running()
    inside = find_inside(tenant)
    assert len(inside) >= 5
    for process in inside:
        process.send_signal(signal.SIGKILL)
    wait_other(tenant, pod)
    tenant.wait_end()
    assert "signal 9" in tenant.cli("status", "job").stderr
    tenant.check_equal(80)


def find_inside(tenant: Tenant) -> list[psutil.Process]:
    """Return the processes of the job's container."""
    return [process for process in psutil.process_iter() if is_inside(process, tenant)]


def is_inside(process: psutil.Process, tenant: Tenant) -> bool:
    """Return whether a process has a pod's environment, and the volume of the tenant."""
    try:
        found = process.environ().get("PERDURE_POD_NAME", "")
        return found != "" and os.stat(f"/proc/{process.pid}/root/checkpoints").st_ino == (
            tenant.durable.stat().st_ino
        )
    except (psutil.Error, OSError):
        return False


@pytest.mark.parametrize("victim", ["first", "other"])
def test_of_two_nodes_each_pod_may_go(make: Make, victim: str) -> None:
    fields = {"nodes": 2, "nproc": 1, "checkpoint": {"every_steps": 10}}
    tenant = make(100, 0.2, fields, access_mode="ReadWriteMany")
    tenant.launch()
    tenant.wait_step(25)
    pods = {p["metadata"]["labels"]["job-name"]: p["metadata"]["name"] for p in tenant.find_pods()}
    pod = pods["job" if victim == "first" else "job-nodes"]
    tenant.cluster.kubectl("delete", "pod", pod, "--wait=false")
    tenant.wait_end(timeout_s=300)
    tenant.check_equal(100)
    tenant.cluster.wait(
        lambda: all(p["status"]["phase"] == "Succeeded" for p in tenant.find_pods()
                    if p["metadata"]["name"] != pod), "end of all pods",
    )  # fmt: skip


def test_a_job_that_is_scaled_to_nothing_waits_and_goes_on(make: Make) -> None:
    tenant = make(60, 0.2)
    tenant.launch()
    tenant.wait_step(10)
    scale(tenant, 0)
    tenant.cluster.wait(lambda: not tenant.find_pods(), "no pod")
    reached = tenant.find_step()
    told = tenant.cli("status", "job", code=3).stderr
    assert "scaled down" in told
    time.sleep(2)
    assert tenant.find_step() == reached
    scale(tenant, 1)
    tenant.wait_end()
    tenant.check_equal(60)


def scale(tenant: Tenant, pods: int) -> None:
    patch = f'{{"spec":{{"parallelism":{pods}}}}}'
    tenant.cluster.kubectl("patch", "job", "job", "-p", patch)


def test_a_deleted_job_and_one_that_cannot_start_are_told_apart(make: Make) -> None:
    tenant = make(500, 0.2, start_deadline_s=1)
    tenant.launch()
    tenant.wait_step(3)
    tenant.cluster.kubectl("delete", "job", "job", "--cascade=background")
    assert "the Job was deleted" in tenant.cli("attach", "job", code=3).stderr
    document = (tenant.folder / "job.json").read_text()
    (tenant.folder / "job.json").write_text(
        document.replace('"outputs"', '"gpus": 1, "outputs"')
    )  # fmt: skip
    told = tenant.cli("launch", "job.json", "--on", "cluster").stderr
    assert "[K8S1]: no node has 1 nvidia.com/gpu" in told
    tenant.cluster.wait(
        lambda: "[K8S1]" in tenant.cli("attach", "job", code=3).stderr, "a pod that waits for a GPU"
    )
    tenant.cluster.add_gpus(1)  # With nothing behind it: the pod finds that out before it trains.
    tenant.cluster.wait(
        lambda: any("75" in str(p["status"]) for p in tenant.find_pods()), "a pod without its GPU"
    )


def test_a_node_that_is_lost_is_told(make: Make) -> None:
    tenant = make(100, 0.2)
    tenant.launch()
    tenant.wait_step(10)
    tenant.cluster.tell("stop kubelet")
    try:
        tenant.cluster.wait(
            lambda: "not ready" in tenant.cli("status", "job", code=None).stderr, "a lost node", 120
        )
    finally:
        tenant.cluster.tell("start kubelet")
    tenant.cluster.wait(lambda: tenant.cluster.get("node", NODE), "the node")
    tenant.wait_end(timeout_s=240)
    tenant.check_equal(100)


def test_a_node_that_is_marked_for_removal_has_its_jobs_save(make: Make) -> None:
    tenant = make(150, 0.2, {"checkpoint": {"every_steps": 1000}}, service_account="perdure")
    cluster = tenant.cluster
    cluster.kubectl("create", "serviceaccount", "perdure")
    cluster.kubectl("create", "clusterrole", "perdure", "--verb=get", "--resource=nodes")
    cluster.kubectl("create", "clusterrolebinding", "perdure", "--clusterrole=perdure",
                    "--serviceaccount=default:perdure")  # fmt: skip
    tenant.launch()
    tenant.wait_step(10)
    jobs = tenant.durable / "state" / "jobs" / "job"
    assert not list((jobs / "checkpoints").glob("step-*"))
    taint = "ToBeDeletedByClusterAutoscaler"
    cluster.kubectl("taint", "node", NODE, f"{taint}=now:NoSchedule")
    try:
        cluster.wait(lambda: list((jobs / "checkpoints").glob("step-*")), "a checkpoint")
        told = tenant.cli("events", "job").stdout
        assert "PreemptionNoticed" in told
        assert "the autoscaler takes the node away" in told
    finally:
        cluster.kubectl("taint", "node", NODE, f"{taint}-")
    cluster.wait(
        lambda: "PreemptionWithdrawn" in tenant.cli("events", "job").stdout, "a withdrawal"
    )
    tenant.wait_end()
    tenant.check_equal(150)
