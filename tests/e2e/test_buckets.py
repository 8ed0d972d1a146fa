"""Checkpoints in an S3 bucket: what a SIGKILL amid an upload leaves there is never resumed from."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box import find_port
from tests.e2e.exact import SCRIPT, Start
from tests.e2e.harness import read_trail
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Serve S3's protocol by moto, with a bucket in it."""
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    port = find_port()
    url = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with open(tmp_path / "moto.out", "wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_until(lambda: answers(port), "moto's server")
        files = s3fs.S3FileSystem(
            endpoint_url=url, key="key", secret="secret", skip_instance_cache=True
        )
        files.mkdir("bucket")
        yield files
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_killed_amid_an_upload_resumes_from_the_checkpoint_before(
    start: Start, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own machine is gone as well: what was staged there is removed, and only the bucket left.

    What is cut off has no manifest, and is not the one that `latest` names.
    """
    trail = tmp_path / "trail"
    trail.mkdir()
    config = tmp_path / "b.toml"
    script = ["--trail", str(trail), "--steps", "60"]
    config.write_text(
        f'script = "{SCRIPT}"\nargs = {json.dumps(script)}\n[restart]\nmax_restarts = 0\n'
        '[checkpoint]\nevery_steps = 10\nurl = "s3://bucket/run"\n'
    )
    words = ("-n", "2", "-c", str(config))
    with monkeypatch.context() as patched:
        patched.setenv("PERDURE_FAILPOINTS", "checkpoint/upload=crash,nth=8")
        assert start("b", *words).wait() != 0
    cut = [f for f in list_checkpoints(s3) if not s3.exists(f"{f}/manifest.json")]
    assert len(cut) == 1
    latest = s3.cat_file("bucket/run/latest").decode()
    assert s3.exists(f"bucket/run/{latest}/manifest.json")
    assert cut[0] > f"bucket/run/{latest}"
    staged = list(tmp_path.glob("state/jobs/b/**/staging-*"))
    assert staged
    for folder in staged:
        shutil.rmtree(folder)

    again = start("b", *words)
    assert again.wait() == 0, again.text()[-3000:]
    events = again.cli("events", "b", "--all", "--json").stdout.splitlines()
    restored = [e for e in map(json.loads, events) if e["kind"] == "CheckpointRestored"]
    assert {e["step"] for e in restored} == {int(latest.removeprefix("step-"))}
    runs = read_trail(trail)
    assert {step for _, step in runs} >= set(range(60))
    for made in runs.values():  # What was made again is the same to the bit.
        assert len({(loss, tuple(samples)) for loss, samples in made}) == 1
    newest = s3.cat_file("bucket/run/latest", start=0).decode()
    manifest = json.loads(s3.cat_file(f"bucket/run/{newest}/manifest.json"))
    for entry in manifest["files"]:
        assert s3.info(f"bucket/run/{newest}/{entry['path']}")["size"] == entry["bytes"]


def list_checkpoints(s3: Any) -> list[str]:
    s3.invalidate_cache()
    return [f for f in s3.ls("bucket/run", detail=False) if "/step-" in f]
