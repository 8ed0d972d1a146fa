"""The fields of a profile against the API server itself: what perdure refuses, the server does."""

from typing import Any

import pytest

from perdure.launch.kubernetes.client import Client
from perdure.model.platforms.kubernetes import KubernetesSection
from tests.platforms.k8s.cluster import Kubernetes
from tests.unit.launch.test_kubernetes import make_plan
from tests.unit.launch.test_kubernetes_fields import REFUSED, TAKEN

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]
SERVER = "1.20"
LATER = ("image", "secret", "pull_secrets", "runtime_class", "claim", "service_account")
"""The server refuses these only once the pod is made."""


def test_perdure_refuses_what_the_server_refuses(kubernetes: Kubernetes) -> None:
    client, wrong = Client(KubernetesSection()), []
    rows: list[dict[str, Any]] = [section for section, _ in REFUSED] + TAKEN
    for section in rows:
        if any(name in section for name in (*LATER, "priority_class")):
            continue
        plan = make_plan(1, server=SERVER, **section)
        own = [f.text for f in plan.findings if f.level == "error"]
        refused = [why for text in plan.files.values() if (why := client.find_refusal(text))]
        if bool(own) != bool(refused):
            wrong.append(f"{section}\n   server: {refused or 'takes it'}\n   perdure: {own}")
    assert not wrong, "\n".join(wrong)
