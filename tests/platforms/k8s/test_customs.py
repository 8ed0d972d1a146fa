"""JobSet, TrainJob and PyTorchJob before a real API server that has their projects' schemas.

No controller of theirs runs: what is shown is that the server takes them and drops nothing.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.platforms.k8s.cluster import Kubernetes
from tests.unit.launch.test_crds import CRDS, change, list_customs

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def customs(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """Return a cluster that knows the kinds; afterwards it does not."""
    made = [make_definition(found) for found in CRDS.values()]
    names = [one["metadata"]["name"] for one in made]
    kubernetes.create(*made)
    words = [f"crd/{name}" for name in names]
    kubernetes.kubectl("wait", "--for=condition=Established", "--timeout=60s", *words)
    yield kubernetes
    kubernetes.kubectl("delete", *words, "--wait=false")


def make_definition(found: Any) -> Any:
    """Return the CustomResourceDefinition of a trimmed schema."""
    plural = found["names"]["plural"]
    version = {"name": found["version"], "served": True, "storage": True,
               "schema": {"openAPIV3Schema": found["schema"]}}  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{found['group']}",
                     "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
        "spec": {"group": found["group"], "names": found["names"], "scope": found["scope"],
                 "versions": [version]},
    }  # fmt: skip


def find_dropped(sent: Any, kept: Any, at: str = "$") -> list[str]:
    """Return the places of what was sent and is not kept as it was; what is added is no matter."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [lost for key, value in sent.items()
                for lost in find_dropped(value, kept.get(key), f"{at}.{key}")]  # fmt: skip
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        pairs = enumerate(zip(sent, kept, strict=True))
        return [lost for n, (a, b) in pairs for lost in find_dropped(a, b, f"{at}[{n}]")]
    return [] if sent == kept else [at]


def send(cluster: Kubernetes, document: Any) -> Any:
    """Return a document as the server would keep it."""
    words = ("create", "--dry-run=server", "--validate=false", "-o", "json", "-f", "-")
    return json.loads(cluster.kubectl(*words, stdin=json.dumps(document)))


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("shape", ["jobset", "trainjob", "pytorchjob"])
def test_the_server_takes_it_and_drops_nothing(customs: Kubernetes, shape: str, nodes: int) -> None:
    found = list(list_customs(shape, nodes, active_deadline_s=3600, ttl_s=60))
    assert found
    for document in found:
        assert find_dropped(document, send(customs, document)) == []


def test_what_the_schema_does_not_know_is_dropped_or_refused(customs: Kubernetes) -> None:
    (found,) = list_customs("pytorchjob")
    unknown = change(found, "spec.backoffLimit", 3)
    assert find_dropped(unknown, send(customs, unknown)) == ["$.spec.backoffLimit"]
    with pytest.raises(AssertionError, match="Invalid value"):
        send(customs, change(found, "spec.pytorchReplicaSpecs.Master.replicas", "one"))
