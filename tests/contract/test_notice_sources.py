"""Sources of notices against services that answer what each platform's documents say."""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.adapters.notices import (
    AwsNotices,
    AzureNotices,
    FileNotices,
    GcpMaintenance,
    GcpPreempted,
    detect_platform,
    open_sources,
)
from perdure.adapters.notices.kubernetes import KubernetesNode, is_pod
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.events import Announced, PreemptionNoticed, PreemptionWithdrawn
from perdure.model.job import PreemptionConfig
from perdure.service.agent.notices import NoticeWatch
from perdure.service.ports import NoticeSource
from tests.fakes import FakeNotices
from tests.metadata import Aws, Azure, Cluster, Gcp
from tests.waiting import PATIENCE_S


async def test_aws_says_when_and_withdraws_a_recommendation() -> None:
    with Aws() as service:
        source = AwsNotices(service.url)
        assert await source.read() == ()
        service.recommend()
        (risk,) = await source.read()
        assert (risk.certain, risk.reason) == (False, "rebalance recommendation")
        service.rebalance = {}
        began_s = time.time()
        service.interrupt(120.0)
        (notice,) = await source.read()
        assert notice.reason == "spot terminate"
        assert began_s + 119.0 < notice.gone_s <= time.time() + 120.0  # In whole seconds.
        assert service.tokens == 1, "one token is enough"
        service.tokens += 1  # It is over: the service knows another one now.
        assert await source.read() == (notice,)
        service.interrupt(0.0, "hibernate")
        (at_once,) = await source.read()
        assert (at_once.gone_s, at_once.grace_s) == (None, 0.0)


async def test_taints_of_a_pods_node_are_notices(tmp_path: Path) -> None:
    with Cluster(tmp_path) as service:
        assert is_pod(service.env, tmp_path)
        assert not is_pod({}, tmp_path)
        assert not is_pod(service.env, tmp_path / "no-account")
        source = KubernetesNode(service.env, tmp_path)
        service.taint("nvidia.com/gpu")
        assert await source.read() == ()
        service.taint("node.kubernetes.io/unschedulable")
        (risk,) = await source.read()
        assert (risk.certain, risk.reason) == (False, "the node is cordoned")
        service.taint("aws-node-termination-handler/spot-itn")
        _, notice = await source.read()
        assert (notice.certain, notice.reason, notice.grace_s) == (True, "spot interruption", 60.0)
        service.token = "another"
        with pytest.raises(PlatformError, match="answers 403") as refused:
            await source.read()
        assert "get nodes" in refused.value.hint
        (tmp_path / "token").write_text("another")  # As the kubelet does, every hour.
        assert len(await source.read()) == 2


async def test_gcp_answers_when_the_value_changes() -> None:
    with Gcp() as service:
        preempted, maintenance = GcpPreempted(service.url), GcpMaintenance(service.url)
        assert await preempted.read() == await maintenance.read() == ()
        waiting = asyncio.create_task(preempted.read())
        async with asyncio.timeout(PATIENCE_S):
            while not any("wait_for_change=true" in asked for asked in service.requests):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not waiting.done()
        service.set("preempted", "TRUE")
        (notice,) = await asyncio.wait_for(waiting, PATIENCE_S)
        assert (notice.reason, notice.grace_s) == ("preempted", 30.0)
        service.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        assert await maintenance.read() == (), "a live migration takes nothing away"
        service.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
        (ends,) = await maintenance.read()
        assert ends.grace_s == 60.0


async def test_azure_tells_of_its_own_machine_only_and_takes_an_answer() -> None:
    with Azure() as service:
        source = AzureNotices(service.url)
        service.schedule("Preempt", 30.0, "vm-2")
        service.schedule("Freeze", 900.0)
        assert await source.read() == ()
        began_s = time.time()
        mine = service.schedule("Preempt", 30.0, "vm-1", "vm-2")
        (notice,) = await source.read()
        assert (notice.id, notice.reason) == (mine, "preempt")
        assert began_s + 29.0 < notice.gone_s <= time.time() + 30.0
        await source.acknowledge(mine)
        assert service.started == [mine]
        service.events[-1] |= {"EventStatus": "Started", "NotBefore": ""}
        (begun,) = await source.read()
        assert (begun.gone_s, begun.grace_s) == (None, 0.0)
        service.events.clear()
        assert await source.read() == ()


async def test_a_file_is_a_notice_while_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    source = FileNotices(str(path))
    assert await source.read() == ()
    path.write_text("12.5 queue is full\n")
    os.utime(path, (1000.0, 1000.0))
    (notice,) = await source.read()
    assert (notice.gone_s, notice.reason) == (1012.5, "queue is full")
    path.write_text("soon")
    (unclear,) = await source.read()
    assert (unclear.gone_s, unclear.grace_s) == (None, None), "the configured grace"
    path.unlink()
    assert await source.read() == ()


