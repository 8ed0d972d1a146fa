"""The account of a job's pods has the rights that its pods use, by the server's own audit log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]
ACCOUNT = "system:serviceaccount:default:perdure"


@pytest.fixture
def tenant(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Tenant]:
    """Return a tenant whose job was applied by kustomize; afterwards nothing of it is left."""
    made = Tenant(kubernetes, tmp_path, namespace="default", service_account="perdure",
                  access_mode="ReadWriteMany")  # fmt: skip
    made.write_exact(150, 0.2, nodes=2, nproc=1)
    made.cli("launch", "job.json", "--on", "cluster", "--dry-run", "--kustomize", "base")
    base = str(tmp_path / "base")
    kubernetes.kubectl("apply", "-k", f"{base}/volume")
    kubernetes.kubectl("apply", "-k", base)
    yield made
    kubernetes.kubectl("delete", "-k", base, "--wait=false")
    kubernetes.clear()


def list_granted(cluster: Kubernetes) -> set[tuple[str, str]]:
    """Return verb and kind of all that the server would let the account do."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview",
              "spec": {"namespace": "default"}}  # fmt: skip
    told = cluster.kubectl("create", "--as", ACCOUNT, "--as-group", "system:serviceaccounts",
                           "--as-group", "system:authenticated", "-o", "json", "-f", "-",
                           stdin=json.dumps(review))  # fmt: skip
    rules = json.loads(told)["status"]["resourceRules"]
    return {
        (verb, kind)
        for rule in rules
        if rule["apiGroups"] != ["authorization.k8s.io"]  # Everybody may ask what they may do.
        for verb in rule["verbs"]
        for kind in rule["resources"]
    }


def read_audit(cluster: Kubernetes) -> list[Any]:
    """Return what the account has asked the server for."""
    lines = (cluster.root / "audit.log").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    return [one for one in asked if one["user"]["username"] == ACCOUNT]


def test_each_right_is_used_and_none_is_missing(tenant: Tenant) -> None:
    cluster = tenant.cluster
    tenant.wait_step(10)
    (other,) = (pod["metadata"]["name"] for pod in tenant.find_pods()
                if pod["metadata"]["labels"]["job-name"] == "job-nodes")  # fmt: skip
    cluster.kubectl("delete", "pod", other, "--wait=false")
    # A pod that is gone is asked about by its events.
    cluster.wait(lambda: {("list", "events"), ("get", "nodes")} <= list_used(cluster), "questions")
    refused = {(one["verb"], one["objectRef"]["resource"]) for one in read_audit(cluster)
               if one["responseStatus"]["code"] == 403}  # fmt: skip
    assert refused == set()
    assert list_used(cluster) == list_granted(cluster)
    tenant.wait_end(timeout_s=300)
    tenant.check_equal(150)


def list_used(cluster: Kubernetes) -> set[tuple[str, str]]:
    return {(one["verb"], one["objectRef"]["resource"]) for one in read_audit(cluster)}
