"""torchft's own client against perdure's lighthouse, the real process, with the bus away."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.model.bus.endpoint import Endpoint
from perdure.model.codec import encode
from perdure.model.job import JobSpec, TorchftConfig
from perdure.service.jobfiles import read_document, write_atomic
from perdure.service.jobfolders import paths_of
from perdure.service.lighthouse.remembered import LighthouseFile

torchft = pytest.importorskip("torchft.coordination")
pytestmark = [pytest.mark.torch]
TIMEOUT = timedelta(seconds=20)


class Lighthouse:
    """One job's lighthouse, killed and started again at will."""

    def __init__(self, home: Path) -> None:
        self.home, self.paths = home, paths_of(str(home), "lit")
        spec = JobSpec(name="lit", script="x.py", torchft=TorchftConfig(replicas=2))
        write_atomic(self.paths.spec, encode(spec))
        write_atomic(
            self.paths.credential("lighthouse"), encode(Endpoint("nats://127.0.0.1:1", "", 0.0))
        )
        self.start()

    def start(self) -> None:
        env = os.environ | {"PERDURE_HOME": str(self.home)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "perdure", "lighthouse", "lit"], env=env
        )
        before = self.file()
        deadline = time.monotonic() + 60
        while (now := self.file()) is None or now == before:
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def file(self) -> LighthouseFile | None:
        return read_document(self.paths.lighthouse, LighthouseFile)

    @property
    def address(self) -> str:
        known = self.file()
        assert known is not None
        return f"http://127.0.0.1:{known.port}"

    def kill(self) -> None:
        """Kill it, child and all."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def lighthouse(tmp_path: Path) -> Iterator[Lighthouse]:
    running = Lighthouse(tmp_path)
    yield running
    running.kill()


@pytest.fixture
def ask(lighthouse: Lighthouse) -> Iterator[Callable[..., "Future[Any]"]]:
    pool = ThreadPoolExecutor(8)

    def submit(name: str, step: int) -> "Future[Any]":
        client = torchft.LighthouseClient(lighthouse.address, connect_timeout=TIMEOUT)
        return pool.submit(
            client.quorum, name, TIMEOUT, address=f"http://{name}:1", store_address=name, step=step
        )

    yield submit
    pool.shutdown(wait=False, cancel_futures=True)


def test_torchfts_client_gets_its_quorum(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    alone = ask("train_0:a", 0).result(10)
    assert [m.replica_id for m in alone.participants] == ["train_0:a"]
    client = torchft.LighthouseClient(lighthouse.address, connect_timeout=TIMEOUT)
    client.heartbeat("train_0:a")
    second = ask("train_1:b", 0)
    time.sleep(0.1)
    first = ask("train_0:a", 1)
    both = [first.result(10), second.result(10)]
    assert both[0].quorum_id == both[1].quorum_id > alone.quorum_id
    assert [m.replica_id for m in both[0].participants] == ["train_0:a", "train_1:b"]
    assert [m.address for m in both[0].participants] == ["http://train_0:a:1", "http://train_1:b:1"]
    assert [m.step for m in both[0].participants] == [1, 0]


def test_the_one_that_serves_is_replaced_at_once(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    ask("train_0:a", 0).result(10)
    began = lighthouse.file()
    assert began is not None
    for number in (signal.SIGKILL, signal.SIGSTOP):
        before = lighthouse.file()
        psutil.Process(lighthouse.process.pid).children()[0].send_signal(number)
        deadline = time.monotonic() + 10
        while lighthouse.file() == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    after = ask("train_0:a", 1).result(10)
    assert after.quorum_id == 1
    assert lighthouse.process.poll() is None
    now = lighthouse.file()
    assert now is not None
    assert now.port == began.port


def test_a_killed_lighthouse_comes_back_with_its_members_and_newer_ids(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    ask("train_0:a", 0).result(10)
    second = ask("train_1:b", 0)
    time.sleep(0.1)
    before = ask("train_0:a", 1).result(10)
    second.result(10)
    address = lighthouse.address
    lighthouse.kill()
    lighthouse.start()
    assert lighthouse.address == address
    one = ask("train_0:a", 2)
    time.sleep(0.3)
    assert not one.done()  # No solo quorum: the other is remembered.
    same = ask("train_1:b", 1).result(10)
    assert same.quorum_id == one.result(10).quorum_id == before.quorum_id
    third = ask("train_2:c", 0)
    time.sleep(0.1)
    ask("train_0:a", 3)
    ask("train_1:b", 2)
    assert third.result(10).quorum_id >= 1000
