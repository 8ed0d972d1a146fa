"""Two machines in the cluster, each with a kubelet and a network of its own; one loses power."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS
from tests.platforms.k8s.cluster import NODE, SECOND, Kubernetes
from tests.platforms.k8s.tenant import EXACT, Tenant
from tests.platforms.k8s.test_kubernetes_scaling import CALM, read_steps, wait_world

pytestmark = [pytest.mark.serial, pytest.mark.timeout(900)]
Make = Callable[..., Tenant]


@pytest.fixture
def make(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a tenant; afterwards there is one machine, and no pod."""

    def build() -> Tenant:
        return Tenant(kubernetes, tmp_path, access_mode="ReadWriteMany", memory="2Gi", grace_s=30)

    try:
        kubernetes.add_machine()
        yield build
    finally:
        kubernetes.kubectl("uncordon", NODE)
        kubernetes.remove_machine()
        kubernetes.clear()


def place_pods(tenant: Tenant) -> dict[str, Any]:
    """Return the machines that have pods of the job which are not told to go, each with them."""
    found: dict[str, Any] = {}
    for pod in tenant.find_pods():
        if "deletionTimestamp" not in pod["metadata"]:
            found.setdefault(pod["spec"].get("nodeName", ""), []).append(pod["metadata"]["name"])
    return found


def test_a_job_across_two_machines_outlives_one_of_them(make: Make) -> None:
    tenant = make()
    tenant.write_exact(120, 0.2, EXACT, nodes=2, nproc=1, checkpoint={"every_steps": 10})
    tenant.launch()
    tenant.wait_step(25)
    assert {*place_pods(tenant)} == {NODE, SECOND}
    assert tenant.cluster.second is not None
    tenant.cluster.second.power_off()
    tenant.cluster.wait(
        lambda: f"node {SECOND}: not ready" in tenant.cli("status", "job", code=None).stderr,
        "the server's word", 120,
    )  # fmt: skip
    tenant.wait_end(timeout_s=400)
    assert {*place_pods(tenant)} == {NODE}
    tenant.check_equal(120)


def test_an_elastic_job_trains_on_and_takes_the_machine_back(make: Make) -> None:
    tenant = make()
    cluster = tenant.cluster
    (tenant.project / "trail").mkdir()
    (tenant.project / "trail" / "here").touch()
    cluster.kubectl("cordon", SECOND)
    tenant.write_job(SCRIPTS / "elastic.py", "--trail", "trail", "--steps", "100000",
                     nproc=1, nodes=1, nodes_max=2, detect=CALM)  # fmt: skip
    tenant.launch()
    tenant.wait_step(5)
    cluster.kubectl("uncordon", SECOND)
    cluster.kubectl("cordon", NODE)
    cluster.wait(lambda: tenant.cli("node", "scale", "job", "2"), "a job that trains")
    wait_world(tenant, 2)
    assert len(place_pods(tenant)[SECOND]) == 1

    assert cluster.second is not None
    cluster.second.power_off()
    reached = len(read_steps(tenant))
    wait_world(tenant, 1)
    cluster.wait(lambda: not cluster.is_node_ready(SECOND), "a node that is not ready")
    cluster.remove_machine()
    cluster.add_machine()  # Another one of this name, as a cloud brings it.
    wait_world(tenant, 2)
    assert len(read_steps(tenant)) > reached
    steps = [row["step"] for row in read_steps(tenant)]
    assert steps == list(range(len(steps))), "a step was lost or made twice"
    tenant.cli("stop", "job")
