"""D3: a hostile machine with a real invitation to a free place, and a job that trains on."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import (
    Admission,
    Command,
    CommandReply,
    Endpoint,
    EventBatch,
    EventMessage,
    JoinRequest,
    NodeOrder,
    stream_journal,
    subject_commands,
    subject_events,
    subject_joins,
    subject_journal,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, RequestError
from perdure.model.events import AnyEvent, CommandReceived, JobEnded, RankExited
from perdure.model.failures import ExitRecord
from perdure.model.signals.progress import RankAccount
from perdure.service.access.joining import ask_place, read_invitation
from perdure.service.jobfiles import MINE
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S, wait_until

JOB = "prey"


def lies() -> list[AnyEvent]:
    record = ExitRecord(rank=0, generation=0, pid=1, at_s=1.0, code=1)
    return [
        CommandReceived(id="x", kind="kill"),
        JobEnded(status="failed", exit_code=1, reason="", at_s=1.0),
        RankExited(node=0, record=record, account=RankAccount(), detected_s=1.0),
    ]


async def attack(admission: Admission) -> dict[str, Any]:
    """Try everything with the login of node 1; return what came of it."""
    heard: list[str] = []
    bus = await NatsBus.connect(admission.endpoint, timeout_s=PATIENCE_S)
    try:
        for subject in (">", "perdure.>", "_INBOX.>", "$JS.>", subject_orders(JOB, 0),
                        subject_events(JOB, 0), subject_commands(JOB)):  # fmt: skip
            await bus.subscribe(subject, lambda data, s=subject: heard.append(s))  # type: ignore[misc]
        kill = encode(Command(id="k", kind="kill"))
        stream = stream_journal(JOB)
        asked = {
            subject_commands(JOB): kill,
            subject_events(JOB, 0): encode(EventMessage(0, (EventBatch("a0-1", 1, (lies()[0],)),))),
            subject_orders(JOB, 0): encode(NodeOrder(controller="evil")),
            subject_journal(JOB): b"{}\n",
            f"$JS.API.STREAM.PURGE.{stream}": b"",
            f"$JS.API.STREAM.DELETE.{stream}": b"",
            f"$JS.API.CONSUMER.CREATE.{stream}": b"{}",
            f"$JS.API.DIRECT.GET.{stream}": b'{"seq":1}',
        }
        answered = []
        for subject, data in asked.items():
            with contextlib.suppress(RequestError):
                await bus.request(subject, data, timeout_s=0.2)
                answered.append(subject)
        told = []
        for seq, event in enumerate(lies(), 1):
            message = EventMessage(1, (EventBatch("a1-evil", seq, (event,)),))
            told.append(
                await bus.request(subject_events(JOB, 1), encode(message), timeout_s=PATIENCE_S)
            )
    finally:
        await bus.close()
    return {"heard": heard, "answered": answered, "told": told, "cut": send_too_much(admission)}


def send_too_much(admission: Admission) -> bool:
    """Return whether the server hangs up on a message of 9 MB."""
    host, port = admission.endpoint.url.removeprefix("nats://").split(":")
    endpoint = admission.endpoint
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        login = json.dumps({"user": endpoint.user, "pass": endpoint.token, "verbose": False})
        raw.sendall(f"CONNECT {login}\r\nPUB {subject_events(JOB, 1)} 9000000\r\n".encode())
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := raw.recv(65536):
                answer += chunk
    return b"Maximum Payload Violation" in answer


async def send(endpoint: Endpoint, request: bytes) -> CommandReply:
    """Ask for a place, in the very bytes of `request`."""
    bus = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)
    try:
        answer = await bus.request(subject_joins(JOB), request, timeout_s=PATIENCE_S)
        return decode(answer, CommandReply)  # type: ignore[no-any-return]
    finally:
        await bus.close()


def join(home: Path, invitation: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "perdure", "node", "join", "-", "--wait", "300"],
        input=invitation, env=dict(os.environ, PERDURE_HOME=str(home)), cwd=home.parent,
        capture_output=True, text=True, timeout=2 * PATIENCE_S,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_a_hostile_machine_with_an_invitation_is_no_operator(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(
        JOB, "-n", "1", "--spares", "1", "--remote", "1", str(SCRIPTS / "train_paced.py"),
        "--trail", str(tmp_path), "--steps", "100000", "--step-s", "0.05",
    )  # fmt: skip
    job.wait_step(3)
    text = job.cli("node", "invite", JOB).stdout
    invitation = read_invitation(text.encode())
    admission = asyncio.run(ask_place(invitation, "evil", wait_s=PATIENCE_S))
    assert (admission.node, admission.endpoint.user) == (1, "agent-1")
    found = asyncio.run(attack(admission))
    assert found["heard"] == []
    assert found["answered"] == []
    assert found["told"] == [b'{"seqs":{"a1-evil":%d},"term":1}' % seq for seq in (1, 2, 3)]
    assert found["cut"]
    job.wait_step(job.state()["step"] + 10)

    log = (job.folder / "logs" / "nats-server.log").read_text()
    assert 'user:agent-1" - Publish Violation' in log
    assert 'user:agent-1" - Subscription Violation' in log
    log = (job.folder / "logs" / "controller.log").read_text()
    assert "CommandReceived is not for the agent of node 1" in log

    spent = join(tmp_path / "elsewhere", text)
    assert spent.returncode == 4
    assert f"invitation {invitation.id} is spent" in spent.stderr
    assert "evil" not in spent.stderr, "who holds a copy does not learn the machine's name"
    short = job.cli("node", "invite", JOB, "--expires", "1s").stdout
    other = job.cli("node", "invite", JOB).stdout
    job.cli("node", "invite", JOB, "--revoke", json.loads(other)["id"])
    wait_until(lambda: "expired" in job.cli("node", "invite", JOB, "--list").stdout, "its end")
    for one, word in ((short, "expired"), (other, "was revoked")):
        refused = join(tmp_path / "elsewhere", one)
        assert (refused.returncode, word in refused.stderr) == (4, True), refused.stderr
    rows = json.loads(job.cli("node", "invite", JOB, "--list", "--json").stdout)["invitations"]
    assert [row["state"] for row in rows] == ["spent", "expired", "revoked"]
    assert [row["nodes"] for row in rows] == [[1], [], []]
    request = encode(JoinRequest(
        id="same", machine="evil", host="evil", invitation=invitation.id, secret=invitation.secret,
        speaks=MINE,
    ))  # fmt: skip
    told = asyncio.run(send(invitation.endpoint, request))
    assert told.result["admission"]["endpoint"]["token"] == admission.endpoint.token
    events = (job.folder / "journal.jsonl").read_text()
    assert '"InvitationUsed"' in events
    assert invitation.secret not in events

    said = job.cli("node", "invite", JOB, "--revoke", invitation.id, "--end-login").stdout
    assert f"{JOB}: the login of node 1 was ended" in said
    with pytest.raises(PlatformError):
        asyncio.run(NatsBus.connect(admission.endpoint, timeout_s=2))
    told = asyncio.run(send(invitation.endpoint, request))
    assert (told.ok, told.reason) == (False, f"invitation {invitation.id} was revoked")
    job.wait_step(job.state()["step"] + 10)
    job.cli("stop", JOB)
    assert job.wait() == 0, job.text()[-2000:]
