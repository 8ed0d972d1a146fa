"""The linter of manifests: a good job, and one change each that makes it bad."""

import copy
from typing import Any

import pytest

from perdure.launch.kubernetes.linter import lint_manifests
from perdure.launch.kubernetes.shapes import read_quantity

JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "gpt", "labels": {"app": "gpt"}},
    "spec": {
        "completionMode": "Indexed", "completions": 1, "parallelism": 1, "backoffLimit": 6,
        "podFailurePolicy": {"rules": [
            {"action": "Ignore",
             "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob",
             "onExitCodes": {"containerName": "train", "operator": "NotIn", "values": [3, 137]}},
        ]},
        "template": {"metadata": {"labels": {"app": "gpt"}}, "spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 60,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "securityContext": {"allowPrivilegeEscalation": False,
                                    "capabilities": {"drop": ["ALL"]}},
                "name": "train", "image": "r.example/t@sha256:" + "0" * 64,
                "env": [{"name": "A", "value": "1"}],
                "resources": {"requests": {"cpu": "4", "memory": "8Gi"},
                              "limits": {"memory": "16Gi", "ephemeral-storage": "20Gi",
                                         "nvidia.com/gpu": 1}},
                "volumeMounts": [{"name": "durable", "mountPath": "/checkpoints"},
                                 {"name": "shm", "mountPath": "/dev/shm"}],
            }],
            "volumes": [
                {"name": "durable", "persistentVolumeClaim": {"claimName": "ckpt"}},
                {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
            ],
        }},
    },
}  # fmt: skip
CLAIM: dict[str, Any] = {
    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "ckpt"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}},
}  # fmt: skip
POD = "spec.template.spec"
BOX = f"{POD}.containers.0"
RULES = "spec.podFailurePolicy.rules"
ABSENT = object()

# Path in the job, value there (ABSENT: taken away), words of the finding, its trap.
REFUSED: list[tuple[str, Any, str, str]] = [
    # What a real API server 1.20.2 refused, and schema validators passed.
    (f"{POD}.restartPolicy", "Always", "Never or OnFailure", "K8S2"),
    (f"{BOX}.resources.requests.nvidia.com/gpu", 2, "must be equal", ""),
    (f"{BOX}.resources", {"requests": {"nvidia.com/gpu": 1}}, "without a limit", ""),
    (f"{BOX}.resources.limits.nvidia.com/gpu", "0.5", "no integer", ""),
    (f"{BOX}.resources.limits.memory", "10GB", "no quantity", ""),
    (f"{BOX}.resources.limitz", {"cpu": 1}, "unknown field limitz", ""),
    # By the rules of the API's documentation.
    (f"{POD}.restartPolicy", ABSENT, "Never or OnFailure", "K8S2"),
    (f"{POD}.restartPolicy", "OnFailure", "only with restartPolicy: Never", ""),
    (f"{BOX}.resources.requests.memory", "17Gi", "above the limit", ""),
    (f"{BOX}.resources.limits.memory", "-1Gi", "negative", ""),
    (f"{BOX}.resources.limits.gpu", 1, "no resource 'gpu'", ""),
    (f"{BOX}.volumeMounts.0.name", "durabel", "no volume", ""),
    (f"{BOX}.volumeMounts.0.mountPath", "/dev/shm", "twice", ""),
    (f"{BOX}.env.0.value", 1, "no string", ""),
    (f"{BOX}.env.0.valueFrom", {"fieldRef": {"fieldPath": "status.podIP"}}, "value and", ""),
    (f"{BOX}.env.0.name", "1A", "no name of a variable", ""),
    (f"{BOX}.name", "Train", "no DNS label", ""),
    (f"{BOX}.image", ABSENT, "image is required", ""),
    (f"{POD}.containers", [], "at least one", ""),
    (f"{POD}.volumes.0.emptyDir", {"sizeLimit": "1Gi"}, "one source", ""),
    (f"{POD}.volumes.1.emptyDir.sizeLimit", "8 Gi", "no quantity", ""),
    (f"{POD}.terminationGracePeriodSeconds", "60", "terminationGracePeriodSeconds", ""),
    (f"{POD}.tolerations", [{"operator": "Equal", "value": "x"}], "no key", ""),
    (f"{POD}.tolerations", [{"key": "k", "operator": "Exists", "value": "x"}], "must be empty", ""),
    ("metadata.name", "GPT_1", "lower-case", ""),
    ("metadata.name", "g" * 63, "no DNS label", ""),
    ("metadata.labels.app", "a b", "no value of a label", ""),
    ("spec.completions", ABSENT, "completions is required", ""),
    ("spec.completionMode", "indexed", "Indexed or NonIndexed", ""),
    ("spec.backoffLimit", -1, "backoffLimit", ""),
    ("spec.backofLimit", 3, "unknown field", ""),
    ("spec.selector", {"matchLabels": {"a": "b"}}, "made by the server", ""),
    (f"{RULES}.0.action", "Skip", "FailJob, FailIndex", ""),
    (f"{RULES}.0.action", "FailIndex", "backoffLimitPerIndex", ""),
    (f"{RULES}.0.onPodConditions", ABSENT, "one of", ""),
    (f"{RULES}.1.onExitCodes.values", [137, 3], "in order", ""),
    (f"{RULES}.1.onExitCodes", {"operator": "In", "values": [0]}, "0 is no failure", ""),
    (f"{RULES}.1.onExitCodes.containerName", "other", "no container", ""),
    ("spec.parallelism", 2, "share the claim", "K8S4"),
    # Found by asking a server, tests/platforms/k8s/test_verdicts.py.
    (f"{POD}.subdomain", "Gpt", "no DNS label", ""),
    (f"{POD}.hostname", "a_b", "no DNS label", ""),
    (f"{POD}.nodeSelector", {"pool": "a b"}, "no value of a label", ""),
    (f"{POD}.dnsPolicy", "None", "dnsConfig is required", ""),
    (f"{POD}.hostPID", "yes", "neither true nor false", ""),
    ("spec.template.metadata.labels.app", "a b", "no value of a label", ""),
    ("spec.completions", "one", "completions", ""),
    ("kind", "job", "it is Job", ""),
]
TOLD: list[tuple[str, Any, str, str]] = [
    (f"{BOX}.image", "r.example/t:latest", "by tag", "U30"),
    (f"{BOX}.resources.limits.ephemeral-storage", ABSENT, "no limit of ephemeral", "K8S5"),
    (f"{BOX}.volumeMounts.1", ABSENT, "/dev/shm", "U9"),
    (f"{POD}.volumes.1.emptyDir", {}, "without sizeLimit", "K8S5"),
    (f"{POD}.volumes.0", {"name": "durable", "emptyDir": {"sizeLimit": "1Gi"}}, "outlives", "K8S5"),
    (f"{POD}.terminationGracePeriodSeconds", 0, "without a checkpoint", ""),
]


