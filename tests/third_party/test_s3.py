"""`checkpoint.url` in an object store: moto's S3 server on loopback, asked by s3fs as published.

`make third-party` installs both.
"""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

from tests.e2e.conftest import start  # noqa: E402, F401  (a fixture)
from tests.e2e.exact import Start  # noqa: E402
from tests.e2e.own_kills import DECLARED, read_lives, run_saver, wait_saves  # noqa: E402
from tests.waiting import PATIENCE_S, wait_until  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long]
BUCKET = "runs"


class Store:
    """An S3 server with one bucket."""

    def __init__(self, log: Path) -> None:
        """Start it at a free port."""
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
        try:
            wait_until(
                lambda: re.search(r"http://127\.0\.0\.1:\d+", log.read_text()), "an S3 server"
            )
        except BaseException:
            self.end()
            raise
        self.url = re.findall(r"http://127\.0\.0\.1:\d+", log.read_text())[0]

    def connect(self) -> Any:
        return s3fs.S3FileSystem(endpoint_url=self.url, skip_instance_cache=True)

    def list_names(self, folder: str) -> list[str]:
        return [name for name in self.connect().find(folder) if "/" in name]

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    found = Store(tmp_path / "s3.log")
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        found.connect().mkdir(BUCKET)
        yield found
    finally:
        found.end()


@pytest.mark.parametrize("form", ["torch", "trainer", "dcp", "deepspeed"])
def test_a_machine_without_a_checkpoint_fetches_the_newest_copy(
    start: Start,  # noqa: F811
    tmp_path: Path,
    store: Store,
    form: str,
) -> None:
    job = run_saver(start, tmp_path, form, (DECLARED[form],), f'url = "s3://{BUCKET}/one"')
    wait_saves(job, tmp_path, 0, 3)
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    step = read_lives(tmp_path)[0][-1][1]
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "enough").unlink()
    again = start("own", "-c", "job.toml")
    wait_saves(again, tmp_path, 1, 1)
    assert read_lives(tmp_path)[1][0] == ("began", step), again.text()
    (tmp_path / "enough").touch()
    assert again.wait() == 0, again.text()
    tags = [name for name in store.list_names(f"{BUCKET}/one") if name.endswith("/latest")]
    copies = {name.split("/")[4] for name in store.list_names(f"{BUCKET}/one")} - {"latest"}
    assert len(tags) == 1
    assert len(copies) <= 2, copies


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "gone"])
def test_a_store_that_hangs_or_is_gone_costs_no_step(
    start: Start,  # noqa: F811
    tmp_path: Path,
    store: Store,
    number: int,
) -> None:
    job = run_saver(
        start, tmp_path, "trainer", (DECLARED["trainer"],), f'url = "s3://{BUCKET}/one"'
    )
    job.wait_until(lambda: store.list_names(f"{BUCKET}/one"), "a copy")
    store.process.send_signal(number)
    saves = len(read_lives(tmp_path)[0])
    wait_saves(job, tmp_path, 0, saves + 20)
    job.kill("perdure rank")
    wait_saves(job, tmp_path, 1, 20)
    if number == signal.SIGSTOP:
        store.process.send_signal(signal.SIGCONT)
        names = store.list_names(f"{BUCKET}/one")
        job.wait_until(lambda: set(store.list_names(f"{BUCKET}/one")) - set(names), "a next copy")
    (tmp_path / "enough").touch()
    assert job.wait() == 0, job.text()
    assert job.state()["restarts"] == 1