BROKEN = (
    "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot json!",
    "HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n",
    "SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "",
)


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("make", [AwsNotices, AzureNotices, GcpPreempted])
async def test_nonsense_is_a_platforms_error(
    text: str, make: Callable[[str], NoticeSource]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        source = make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            found = await source.read()
        except PlatformError:
            return
        assert make is GcpPreempted
        assert found == (), "a value that is not TRUE"


async def test_nobody_there_is_said_once_and_asked_less_and_less(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    with socket.socket() as taken:  # No server listens there.
        taken.bind(("127.0.0.1", 0))
        source = AwsNotices(f"http://127.0.0.1:{taken.getsockname()[1]}")
        watch = NoticeWatch(
            PreemptionConfig(), [source], node=0, report=print, now=lambda: 0.0, pause=pause
        )
        with pytest.raises(asyncio.CancelledError):
            await watch.watch(source)
    assert len(caplog.records) == 1
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60.0


async def test_each_notice_is_told_once_and_its_withdrawal() -> None:
    told: list[PreemptionNoticed | PreemptionWithdrawn] = []
    one = Announced(id="a", reason="preempt", gone_s=5030.0)
    risk = Announced(id="r", reason="risk", certain=False)
    levels = (
        (), (one,), (one, risk), PlatformError("away"), (one, risk), (one,),
        (Announced(id="a", reason="preempt", gone_s=5010.0),), (),
    )  # fmt: skip
    source = FakeNotices(*levels)
    watch = NoticeWatch(
        PreemptionConfig(), [source], node=3, report=told.append,
        now=lambda: 100.0, wall=lambda: 5000.0,
    )  # fmt: skip
    for _ in levels:
        try:
            watch.take(source, await source.read())
        except PlatformError:
            continue
    kinds = [(type(event).__name__, event.id, getattr(event, "grace_s", None)) for event in told]
    assert kinds == [
        ("PreemptionNoticed", "a", 30.0),
        ("PreemptionNoticed", "r", 0.0),
        ("PreemptionWithdrawn", "r", None),
        ("PreemptionNoticed", "a", 10.0),
        ("PreemptionWithdrawn", "a", None),
    ]
    watch.warn("SIGTERM")
    assert (told[-1].source, told[-1].id) == ("SIGTERM", "SIGTERM")


async def test_what_ends_when_its_time_has_come_is_not_withdrawn() -> None:
    """An event that has happened leaves the list as well."""
    told: list[PreemptionNoticed | PreemptionWithdrawn] = []
    now = 100.0
    source = FakeNotices(())
    watch = NoticeWatch(PreemptionConfig(), [source], node=1, report=told.append, now=lambda: now)
    watch.take(source, [Announced(id="a", reason="spot terminate", grace_s=30.0)])
    now = 131.0
    watch.take(source, [])
    assert [type(event) for event in told] == [PreemptionNoticed]


async def test_a_notice_says_whether_the_ranks_handle_sigterm() -> None:
    told: list[PreemptionNoticed | PreemptionWithdrawn] = []
    source = FakeNotices(())
    watch = NoticeWatch(
        PreemptionConfig(), [source], node=1, report=told.append, now=lambda: 1.0,
        handles=lambda: True,
    )  # fmt: skip
    certain = Announced(id="a", reason="terminate", grace_s=30.0)
    watch.take(source, [certain, Announced(id="r", reason="rebalance", certain=False)])
    assert [event.handled for event in told] == [True, False], "a risk ends nothing"


@pytest.mark.parametrize(
    ("files", "platform"),
    [
        ({"sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"product_name": "Google Compute Engine"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "QEMU", "chassis_asset_tag": "Microsoft"}, ""),
    ],
)
def test_the_firmware_says_whose_machine_it_is(
    files: dict[str, str], platform: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert detect_platform(tmp_path) == platform
    found = [source.name for source in open_sources(PreemptionConfig(), 0, {}, tmp_path)]
    assert set(found) == ({platform} if platform else set())


def test_what_is_configured_is_opened_for_each_node(tmp_path: Path) -> None:
    config = PreemptionConfig(platform="none", file=str(tmp_path / "node-{node}"))
    (source,) = open_sources(config, 2, {})
    assert isinstance(source, FileNotices)
    wrong = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "ftp://x"}
    with pytest.raises(ConfigError, match="no URL of a metadata service"):
        open_sources(PreemptionConfig(platform="aws"), 0, wrong)
