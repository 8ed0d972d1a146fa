"""torchft's own client against perdure's lighthouse, the real process, with the bus away."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.lighthouse import SERVICE, _field
from perdure.model.codec import encode
from perdure.model.job import JobSpec, TorchftConfig
from perdure.service.jobfiles import read_document, write_atomic
from perdure.service.jobfolders import paths_of
from perdure.service.lighthouse.remembered import LighthouseFile
from tests.waiting import PATIENCE_S, wait_until

torchft = pytest.importorskip("torchft.coordination")
grpc = pytest.importorskip("grpc")
pytestmark = [pytest.mark.torch]
TIMEOUT = timedelta(seconds=PATIENCE_S)


class Lighthouse:
    """One job's lighthouse, killed and started again at will."""

    def __init__(self, home: Path) -> None:
        self.home, self.paths = home, paths_of(str(home), "lit")
        # No group here sends heartbeats, and a busy machine may pause the test for long.
        torchft = TorchftConfig(replicas=2, silent_s=3600.0)
        spec = JobSpec(name="lit", script="x.py", torchft=torchft)
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

        def serves() -> bool:
            assert self.process.poll() is None
            return self.file() not in (None, before)

        wait_until(serves, "lighthouse")

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


def meet(ask: Callable[..., "Future[Any]"], name: str, step: int, other: "Future[Any]") -> Any:
    """Have `name` ask, step by step, until the one who has asked as `other` is in its quorum.

    Which of two requests comes first is not known; a quorum of one alone is then left behind.
    """
    while True:
        own = ask(name, step).result(PATIENCE_S)
        if len(own.participants) > 1:
            assert other.result(PATIENCE_S).quorum_id == own.quorum_id
            return own
        step += 1


def test_torchfts_client_gets_its_quorum(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    alone = ask("train_0:a", 0).result(PATIENCE_S)
    assert [m.replica_id for m in alone.participants] == ["train_0:a"]
    client = torchft.LighthouseClient(lighthouse.address, connect_timeout=TIMEOUT)
    client.heartbeat("train_0:a")
    second = ask("train_1:b", 0)
    both = meet(ask, "train_0:a", 1, second)
    assert both.quorum_id > alone.quorum_id
    assert [m.replica_id for m in both.participants] == ["train_0:a", "train_1:b"]
    assert [m.address for m in both.participants] == ["http://train_0:a:1", "http://train_1:b:1"]
    (first, other) = (m.step for m in both.participants)
    assert first >= 1
    assert other == 0


def test_a_large_request_of_a_stranger_is_refused(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    options = [("grpc.enable_http_proxy", 0)]
    target = lighthouse.address.removeprefix("http://")
    with grpc.insecure_channel(target, options=options) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Heartbeat")
        call(_field(1, b"train_0:a"), timeout=PATIENCE_S)
        with pytest.raises(grpc.RpcError) as refused:
            call(_field(1, bytes(1 << 20)), timeout=PATIENCE_S)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask("train_0:a", 0).result(PATIENCE_S).quorum_id > 0


def test_the_one_that_serves_is_replaced_at_once(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    ask("train_0:a", 0).result(PATIENCE_S)
    began = lighthouse.file()
    assert began is not None
    for number in (signal.SIGKILL, signal.SIGSTOP):
        before = lighthouse.file()
        psutil.Process(lighthouse.process.pid).children()[0].send_signal(number)
        wait_until(lambda before=before: lighthouse.file() != before, "next lighthouse")
    after = ask("train_0:a", 1).result(PATIENCE_S)
    assert after.quorum_id == 1
    assert lighthouse.process.poll() is None
    now = lighthouse.file()
    assert now is not None
    assert now.port == began.port


def test_a_killed_lighthouse_comes_back_with_its_members_and_newer_ids(
    lighthouse: Lighthouse, ask: Callable[..., "Future[Any]"]
) -> None:
    ask("train_0:a", 0).result(PATIENCE_S)
    before = meet(ask, "train_0:a", 1, ask("train_1:b", 0))
    address = lighthouse.address
    lighthouse.kill()
    lighthouse.start()
    assert lighthouse.address == address
    step = max(member.step for member in before.participants)
    one = ask("train_0:a", step + 1)
    same = ask("train_1:b", 1).result(PATIENCE_S)
    assert len(one.result(PATIENCE_S).participants) == 2  # No solo quorum: both are remembered.
    assert same.quorum_id == one.result(PATIENCE_S).quorum_id == before.quorum_id
    third = ask("train_2:c", 0)
    while not third.done():
        step += 1
        both = [ask("train_0:a", step + 1), ask("train_1:b", step)]
        assert all(len(each.result(PATIENCE_S).participants) > 1 for each in both)
    assert third.result(PATIENCE_S).quorum_id >= 1000
