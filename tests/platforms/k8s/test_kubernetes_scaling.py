"""Pods come to a job that trains, and go; the journal knows why each one is gone."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import SCRIPTS
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
Make = Callable[..., Tenant]
EAT = "kept = []\nwhile True:\n    kept.append(bytearray(b'x') * (64 << 20))"
CALM = {"node_doubt_s": 33.0}
"""Heartbeats are late on a machine on which everything runs at once."""


@pytest.fixture
def make(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a tenant with an elastic job; afterwards no pod is left."""

    def build(*args: str, script: str = "elastic.py", **fields: Any) -> Tenant:
        tenant = Tenant(kubernetes, tmp_path, access_mode="ReadWriteMany", memory="2Gi",
                        grace_s=30, service_account="perdure")  # fmt: skip
        (tenant.project / "trail").mkdir()
        (tenant.project / "trail" / "here").touch()
        job = {"nodes": 1, "nproc": 1, "detect": CALM, **fields}
        tenant.write_job(SCRIPTS / script, "--trail", "trail", *args, **job)
        let_read(kubernetes)
        return tenant

    yield build
    kubernetes.clear()


def let_read(cluster: Kubernetes) -> None:
    """Let the job's pods read nodes, pods and events, as docs/kubernetes.md has it."""
    account = "--serviceaccount=default:perdure"
    for words in (
        ("serviceaccount", "perdure"),
        ("clusterrole", "perdure", "--verb=get", "--resource=nodes"),
        ("clusterrolebinding", "perdure", "--clusterrole=perdure", account),
        ("role", "perdure", "--verb=get,list", "--resource=pods,events"),
        ("rolebinding", "perdure", "--role=perdure", account),
    ):
        made = cluster.kubectl("create", *words, "--dry-run=client", "-o", "yaml")
        cluster.kubectl("apply", "-f", "-", stdin=made)


def read_steps(tenant: Tenant) -> list[Any]:
    """Return what rank 0 wrote of each step."""
    path = tenant.trail() / "rank-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_world(tenant: Tenant, size: int) -> None:
    cluster = tenant.cluster
    cluster.wait(lambda: len(read_steps(tenant)[-1]["world"]) == size, f"world of {size}", 240)


def find_pod(tenant: Tenant, job: str) -> str:
    pods = [p for p in tenant.find_pods() if p["metadata"]["labels"]["job-name"] == job]
    return str(pods[-1]["metadata"]["name"])


def find_events(tenant: Tenant, kind: str) -> list[Any]:
    lines = tenant.cli("events", "job", "--json").stdout.splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def kill_for_memory(tenant: Tenant, pod: str) -> None:
    """Have the kernel kill in a pod, and end the rest of it, as cgroups of version 2 do."""
    with pytest.raises(AssertionError, match="137"):
        tenant.cluster.kubectl("exec", pod, "--", sys.executable, "-c", EAT, timeout_s=300)
    for process in psutil.process_iter():
        try:
            if process.environ().get("PERDURE_POD_NAME") == pod:
                process.send_signal(signal.SIGKILL)
        except (psutil.Error, OSError):
            continue


def test_an_elastic_job_is_given_pods_and_loses_them(make: Make) -> None:
    tenant = make("--steps", "100000", nodes_max=3)
    tenant.launch()
    tenant.wait_step(5)
    tenant.cluster.wait(lambda: tenant.cli("node", "scale", "job", "3"), "a job that trains")
    wait_world(tenant, 3)
    refused = tenant.cli("node", "scale", "job", "4", code=2).stderr
    assert "has room for 3 pods" in refused

    victim = find_pod(tenant, "job-node-2")
    kill_for_memory(tenant, victim)
    tenant.cluster.wait(lambda: find_events(tenant, "MachineReported"), "the server's word")
    wait_world(tenant, 3)
    told = f"pod {victim}: out of memory: OOMKilled"
    assert told in tenant.cli("diagnose", "job").stdout
    recoveries = json.loads(tenant.cli("report", "job", "--json").stdout)["recoveries"]
    assert [r for r in recoveries if told in r["cause"]], recoveries

    tenant.cluster.kubectl("delete", "pod", find_pod(tenant, "job-node-1"), "--wait=false")
    deleted = len(read_steps(tenant))
    going = find_pod(tenant, "job-node-2")
    tenant.cluster.wait(
        lambda: any(len(r["world"]) == 2 for r in read_steps(tenant)[deleted:]), "a pod less", 120
    )
    wait_world(tenant, 3)
    scaled = json.loads(tenant.cli("node", "scale", "job", "2", "--json").stdout)
    assert scaled["removed"] == ["job-node-2"]
    wait_world(tenant, 2)
    assert going not in {p["metadata"]["name"] for p in tenant.find_pods()}
    reasons: dict[int, tuple[str, str]] = {}
    for event in find_events(tenant, "PreemptionNoticed"):
        reasons.setdefault(event["node"], (event["source"], event["reason"]))
    by_hand = ("SIGTERM", "the agent got SIGTERM")
    assert sorted(reasons.values()) == [by_hand, ("perdure node scale", "from 3 to 2 pods")]

    steps = [row["step"] for row in read_steps(tenant)]
    assert steps == list(range(len(steps))), "a step was lost or made twice"
    tenant.cli("stop", "job")


def test_a_supervised_job_is_refused_more_pods(make: Make) -> None:
    tenant = make("--steps", "100", "--pace-s", "0.3", script="train_exact.py", nodes_max=2)
    tenant.launch()
    tenant.wait_step(5)
    refused = tenant.cli("node", "scale", "job", "2", code=4).stderr
    assert "job `job` is resumable: its world has the ranks that it began with" in refused
    tenant.cli("node", "scale", "job", "0")
    tenant.cluster.wait(lambda: not tenant.find_pods(), "no pod")
    reached = tenant.find_step()
    tenant.cli("node", "scale", "job", "1")
    tenant.wait_end(timeout_s=300)
    assert reached < 99
    tenant.check_equal(100, ranks=1)
