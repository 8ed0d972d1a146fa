"""A save of a script takes 80 % of a pod's grace on a real Kubernetes, and is complete."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.files.own import examine
from tests.e2e.box import read_json
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant
from tests.platforms.test_slurm_window import write_script

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
GRACE_S = 60
SAVE_S = 0.8 * GRACE_S


@pytest.fixture
def tenant(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Tenant]:
    yield Tenant(kubernetes, tmp_path, access_mode="ReadWriteMany", grace_s=GRACE_S)
    kubernetes.clear()


@pytest.mark.parametrize("how", ["deleted", "evicted", "second"])
def test_a_save_of_80_percent_of_the_grace_is_complete(tenant: Tenant, how: str) -> None:
    """If the pod of the second node is deleted, the ranks of both nodes have to save."""
    nodes = 2 if how == "second" else 1
    script = write_script(tenant.folder)
    shutil.copy(tenant.folder / "data", tenant.project)
    tenant.write_job(script, "out", "data", str(SAVE_S), nproc=1, nodes=nodes,
                     checkpoint={"own": ["out/*.pt"]})  # fmt: skip
    tenant.launch()
    place = tenant.trail().parent
    ready = [place / f"out-{rank}-ready" for rank in range(nodes)]
    tenant.cluster.wait(lambda: all(path.exists() for path in ready), "the handlers", 300)
    run = tenant.durable / "state" / "jobs" / "job"
    tenant.cluster.wait(lambda: read_json(run / "state.json").get("state") == "running", "training")
    pods = {p["metadata"]["labels"]["job-name"]: p["metadata"]["name"] for p in tenant.find_pods()}
    if how == "evicted":
        tenant.cluster.evict(pods["job"])
    else:
        pod = pods["job-nodes" if how == "second" else "job"]
        tenant.cluster.kubectl("delete", "pod", pod, "--wait=false")
    tenant.wait_end(timeout_s=400)
    if nodes == 1:  # The next pod's job is another run.
        run = run / "previous" / "1"
    told = tenant.cli("report", str(run), "--json").stdout
    for rank in range(nodes):
        saved = examine(str(place / "out" / f"step-1-rank{rank}.pt"))
        assert saved.state == "whole", (saved, told)
    assert "was killed while it wrote" not in told
    (window,) = json.loads(told)["windows"]
    assert SAVE_S < window["window_s"] <= GRACE_S, window
    assert window["used_s"] >= SAVE_S, window
