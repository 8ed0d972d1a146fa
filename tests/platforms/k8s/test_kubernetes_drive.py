"""A trace against a job on a real Kubernetes: a pod is really taken away, and let come again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
Make = Callable[..., Tenant]
TRACE = "0,add,a\n0,add,b\n8000,remove,b\n28000,add,b\n"
"""The second of two nodes is lost for 20 s."""
AWAY_S = 20.0


@pytest.fixture
def make(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a tenant with an elastic job; afterwards no pod is left."""

    def build(**fields: Any) -> Tenant:
        tenant = Tenant(kubernetes, tmp_path, access_mode="ReadWriteMany", memory="2Gi", grace_s=30)
        (tenant.project / "trail").mkdir()
        (tenant.project / "trail" / "here").touch()
        tenant.write_job(SCRIPTS / "elastic.py", "--trail", "trail", "--steps", "100000",
                         nproc=1, **fields)  # fmt: skip
        (tenant.folder / "trace.csv").write_text(TRACE)
        return tenant

    yield build
    kubernetes.clear()


def drive(tenant: Tenant, *words: str, code: int = 0) -> dict[str, Any]:
    """Return the answer of `perdure trace drive` as JSON."""
    done = tenant.cli("trace", "drive", "trace.csv", *words, "--duration", "180", "--json",
                      code=code, timeout_s=700)  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def list_worlds(tenant: Tenant, job: str) -> list[list[int]]:
    """Return the worlds of rank 0, one after another."""
    found: list[list[int]] = []
    for line in (tenant.trail(job) / "rank-0.jsonl").read_text().splitlines():
        if line.endswith("}") and (world := json.loads(line)["world"]) not in found[-1:]:
            found.append(world)
    return found


def test_a_pod_is_taken_away_and_none_comes_in_its_place_until_it_is_given_back(make: Make) -> None:
    tenant = make(nodes=2)
    dry = drive(tenant, "job.json", "--on", "cluster", "--dry-run")
    assert [bool(node["stays"]) for node in dry["nodes"]] == [True, False]
    assert not tenant.cluster.get("jobs")["items"], "a dry run creates nothing"

    told = drive(tenant, "job.json", "--on", "cluster")
    job = told["job"]
    assert (told["complete"], told["ended"], told["trouble"]) == (True, "", "")
    assert [(row["losses"], row["joins"]) for row in told["systems"]] == [(1, 1)]
    first, alone, *back = list_worlds(tenant, job)
    assert (first, alone, len(back[-1])) == ([0, 1], [0], 2)
    lines = tenant.cli("events", job, "--json").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    (lost,) = [e["t"] for e in events if e["kind"] == "NodeLost"]
    came = [e["t"] for e in events if e["kind"] == "NodeRegistered" and e["t"] > lost]
    assert min(came) - lost > AWAY_S - 10, "it was silent for some seconds before it was lost"
    jobs = tenant.cluster.get("jobs", "-l", f"perdure.dev/job={job}")["items"]
    assert {one["spec"]["parallelism"] for one in jobs} == {1}, "as many pods as before"


def test_a_job_that_runs_is_driven_with_notice_and_goes_on(make: Make) -> None:
    tenant = make(nodes=2)
    tenant.launch()
    tenant.cluster.wait(lambda: list_worlds(tenant, "job")[-1] == [0, 1], "training on both", 240)
    told = drive(tenant, "job", "--yes", "--notice", "5")
    assert told["trouble"] == ""
    worlds = list_worlds(tenant, "job")
    assert worlds[:2] == [[0, 1], [0]]
    tenant.cluster.wait(lambda: len(list_worlds(tenant, "job")[-1]) == 2, "both again", 120)
    lines = (tenant.trail("job") / "rank-0.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    assert steps == list(range(len(steps))), "a pod that was told left at an agreed step"
    tenant.cli("stop", "job")