def change(path: str, value: Any) -> dict[str, Any]:
    job = copy.deepcopy(JOB)
    head, found = path, ""
    for resource in ("nvidia.com/gpu",):  # The one key with dots in it.
        if path.endswith(resource):
            head, found = path.removesuffix(f".{resource}"), resource
    keys = [*head.split("."), *([found] if found else [])]
    here: Any = job
    for key in keys[:-1]:
        here = here[int(key)] if isinstance(here, list) else here[key]
    last: Any = int(keys[-1]) if isinstance(here, list) else keys[-1]
    if value is ABSENT:
        del here[last]
    else:
        here[last] = value
    return job


def test_a_good_job_is_passed_in_silence() -> None:
    assert lint_manifests([CLAIM, JOB]) == []


@pytest.mark.parametrize(("path", "value", "words", "trap"), REFUSED)
def test_what_a_server_refuses_is_an_error(path: str, value: Any, words: str, trap: str) -> None:
    found = lint_manifests([CLAIM, change(path, value)])
    assert [f.trap for f in found if f.level == "error" and words in f.text] == [trap], found


@pytest.mark.parametrize(("path", "value", "words", "trap"), TOLD)
def test_what_costs_work_is_a_warning(path: str, value: Any, words: str, trap: str) -> None:
    found = lint_manifests([CLAIM, change(path, value)])
    assert [(f.level, f.trap) for f in found if words in f.text] == [("warning", trap)], found


def test_fields_that_an_older_server_drops() -> None:
    def fields(server: str) -> list[str]:
        found = lint_manifests([CLAIM, JOB], server)
        return [f.text.split(": ")[1] for f in found if "drops" in f.text]

    assert fields("1.20") == ["completionMode", "podFailurePolicy"]
    assert fields("1.25") == ["podFailurePolicy"]
    assert fields("1.26") == []


@pytest.mark.parametrize(
    ("change_", "words"),
    [
        ({"accessModes": []}, "at least one"),
        ({"accessModes": ["RWX"]}, "is none"),
        ({"accessModes": ["ReadWriteOncePod", "ReadWriteOnce"]}, "no other"),
        ({"resources": {}}, "storage is required"),
        ({"resources": {"requests": {"storage": "50GB"}}}, "no quantity"),
    ],
)
def test_claims_that_are_refused(change_: dict[str, Any], words: str) -> None:
    claim = {**CLAIM, "spec": {**CLAIM["spec"], **change_}}
    assert [f.level for f in lint_manifests([claim]) if words in f.text] == ["error"]


def test_a_service_without_ports_has_to_be_headless() -> None:
    def service(name: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}

    assert lint_manifests([service("a", clusterIP="None")]) == []
    assert [f.level for f in lint_manifests([service("a")])] == ["error"]
    assert [f.level for f in lint_manifests([service("1a", clusterIP="None")])] == ["error"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1.5Gi", 1.5 * 2**30), ("100m", 0.1), ("1e3", 1000.0), ("2E", 2e18), (3, 3.0), ("10GB", None),
     ("", None), ("1 Gi", None), ("Ki", None)],
)  # fmt: skip
def test_quantities(text: object, number: float | None) -> None:
    found = read_quantity(text)
    assert found == (None if number is None else pytest.approx(number))
