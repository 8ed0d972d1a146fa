"""The linter against the API server itself: a table of good and bad manifests, each dry-run."""

import copy
from typing import Any

import pytest
import yaml

from perdure.launch.kubernetes.client import Client
from perdure.launch.kubernetes.linter import lint_manifests
from perdure.model.platforms.kubernetes import KubernetesSection
from tests.platforms.k8s.cluster import Kubernetes
from tests.unit.launch import test_kubernetes_linter as unit

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]
SERVER = "1.20"
BOX, POD, ABSENT = unit.BOX, unit.POD, unit.ABSENT

GOOD: list[tuple[str, Any]] = [
    (f"{POD}.restartPolicy", "OnFailure"),
    (f"{POD}.terminationGracePeriodSeconds", 0),
    (f"{POD}.terminationGracePeriodSeconds", ABSENT),
    (f"{POD}.tolerations", [{"operator": "Exists"}]),
    (f"{POD}.tolerations", [{"key": "nvidia.com/gpu", "operator": "Exists"}]),
    (
        f"{POD}.tolerations",
        [{"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 3}],
    ),
    (f"{POD}.subdomain", "gpt"),
    (f"{POD}.nodeSelector", {"pool": "a100"}),
    (f"{POD}.volumes.0", {"name": "durable", "nfs": {"server": "nas", "path": "/x"}}),
    (f"{POD}.volumes.0", {"name": "durable", "hostPath": {"path": "/x", "type": "Directory"}}),
    (f"{POD}.volumes.1.emptyDir", {}),
    (f"{BOX}.image", "r.example/t:latest"),
    (f"{BOX}.resources", {}),
    (f"{BOX}.resources.limits.nvidia.com/gpu", "2"),
    (f"{BOX}.resources.requests.cpu", "500m"),
    (f"{BOX}.resources.requests.cpu", 0.5),
    (f"{BOX}.resources.limits.memory", "1.5e10"),
    (f"{BOX}.resources.limits.memory", "16G"),
    (f"{BOX}.env.0.name", "a.b-c_D"),
    (f"{BOX}.env.0", {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}),
    (f"{BOX}.imagePullPolicy", "Never"),
    ("metadata.name", "a.b"),
    ("metadata.labels.app", ""),
    ("spec.backoffLimit", 0),
    ("spec.parallelism", 0),
    ("spec.ttlSecondsAfterFinished", 0),
]
BAD: list[tuple[str, Any]] = [
    (f"{BOX}.imagePullPolicy", "Sometimes"),
    (f"{BOX}.image", " r.example/t"),
    (f"{BOX}.name", ABSENT),
    (f"{BOX}.name", "n" * 64),
    (f"{BOX}.env.0.value", True),
    (f"{BOX}.env.0.valueFrom", {}),
    (f"{BOX}.volumeMounts.0.mountPath", ABSENT),
    (f"{BOX}.volumeMounts.0.readonly", True),
    (f"{BOX}.resources.limits.memory", "16 Gi"),
    (f"{BOX}.resources.limits.memory", "16gi"),
    (f"{BOX}.resources.limits.cpu", "4 cores"),
    (f"{BOX}.resources.requests.nvidia.com/gpu", "1.5"),
    (f"{BOX}.resources.limits.ephemeral_storage", "1Gi"),
    (f"{POD}.volumes.0.name", "Durable"),
    (f"{POD}.volumes.1.name", "durable"),
    (f"{POD}.volumes.0.persistentVolumeClaim", {}),
    (f"{POD}.volumes.1.emptyDir.medium", "memory"),
    (f"{POD}.tolerations", [{"key": "a", "operator": "exists"}]),
    (f"{POD}.tolerations", [{"key": "a", "operator": "Exists", "effect": "NoRun"}]),
    (f"{POD}.tolerations", [{"key": "a", "operator": "Exists", "tolerationSeconds": 3}]),
    (f"{POD}.terminationGracePeriodSeconds", -1),
    (f"{POD}.nodeselector", {"pool": "a100"}),
    (f"{POD}.restartPolicy", "never"),
    (f"{POD}.subdomain", "Gpt"),
    (f"{POD}.subdomain", "gpt.x"),
    (f"{POD}.hostname", "a_b"),
    (f"{POD}.nodeSelector", {"pool": 1}),
    (f"{POD}.nodeSelector", {"pool": "a b"}),
    (f"{POD}.priorityClassName", "no-such-class"),
    (f"{POD}.dnsPolicy", "None"),
    (f"{POD}.hostPID", "yes"),
    ("metadata.name", ABSENT),
    ("metadata.name", "gpt-"),
    ("metadata.name", "g" * 254),
    ("metadata.labels.app", 1),
    ("metadata.labels.app", "x" * 64),
    ("spec.template.metadata.labels.app", "a b"),
    ("spec.completions", "one"),
    ("spec.parallelism", -1),
    ("spec.activeDeadlineSeconds", -5),
    ("spec.template", ABSENT),
    ("apiVersion", "batch/v2"),
    ("apiVersion", "v1"),
    ("kind", "job"),
]
CLAIMS: list[dict[str, Any]] = [
    {}, {"accessModes": ["ReadWriteMany"]}, {"accessModes": ["ReadWriteOnce", "ReadOnlyMany"]},
    {"storageClassName": "fast"}, {"accessModes": []}, {"accessModes": ["RWX"]}, {"resources": {}},
    {"resources": {"requests": {"storage": "50GB"}}}, {"resources": {"requests": {"storage": 0}}},
    {"storageclass": "fast"}, {"volumeMode": "Disk"}, {"storageClassName": "Fast_1"},
]  # fmt: skip
SERVICES: list[dict[str, Any]] = [
    {"clusterIP": "None"}, {}, {"ports": [{"port": 80}]}, {"ports": [{"port": 0}]},
    {"clusterIP": "none"}, {"clusterIP": "None", "selector": {"a": "b"}},
    {"clusterIP": "None", "selector": {"a": "b c"}},
]  # fmt: skip
EXPECTED = (
    "priorityClassName",  # Only the server can know what else there is in the cluster.
    "ttlSecondsAfterFinished",  # Dropped without a word by this server.
    "image = ' ", "'memory'",  # Taken in a Job; its pods are then refused, or their mounts fail.
    "terminationGracePeriodSeconds = -1",  # Taken by this server, and of no use.
)  # fmt: skip
"""Where the two may differ."""


def for_server(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job without the fields that this server does not know."""
    spec = job.get("spec", {})
    for field in ("completionMode", "podFailurePolicy"):
        spec.pop(field, None)
    return job


def list_jobs() -> list[tuple[str, dict[str, Any]]]:
    rows: list[tuple[str, Any]] = [*GOOD, *BAD]
    rows += [(path, value) for path, value, _, _ in (*unit.REFUSED, *unit.TOLD)]
    found = [("good", for_server(copy.deepcopy(unit.JOB)))]
    for path, value in rows:
        if any(word in path for word in ("podFailurePolicy", "completionMode")):
            continue
        if path == "spec.completions" and value is ABSENT:
            continue  # Only of an Indexed one.
        if path == "metadata.name" and value == "g" * 63:
            continue
        found.append((f"{path} = {value!r}", for_server(unit.change(path, value))))
    return found


def find_errors(*documents: dict[str, Any]) -> list[str]:
    """Return what the linter holds for a refusal; that a claim cannot be shared is none."""
    found = lint_manifests(documents, SERVER)
    return [f.text for f in found if f.level == "error" and f.trap != "K8S4"]


def test_the_linter_agrees_with_the_server(kubernetes: Kubernetes) -> None:
    documents = list_jobs()
    documents += [(f"claim {change}", {**unit.CLAIM, "spec": {**unit.CLAIM["spec"], **change}})
                  for change in CLAIMS]  # fmt: skip
    head = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "gpt"}}
    documents += [(f"service {spec}", {**head, "spec": spec}) for spec in SERVICES]
    client = Client(KubernetesSection())
    wrong, refused = [], 0
    for what, document in documents:
        verdict = client.find_refusal(yaml.safe_dump(document))
        own = find_errors(document)
        refused += bool(verdict)
        if bool(verdict) != bool(own) and not any(word in what for word in EXPECTED):
            wrong.append(f"{what}\n   server: {verdict or 'takes it'}\n   linter: {own}")
    assert not wrong, "\n".join(wrong)
    assert (len(documents), refused) >= (100, 60)
