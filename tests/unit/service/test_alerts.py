# ruff: noqa: ASYNC110
"""Alerts that go out, are held back, tried again, or given up: never in the loop's way."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.events import ControllerLost, JobEnded, JournalEntry
from perdure.model.job import AlertsConfig
from perdure.service.controller import alerts
from perdure.service.controller.alerts import Alerter, read_url

EVENTS = ("part", "ended")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "TIMEOUT_S", PATIENCE_S)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def entry(seq: int) -> JournalEntry:
    lost = ControllerLost(part=f"agent {seq}", at_s=1.0, pid=1, cause="signal 9", restarted_s=1.0)
    return JournalEntry(seq=seq, at_s=float(seq), body=lost)


def end(seq: int) -> JournalEntry:
    ended = JobEnded(status="done", exit_code=0, reason="r", at_s=1.0)
    return JournalEntry(seq=seq, at_s=float(seq), body=ended)


class Receiver:
    """A web server that answers each request with the next of `statuses`, then with 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses, self.alerts = list(statuses), list[Any]()
        self.requests = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.requests += 1
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.alerts.append(body)
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()
        await writer.wait_closed()


async def deliver(receiver: Receiver, entries: list[JournalEntry], **more: Any) -> Alerter:
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    config = AlertsConfig(webhook=url, events=EVENTS, **more)
    alerter = Alerter("job", config, pause_s=0.01)
    task = asyncio.create_task(alerter.run())
    alerter.note(entries)
    await alerter.flush(PATIENCE_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
    await server.wait_closed()
    return alerter


async def test_a_refusing_receiver_is_asked_again() -> None:
    receiver = Receiver(500, 503)
    await deliver(receiver, [entry(1)])
    assert receiver.requests == 3
    assert receiver.alerts == [
        {"job": "job", "kind": "part", "at_s": 1.0, "seq": 1,
         "summary": "agent 1 died (signal 9) and was started again"}
    ]  # fmt: skip


async def test_what_cannot_be_delivered_is_dropped_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = Receiver(*[500] * 9)
    alerter = await deliver(receiver, [entry(1)])
    assert (receiver.requests, alerter.dropped) == (5, 1)
    assert "alert not delivered by webhook: status 500" in caplog.text


async def test_above_the_limit_they_are_told_of_in_one_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alerts, "PER_MINUTE", 3)
    receiver = Receiver()
    await deliver(receiver, [*(entry(n) for n in range(1, 8)), end(8)])
    assert [(a["kind"], a["seq"]) for a in receiver.alerts] == [
        ("part", 1), ("part", 2), ("part", 3), ("more", 7), ("ended", 8),
    ]  # fmt: skip
    assert receiver.alerts[3]["count"] == 4


async def test_a_command_gets_it_on_its_input_and_a_stuck_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "alert"
    script = f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read())"
    command = (sys.executable, "-c", script)
    config = AlertsConfig(command=command, events=EVENTS)
    alerter = Alerter("job", config)
    task = asyncio.create_task(alerter.run())
    alerter.note([entry(4)])
    await alerter.flush(PATIENCE_S)
    task.cancel()
    assert json.loads(out.read_text())["seq"] == 4

    stuck = AlertsConfig(command=("sleep", "3600"), events=EVENTS)
    monkeypatch.setattr(alerts, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(alerts, "ATTEMPTS", 1)
    alerter = Alerter("job", stuck)
    task = asyncio.create_task(alerter.run())
    alerter.note([entry(n) for n in range(300)])  # more than the queue holds
    assert not alerter.dropped
    async with asyncio.timeout(PATIENCE_S):
        while not alerter.dropped:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def tell_by_apprise(receiver: Receiver, apprise: Callable[[int], str]) -> Alerter:
    """Deliver one alert by addresses made for the receiver's port."""
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    address = apprise(server.sockets[0].getsockname()[1])
    config = AlertsConfig(apprise=address, events=EVENTS)
    alerter = Alerter("job", config, pause_s=0.01)
    task = asyncio.create_task(alerter.run())
    alerter.note([entry(1)])
    await alerter.flush(PATIENCE_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
    await server.wait_closed()
    return alerter


async def test_any_service_of_apprises_is_told_in_words(tmp_path: Path) -> None:
    pytest.importorskip("apprise")

    def write(port: int) -> str:
        lines = f"# whom to tell\n\njson://127.0.0.1:{port}/one\njson://127.0.0.1:{port}/two\n"
        (tmp_path / "addresses").write_text(lines)
        return f"@{tmp_path / 'addresses'}"

    receiver = Receiver(500)  # One refuses: all are asked again.
    alerter = await tell_by_apprise(receiver, write)
    assert alerter.dropped == 0
    assert {(a["title"], a["message"]) for a in receiver.alerts} == {
        ("perdure: job: part", "agent 1 died (signal 9) and was started again")
    }
    assert len(receiver.alerts) == 3


async def test_an_address_that_apprise_does_not_know_is_said_and_not_repeated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("apprise")
    monkeypatch.setattr(alerts, "ATTEMPTS", 2)
    alerter = await tell_by_apprise(Receiver(), lambda port: "nowhere://token-that-is-secret")
    assert alerter.dropped == 1
    assert "address 1 is none that apprise knows" in caplog.text
    assert "secret" not in caplog.text


def test_a_url_may_stand_in_a_file_and_is_never_repeated(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("https://hooks.example/secret\n")
    assert read_url(f"@{tmp_path / 'url'}") == "https://hooks.example/secret"
    with pytest.raises(ValueError, match=r"^alerts\.webhook is no http or https URL$"):
        read_url("file:///etc/passwd?secret")
