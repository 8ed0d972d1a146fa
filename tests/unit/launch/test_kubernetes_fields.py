"""What is wrong with the fields of a Kubernetes profile, before a server is asked."""

from typing import Any

import pytest
from tests.unit.launch.test_kubernetes import make_plan

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"memory": "10GB"}, "kubernetes.memory: '10GB' is no quantity"),
    ({"memory": "16 Gi"}, "no quantity"),
    ({"memory": "16gi"}, "no quantity"),
    ({"memory": "-1Gi"}, "no quantity"),
    ({"cpu": "4 cores"}, "kubernetes.cpu"),
    ({"storage": "50GB"}, "kubernetes.storage"),
    ({"ephemeral_storage": "1 Gi"}, "kubernetes.ephemeral_storage"),
    ({"shared_memory": "8G i"}, "kubernetes.shared_memory"),
    ({"claim": "Data_1"}, "kubernetes.claim: 'Data_1' is no name"),
    ({"storage_class": "Fast_1"}, "kubernetes.storage_class"),
    ({"secret": "To kens"}, "kubernetes.secret"),
    ({"pull_secrets": ("Reg",)}, "kubernetes.pull_secrets"),
    ({"service_account": "a_b"}, "kubernetes.service_account"),
    ({"priority_class": "High!"}, "kubernetes.priority_class"),
    ({"runtime_class": "-nvidia"}, "kubernetes.runtime_class"),
    ({"node_selector": {"pool": "a b"}}, "no value of a label"),
    ({"node_selector": {"a b": "x"}}, "no key of a label"),
    ({"labels": {"app": "x" * 64}}, "no value of a label"),
    ({"tolerations": ("a b",)}, "no key of a taint"),
    ({"gpu_resource": "gpu", "gpus": 1}, "'gpu' has no domain"),
    ({"image": " r.example/t"}, "has spaces"),
]
TAKEN: list[dict[str, Any]] = [
    {"memory": "1.5e10"}, {"memory": "16G"}, {"cpu": "500m"}, {"cpu": "0.5"}, {"cpu": ""},
    {"claim": "a.b-c"}, {"node_selector": {"cloud.google.com/gke-accelerator": "nvidia-l4"}},
    {"labels": {"kueue.x-k8s.io/queue-name": "team_a.x"}}, {"labels": {"app": ""}},
    {"tolerations": ("nvidia.com/gpu", "spot")}, {"tolerations": ()},
    {"gpu_resource": "amd.com/gpu", "gpus": 2},
]  # fmt: skip
"""With these, tests/platforms/k8s asks an API server."""


def find(level: str, **section: Any) -> list[str]:
    return [f.text for f in make_plan(1, **section).findings if f.level == level]


@pytest.mark.parametrize(("section", "words"), REFUSED)
def test_what_no_server_takes_is_an_error_with_its_field(
    section: dict[str, Any], words: str
) -> None:
    (text,) = find("error", **section)
    assert words in text


@pytest.mark.parametrize("section", TAKEN)
def test_what_a_server_takes_is_no_error(section: dict[str, Any]) -> None:
    assert find("error", **section) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"image": "r.example/t:latest"}, "by tag"),
        ({"ephemeral_storage": ""}, "no limit of ephemeral-storage"),
        ({"host_paths": ("/opt",)}, "refuses host_paths"),
    ],
)
def test_what_costs_work_is_a_warning(section: dict[str, Any], words: str) -> None:
    assert any(words in text for text in find("warning", **section))
