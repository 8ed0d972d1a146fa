"""Results home from a real volume, cut transfers among it, and only then the pods given back."""

import hashlib
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.platforms.k8s.cluster import Kubernetes
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]
BIG = 400 << 20
SERVER = """\
import functools, http.server, pathlib
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="served")
http.server.HTTPServer(("127.0.0.1", {port}), handler).serve_forever()
"""


@pytest.fixture
def tenant(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Tenant]:
    yield Tenant(kubernetes, tmp_path)
    kubernetes.clear()


def start(tenant: Tenant, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "perdure", *words], env=tenant.env, cwd=tenant.folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def cut_in_the_middle(pulling: "subprocess.Popen[str]", part: Path) -> None:
    """Kill the kubectl that carries files, in the middle of the large one."""
    until = time.monotonic() + 90
    while not part.exists() or part.stat().st_size < 1 << 20:
        assert time.monotonic() < until
        assert pulling.poll() is None, pulling.communicate()
        time.sleep(0.002)
    for child in psutil.Process(pulling.pid).children(recursive=True):
        if child.name() == "kubectl":
            child.kill()


def test_what_is_on_the_volume_is_pulled_before_the_pods_are_given_back(tenant: Tenant) -> None:
    tenant.write_exact(30, 0.0)
    tenant.launch()
    refused = tenant.cli("teardown", "job", "--confirm", "job", code=4)
    assert "the job is" in refused.stderr
    tenant.wait_end()
    tenant.cli("attach", "job")
    data = os.urandom(BIG)
    (tenant.trail() / "best.bin").write_bytes(data)

    pulling = start(tenant, "pull", "job", "pulled")
    here = tenant.folder / "pulled" / "outputs" / "trail"
    cut_in_the_middle(pulling, here / ".rsync-partial" / "best.bin")
    _, err = pulling.communicate(timeout=200)
    assert pulling.returncode == 0, err
    assert "going on" in err
    assert (
        hashlib.sha256((here / "best.bin").read_bytes()).digest() == hashlib.sha256(data).digest()
    )
    refused = tenant.cli("teardown", "job", "--confirm", "job", code=4)
    assert "not verified" in refused.stderr
    assert "load with weights_only" in tenant.cli("verify", "pulled").stdout

    (tenant.trail() / "later.txt").write_text("newer than the pull")
    refused = tenant.cli("teardown", "job", "--confirm", "job", code=4)
    assert "later.txt on the box is not what was pulled" in refused.stderr
    (tenant.trail() / "later.txt").unlink()
    refused = tenant.cli("teardown", "job", "--confirm", "other", code=4)
    assert "name was not typed" in refused.stderr
    assert tenant.find_pods()
    tenant.cli("teardown", "job", "--confirm", "job", "--with-volume")
    left = tenant.cluster.get("job,pod,service,configmap,pvc", "-l", "perdure.dev/job=job")
    assert left["items"] == []
    readers = "perdure.dev/reader=job"
    tenant.cluster.wait(lambda: not tenant.cluster.get("pod", "-l", readers)["items"], "no reader")


def test_the_printed_line_reaches_into_the_pod(tenant: Tenant) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tenant.project / "served").mkdir()
    (tenant.project / "served" / "hello").write_text("from the pod")
    script = tenant.folder / "serve.py"
    script.write_text(SERVER.format(port=port))
    tenant.write_job(script, nproc=1)
    tenant.launch()

    def is_answered() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/hello", timeout=2) as answer:
                return bool(answer.read() == b"from the pod")
        except OSError:
            return False

    tenant.cluster.wait(
        lambda: any(pod["status"]["phase"] == "Running" for pod in tenant.find_pods()), "a pod"
    )
    line = tenant.cli("status", "job", "--port", str(port)).stdout
    with subprocess.Popen(shlex.split(line), env=tenant.env, cwd=tenant.folder) as forwarding:
        try:
            tenant.cluster.wait(is_answered, "an answer from the pod")
        finally:
            forwarding.terminate()
