"""The image of `launch --write-image`, built here and run by a real cluster as its own user."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure
from tests.platforms.k8s import builder
from tests.platforms.k8s.builder import Builder
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def built(kubernetes: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, str]:
    """Return who has built the image, and its name by digest; the cluster's node has it."""
    if lack := builder.find_lack():
        pytest.skip(lack)
    made = Builder(tmp_path_factory.mktemp("image"))
    name = made.build()
    kubernetes.import_image(builder.NAME, made.archive)
    return made, name


@pytest.fixture
def cleared(kubernetes: Kubernetes) -> Iterator[None]:
    yield
    kubernetes.clear()


def test_it_is_what_the_dockerfile_says(built: tuple[Builder, str]) -> None:
    config = built[0].inspect()
    assert config["User"] == "1000:1000"
    assert config["Entrypoint"] == ["perdure"]
    labels = config["Labels"]
    assert isinstance(labels, dict)
    assert labels["dev.perdure.version"] == perdure.__version__
    assert "no-index" not in json.dumps(config)


def test_a_pod_without_a_command_is_perdure_and_nobody_is_root(
    kubernetes: Kubernetes, built: tuple[Builder, str], cleared: None
) -> None:
    asked = {
        "version": {"args": ["--version"]},
        "doctor": {"args": ["doctor", "--json"]},
        "who": {"command": ["python3", "-c", "import os; print(os.getuid())"]},
        "secret": {"command": ["ls", "/etc/pip.conf", "/tmp/wheels"]},
    }
    for name, words in asked.items():
        kubernetes.create(
            {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
                "spec": {"restartPolicy": "Never", "automountServiceAccountToken": False,
                         "securityContext": {"runAsNonRoot": True},
                         "containers": [{"name": "a", "image": built[1], **words}]},
            }
        )  # fmt: skip

    def read(name: str) -> str:
        kubernetes.wait(
            lambda: kubernetes.get("pod", name)["status"]["phase"] in ("Succeeded", "Failed"),
            f"the end of pod {name}",
        )
        return kubernetes.kubectl("logs", name)

    assert read("version").strip() == f"perdure {perdure.__version__}"
    assert read("who").strip() == "1000"
    found = {row["name"]: row for row in json.loads(read("doctor"))["checks"]}
    assert found["nats-server"]["state"] == "ok"
    assert found["recorder"]["state"] == "ok", found["recorder"]
    assert "wheels/" not in read("secret")
    assert "'/etc/pip.conf': No such file" in read("secret")


def test_a_job_of_two_nodes_trains_in_it(
    kubernetes: Kubernetes, built: tuple[Builder, str], tmp_path: Path, cleared: None
) -> None:
    tenant = Tenant(
        kubernetes, tmp_path, python="python3", image=built[1], host_paths=(),
        security="restricted", access_mode="ReadWriteMany",
    )  # fmt: skip
    tenant.durable.chmod(0o777)  # A folder of the node takes no fsGroup.
    tenant.write_exact(60, 0.2, nodes=2, nproc=1)
    tenant.launch()
    tenant.wait_step(5)
    pods = tenant.find_pods()
    assert [pod["spec"]["containers"][0]["image"] for pod in pods] == [built[1]] * 2
    assert "hostPath" not in json.dumps([pod["spec"] for pod in pods])
    shown = kubernetes.kubectl("exec", tenant.find_running(), "--", "id", "-u")
    assert shown.strip() == "1000"
    assert "running, step" in tenant.cli("status", "job").stdout
    tenant.wait_end()
    tenant.check_equal(60)
