"""One cluster of a kind for all tests of a run; a folder that no profile takes for fleeting."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platforms.k8s import cluster as k8s
from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.slurm_cluster import Cluster, find_lack


@pytest.fixture(scope="session")
def plain_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from run_cluster(tmp_path_factory.mktemp("slurm"), accounting=False)


@pytest.fixture(scope="session")
def accounted_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from run_cluster(tmp_path_factory.mktemp("accounted"), accounting=True)


def run_cluster(root: Path, *, accounting: bool) -> Iterator[Cluster]:
    lack = find_lack(accounting=accounting)
    if lack:
        pytest.skip(lack)
    made = Cluster(root, accounting=accounting)
    for folder in (made.root, *made.root.parents):  # munge refuses what others may write to.
        if folder.name.startswith("pytest-") and folder.stat().st_uid == 0:
            folder.chmod(0o755)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def accounting() -> bool:
    """Return whether the test's cluster has slurmdbd: a test that wants it says so as parameter."""
    return False


@pytest.fixture
def cluster(
    accounting: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """Return the cluster, with its commands and configuration in this process's environment."""
    made = request.getfixturevalue("accounted_cluster" if accounting else "plain_cluster")
    assert isinstance(made, Cluster)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def place(cluster: Cluster) -> Iterator[Path]:
    """Return a folder outside /tmp, which is wiped at a boot and refused as a durable one."""
    folder = Path(tempfile.mkdtemp(prefix=".perdure-platforms-", dir=Path.home()))
    yield folder
    cluster.end_jobs()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """Return a cluster of one node, which KUBECONFIG names."""
    if lack := k8s.find_lack():
        pytest.skip(lack)
    made = Kubernetes(tmp_path_factory.mktemp("k8s"))
    try:
        made.start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in made.env.items():
                patch.setenv(name, value)
            yield made
    finally:
        made.stop()
        shutil.rmtree(made.root, ignore_errors=True)
