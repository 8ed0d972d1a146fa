# ruff: noqa: ASYNC240
"""A job over somebody's own nats-server: TLS, JWT credentials by role, and what can be wrong."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("nkeys", reason="nkeys is not installed")

import nkeys

from perdure.adapters.nats import NatsBus
from perdure.model.bus.access import ROLES, build_access
from perdure.model.bus.endpoint import Endpoint
from perdure.model.errors import PlatformError
from tests.contract.jwt_cluster import JwtCluster, Signer
from tests.e2e.conftest import start  # noqa: F401
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

JOB = "jwt.job"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[JwtCluster]:
    cluster = JwtCluster(tmp_path / "cluster", JOB)
    yield cluster
    cluster.kill()


@pytest.mark.slow
def test_a_job_runs_by_url_and_credentials(
    start: Callable[..., Job],  # noqa: F811
    tmp_path: Path,
    cluster: JwtCluster,
) -> None:
    own = ("--nats", cluster.url, "--nats-creds", str(cluster.creds), "--nats-tls-ca", cluster.ca)
    script = (str(SCRIPTS / "train_paced.py"), "--trail", str(tmp_path), "--steps", "100000")
    job = start(JOB, "-n", "1", *own, *script, "--step-s", "0.2")
    job.wait_step(5)
    saved = json.loads(job.cli("checkpoint", JOB, "--json").stdout)["step"]
    job.kill("perdure controller")
    assert json.loads(job.cli("checkpoint", JOB, "--json").stdout)["step"] > saved
    seen = [
        p.as_dict(["cmdline", "environ"]) for p in psutil.Process(job.process.pid).children(True)
    ]
    job.cli("stop", JOB)
    assert job.wait() == 0, job.text()
    (job.folder / "journal.jsonl").unlink()  # What is read now comes from the cluster's stream.
    kinds = [
        json.loads(line)["kind"] for line in job.cli("events", JOB, "--json").stdout.splitlines()
    ]
    assert kinds.count("CheckpointSaved") >= 2
    assert kinds[-1] == "JobEnded"
    log = cluster.log.read_text()
    assert "Violation" not in log
    logs = "".join(path.read_text() for path in (job.folder / "logs").glob("*.log"))
    told = log + logs + job.text() + (job.folder / "job.json").read_text() + str(seen)
    assert not any(secret in told for secret in cluster.secrets)


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path, cluster: JwtCluster) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    stranger = Signer(nkeys.PREFIX_BYTE_ACCOUNT)
    for role in ROLES:
        cluster.write_creds(foreign / f"{role}.creds", role, build_access(role, JOB), by=stranger)
    other = JwtCluster(tmp_path / "other", JOB, jetstream=False)
    trust, creds = ("--nats-tls-ca", cluster.ca), ("--nats-creds", str(cluster.creds))
    wrong = ("--nats-creds", str(foreign))
    others = ("--nats-creds", str(other.creds), "--nats-tls-ca", other.ca)
    cases = {
        "foreign credentials": (3, "refuses the credentials", (cluster.url, *wrong, *trust)),
        "unknown authority": (3, "self-signed certificate", (cluster.url, *creds)),
        "no JetStream": (3, "JetStream is not there", (other.url, *others)),
        "in the open": (2, "is not encrypted", ("nats://nats.example:4222", *creds, *trust)),
    }
    (tmp_path / "script.py").write_text("print('it ran')\n")
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "perdure", "run", "--name", JOB, "--nats", *args, "script.py"],
            env=dict(os.environ, PERDURE_HOME=str(tmp_path / f"home-{number}")), cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number, (name, (_, _, args)) in enumerate(cases.items())
    }  # fmt: skip
    try:
        for name, (code, words, _) in cases.items():
            output = running[name].communicate(timeout=PATIENCE_S)[0]
            assert running[name].returncode == code, f"{name}: {output}"
            errors = re.findall(r"^perdure: error: .*$", output, re.MULTILINE)
            assert len(errors) == 1, f"{name}: {output}"
            assert words in errors[0], f"{name}: {output}"
            assert "hint: " in output
            assert "Traceback" not in output
            assert "it ran" not in output
            assert not any(secret in output for secret in cluster.secrets)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
        other.kill()


async def connect_before_they_expire(cluster: JwtCluster, endpoint: Endpoint) -> NatsBus:
    """Return a connection by credentials that expire soon; a busy machine is given longer ones."""
    access, lasts_s = build_access("operator", JOB), 3.0
    while True:
        until_s = time.time() + lasts_s
        cluster.write_creds(Path(endpoint.creds), "operator", access, expires_s=until_s)
        try:
            return await NatsBus.connect(endpoint, timeout_s=lasts_s)
        except PlatformError:
            assert lasts_s < PATIENCE_S
            lasts_s *= 3


async def test_credentials_that_expire_are_read_anew(tmp_path: Path, cluster: JwtCluster) -> None:
    access = build_access("operator", JOB)
    path = cluster.creds / "operator.creds"
    ca = Path(cluster.ca).read_text()
    endpoint = Endpoint(cluster.url, "", 0.0, user="operator", creds=str(path), ca=ca)
    bus = await connect_before_they_expire(cluster, endpoint)
    sender = await NatsBus.connect(
        Endpoint(
            cluster.url,
            "",
            0.0,
            user="controller",
            creds=str(cluster.creds / "controller.creds"),
            ca=ca,
        ),
        timeout_s=PATIENCE_S,
    )
    heard = asyncio.Event()
    await bus.subscribe(access.subscribe[0], lambda data: heard.set())
    async with asyncio.timeout(PATIENCE_S):
        while bus.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        cluster.write_creds(path, "operator", access)
        while not heard.is_set():
            await sender.publish(access.subscribe[0], b"{}")
            await asyncio.sleep(0.1)
    assert bus.reconnects >= 1
    await bus.close()
    await sender.close()
