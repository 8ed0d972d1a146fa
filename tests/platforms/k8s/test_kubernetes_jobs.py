"""Jobs on a real Kubernetes: pods deleted, evicted and killed for memory; losses bitwise."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]


@pytest.fixture
def folder(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kubernetes.clear()


def test_a_pod_that_is_deleted_saves_and_comes_back(kubernetes: Kubernetes, folder: Path) -> None:
    tenant = Tenant(kubernetes, folder)
    tenant.write_exact(120, 0.2)
    tenant.launch()
    tenant.wait_step(10)
    kubernetes.kubectl("delete", "pod", tenant.find_running(), "--wait=false")
    tenant.wait_end()
    tenant.check_equal(120)
