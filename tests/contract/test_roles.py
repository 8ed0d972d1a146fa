# ruff: noqa: ASYNC240
"""What each role may do, on a real nats-server; and what a controller makes of bad messages."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cryptography import x509

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.model.bus.wire import (
    CommandReply,
    Endpoint,
    EventAck,
    EventBatch,
    EventMessage,
    read_order,
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_journal,
    subject_notices,
    subject_orders,
    subject_queries,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.events import (
    AnyEvent,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    KeeperLost,
    NodeCordoned,
    NodeLost,
    NodeRegistered,
    QuorumFormed,
    RankExited,
    RanksStarted,
    SettingsChanged,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, NatsConfig
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import RankAccount
from perdure.model.steering import Change
from perdure.model.verdicts import Culprit, Verdict
from perdure.service.access.credentials import (
    make_server,
    renew_logins,
    set_certificate,
    write_credentials,
)
from perdure.service.controller.journal import Journal
from perdure.service.controller.loop import ControllerService
from perdure.service.jobfiles import load_endpoint
from perdure.service.jobfolders import paths_of
from perdure.service.placement import Placement
from tests.contract.test_bus import hear_refusal
from tests.waiting import PATIENCE_S

JOB = "roles.job"
SPEC = JobSpec(script="train.py", name=JOB, nodes=2, spares=0)


class Site:
    """A job's own server with everybody's credentials."""

    def __init__(self, home: Path) -> None:
        self.paths: JobPaths = paths_of(str(home), JOB)
        self.server: NatsServer = make_server(SPEC, self.paths, Placement())
        self.log = home / "nats.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.buses: list[NatsBus] = []

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.server.command(), stdout=log, stderr=log)
        self.server.wait_ready(timeout_s=PATIENCE_S)
        write_credentials(SPEC, self.paths, self.server, url=self.server.url, clock_offset_s=0)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def connect(self, user: str) -> NatsBus:
        self.buses.append(
            await NatsBus.connect(load_endpoint(self.paths, user), timeout_s=PATIENCE_S)
        )
        return self.buses[-1]

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.kill()


@pytest.fixture
async def site(home: Site) -> AsyncIterator[Site]:
    home.start()
    yield home
    await home.close()


async def test_a_login_that_is_ended_is_cut_off_and_its_next_one_works(site: Site) -> None:
    """D3: revoking an invitation left the login that was taken by it for as long as the job ran."""
    heard = await hear(await site.connect("controller"), subject_beats(JOB, 1))
    taken = await site.connect("agent-1")
    kept = load_endpoint(site.paths, "agent-1")
    other = await site.connect("agent-0")
    assert site.process is not None
    renew_logins(site.paths, site.server, [1])
    site.process.send_signal(signal.SIGHUP)

    await until(lambda: not taken.connected, "who came by the old one is cut off")
    assert "Authorization Violation" in await hear_refusal(kept)
    with contextlib.suppress(Exception):
        await taken.publish(subject_beats(JOB, 1), b'{"by": "old"}')
    assert other.connected
    assert heard == []
    await (await site.connect("agent-1")).publish(subject_beats(JOB, 1), b"{}")
    await until(lambda: heard, "the new login's word")
    assert len(heard) == 1


async def until(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


async def hear(bus: NatsBus, *subjects: str) -> list[str]:
    heard: list[str] = []
    for subject in subjects:
        await bus.subscribe(subject, lambda data, s=subject: heard.append(s))  # type: ignore[misc]
    return heard


MAY = {
    "run": {subject_events(JOB, "run"), subject_commands(JOB)},
    "operator": {subject_commands(JOB), subject_queries(JOB), subject_notices(JOB)},
    "agent-0": {subject_events(JOB, 0), subject_beats(JOB, 0)},
    "lighthouse": {subject_events(JOB, "lighthouse")},
    "viewer": {subject_queries(JOB)},
    "worker": {subject_queries(JOB)},
    "monitor": {subject_notices(JOB)},
    "joiner": {subject_joins(JOB)},
}
SUBJECTS = (
    *(subject_events(JOB, sender) for sender in (0, 1, "run", "lighthouse")),
    *(subject_beats(JOB, node) for node in (0, 1)),
    subject_commands(JOB),
    subject_queries(JOB),
    subject_notices(JOB),
    subject_joins(JOB),
)


async def test_each_role_is_heard_where_it_may_and_nowhere_else(site: Site) -> None:
    controller, agent = await site.connect("controller"), await site.connect("agent-1")
    stream = await NatsStream.open(controller, JOB)
    heard = await hear(controller, *SUBJECTS)
    ordered = await hear(agent, subject_orders(JOB, 1), subject_orders(JOB, "all"))
    for user, allowed in MAY.items():
        bus = await site.connect(user)
        orders = () if user == "lighthouse" else (subject_orders(JOB, 1),)
        for subject in (*SUBJECTS, *orders, subject_journal(JOB)):
            await bus.publish(subject, b"{}")
        await bus.client.flush()
        await until(lambda a=allowed: set(heard) >= a, f"{user}: {heard}")
        assert set(heard) == allowed, user
        heard.clear()
    assert ordered == []
    assert await stream.read_last() is None
    text = site.log.read_text()
    assert 'user:worker" - Publish Violation - Subject "perdure.roles_job.commands"' in text
    for name in ("operator", "viewer", "run"):
        assert load_endpoint(site.paths, name).token not in text


async def test_nobody_hears_what_is_not_for_him(site: Site) -> None:
    controller, viewer = await site.connect("controller"), await site.connect("viewer")
    others = [await site.connect(user) for user in ("agent-0", "worker", "monitor", "operator")]
    private = (subject_orders(JOB, 1), subject_events(JOB, 1), "_INBOX.agent-1.>", "perdure.>")
    heard = [await hear(bus, *private) for bus in (viewer, *others)]
    seen = await hear(viewer, subject_journal(JOB))
    await controller.publish(subject_orders(JOB, 1), b"{}")
    await controller.publish("_INBOX.agent-1.x", b"{}")
    await controller.publish(subject_journal(JOB), b"{}")
    await until(lambda: seen, "nothing")
    assert heard == [[], [], [], [], []]


JOURNAL = "PERDURE_roles_job_JOURNAL"
ASKED_OF_JETSTREAM = ("DIRECT.GET", "STREAM.INFO", "STREAM.MSG.GET")
TARGETS = (
    subject_journal(JOB),
    subject_orders(JOB, 1),
    f"$JS.API.STREAM.PURGE.{JOURNAL}",
    f"$JS.API.STREAM.DELETE.{JOURNAL}",
)
"""Where nobody but the controller may publish."""


async def test_no_login_has_jetstream_answer_where_it_may_not_publish(site: Site) -> None:
    """JetStream answers past the permissions: a viewer could purge and delete the journal."""
    stream = await NatsStream.open(await site.connect("controller"), JOB)
    await stream.append(b"line\n", expected_last=0, message_id="a")
    ordered = await hear(await site.connect("agent-1"), subject_orders(JOB, 1))
    for user in ("agent-0", "joiner", "lighthouse", "monitor", "viewer", "worker"):
        bus = await site.connect(user)
        for question in ASKED_OF_JETSTREAM:
            for target in TARGETS:
                subject = f"$JS.API.{question}.{JOURNAL}"
                for data in (b'{"seq":1}', b'{"seq":99}', b""):
                    await bus.client.publish(subject, data, reply=target)
        await bus.client.flush()
    assert await NatsStream(await site.connect("operator"), JOB).read_all() == [b"line\n"]
    assert ordered == []


async def test_a_wrong_password_or_none_is_refused_and_said(site: Site) -> None:
    good = load_endpoint(site.paths)
    for bad in (
        Endpoint(url=good.url, token="", clock_offset_s=0),
        Endpoint(url=good.url, token="guess", clock_offset_s=0, user="operator"),
        Endpoint(url=good.url, token=good.token, clock_offset_s=0, user="controller"),
    ):
        assert "Authorization Violation" in await hear_refusal(bad)
    assert "authentication error" in site.log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
async def test_no_password_is_shown_to_who_takes_the_port_of_a_server_that_died(
    home: Site,
) -> None:
    """Any user of the machine could take it, and heard the passwords of all parts."""
    home.start()
    controller = await home.connect("controller")
    assert controller.client.is_connected
    home.kill()
    thief = start_thief(home.server.port)
    try:
        assert thief.stdout is not None
        heard = [await asyncio.to_thread(thief.stdout.readline) for _ in range(4)]
        assert heard == [b"connected\n"] * 4
    finally:
        thief.kill()
        thief.communicate()
    home.start()
    await until(lambda: controller.connected, "the connection to its own server")
    await home.close()


STRANGER = 65534
TAKE_PORT = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    peer, _ = server.accept()
    with peer:
        peer.settimeout(2.0)
        peer.sendall(b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576}\\r\\n')
        try:
            said = peer.recv(4096)
        except OSError:
            said = b""
    print("password" if b"pass" in said else "connected", flush=True)
"""


def start_thief(port: int) -> "subprocess.Popen[bytes]":
    """Listen at `port` as another user, who says of each connection whether it had a password."""
    command = [sys.executable, "-c", TAKE_PORT, str(port), str(STRANGER)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_secrets_are_in_files_of_their_owner_only(home: Site) -> None:
    home.start()
    assert home.process is not None
    command = Path(f"/proc/{home.process.pid}/cmdline").read_text()
    environment = Path(f"/proc/{home.process.pid}/environ").read_text()
    secrets = {user.password for user in home.server.users}
    assert len(secrets) == len(home.server.users) == 10  # two agents
    assert not any(secret in command + environment for secret in secrets)
    holders = []
    for path in Path(home.paths.root).rglob("*"):
        if path.is_file() and any(secret in path.read_text("latin-1") for secret in secrets):
            holders.append(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            found = {s for s in secrets if s in path.read_text("latin-1")}
            assert len(found) == 1 or path.name == "nats-server.conf"
    assert len(holders) == 11
    assert stat.S_IMODE(os.stat(Path(home.paths.root) / "credentials").st_mode) == 0o700


# --- the controller's door -----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def controlling(site: Site) -> AsyncIterator[ControllerService]:
    """A real controller of a job whose nodes are not there."""
    bus = await site.connect("controller")
    journal = Journal(await NatsStream.open(bus, JOB), writer="one")
    service = ControllerService(
        SPEC, bus, journal, clock=time.monotonic, incarnation="c", submitted_s=0.0,
        show=lambda snapshot: None,
    )  # fmt: skip
    task = asyncio.create_task(service.run())
    try:
        await until(lambda: journal.last_seq >= 2, "no journal")
        yield service
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(bus: NatsBus, subject: str, data: bytes) -> CommandReply:
    reply: CommandReply = decode(
        await bus.request(subject, data, timeout_s=PATIENCE_S), CommandReply
    )
    return reply


def render_events(source: str, node: int, *events: AnyEvent) -> bytes:
    return encode(EventMessage(node, (EventBatch(source, 1, events),)))


def command(kind: str, **args: object) -> bytes:
    return json.dumps({"id": f"x-{time.monotonic_ns()}", "kind": kind, "args": args}).encode()


async def test_bad_messages_are_refused_and_nothing_is_lost(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlling(site) as service:
        operator, agent = await site.connect("operator"), await site.connect("agent-0")
        viewer = await site.connect("viewer")
        for data, words in (
            (b"not json", "malformed"),
            (b"\xff\x00\x17" * 50, "malformed"),
            (b"[" * 60_000, ""),
            (b'{"id":"a","kind":"format disk"}', "kind"),
            (b'{"id":7,"kind":"stop"}', "id"),
            (command("stop", blob="x" * 70_000), "bytes are more than"),
            (command("inject", rank="many"), "malformed arguments"),
            (command("inject", rank=0, at_step=[1]), "malformed arguments"),
        ):
            answer = await ask(operator, subject_commands(JOB), data)
            assert not answer.ok
            assert words in answer.reason, answer
        answer = await ask(viewer, subject_queries(JOB), command("stop"))
        assert "may only look" in answer.reason
        assert (await ask(viewer, subject_queries(JOB), command("ping"))).ok

        strange = NodeRegistered(node=77, incarnation="a", host="h", boot_id="b", slots=1)
        honest = NodeRegistered(node=0, incarnation="a", host="h", boot_id="b", slots=1)
        subject = subject_events(JOB, 0)
        for data in (b"{}", b"garbage"):  # T1: who sends it is told, and sends something else.
            refused: EventAck = decode(
                await agent.request(subject, data, timeout_s=PATIENCE_S), EventAck
            )
            assert "malformed" in refused.refused
            assert not refused.seqs
        told = await agent.request(subject, render_events("a0-e", 0, strange), timeout_s=PATIENCE_S)
        assert told == b'{"seqs":{"a0-e":1},"term":1}'
        await agent.publish(subject_beats(JOB, 0), b'{"node":10000000}')
        told = await agent.request(subject, render_events("a0-1", 0, honest), timeout_s=PATIENCE_S)
        assert told == b'{"seqs":{"a0-1":1},"term":1}'
        assert (await ask(operator, subject_commands(JOB), command("ping"))).ok
        assert service.inbox.drops.count >= 10
    assert "dropped: " in caplog.text
    entries = await read_all(site)
    kinds = [e.body.args for e in entries if isinstance(e.body, CommandReceived)]
    assert kinds == [{"rank": "many"}, {"rank": 0, "at_step": [1]}]
    assert [e.body.node for e in entries if isinstance(e.body, NodeRegistered)] == [0]


async def test_the_controller_answers_into_inboxes_only(site: Site) -> None:
    """A sender names the answer's subject, and the controller may publish where he may not."""
    async with controlling(site):
        ordered: list[bytes] = []
        await (await site.connect("agent-1")).subscribe(subject_orders(JOB, 1), ordered.append)
        stream = NatsStream(await site.connect("operator"), JOB)
        before = await stream.read_all()
        asked = {
            "agent-0": subject_events(JOB, 0),
            "joiner": subject_joins(JOB),
            "monitor": subject_notices(JOB),
            "viewer": subject_queries(JOB),
            "worker": subject_queries(JOB),
        }
        for user, subject in asked.items():
            bus = await site.connect(user)
            for target in TARGETS:
                for data in (b"{}", command("ping")):
                    await bus.client.publish(subject, data, reply=target)
            await bus.client.flush()
            if user == "worker":
                assert (await ask(bus, subject, command("ping"))).ok
        after = await stream.read_all()
        assert after[: len(before)] == before
        kinds = [decode(line, JournalEntry) for group in after for line in group.splitlines()]
        assert kinds
    assert all(read_order(data)[0].controller == "c" for data in ordered)


def lies() -> dict[str, AnyEvent]:
    """What the agent of node 1 may not tell, by what it would bring about."""
    record = ExitRecord(rank=0, generation=0, pid=7, at_s=1.0, signal=9)
    verdict = Verdict(
        kind="CommHang", culprit=Culprit(rank=0), generation=0, first_seen_s=1.0,
        confirmed_s=1.0, confidence=1.0, reason="", actionable=True,
    )  # fmt: skip
    return {
        "an end of the job": CommandReceived(id="x", kind="kill"),
        "its end, too": JobEnded(status="failed", exit_code=1, reason="", at_s=1.0),
        "another controller": ControllerStarted(incarnation="evil", term=99),
        "another job": JobSubmitted(spec=SPEC, at_s=1.0),
        "another node's place": NodeRegistered(
            node=0, incarnation="a0-9", host="evil", boot_id="b", slots=1
        ),
        "another node's ranks": RanksStarted(
            node=0, generation=0, pids={0: 1}, at_s=1.0, warm=True
        ),
        "another node's rank, as its own": RanksStarted(
            node=1, generation=7, pids={0: 1}, at_s=1.0, warm=True
        ),
        "another node's failure": RankExited(
            node=0, record=record, account=RankAccount(), detected_s=1.0
        ),
        "another node's loss": NodeLost(node=0, at_s=1.0, reason=""),
        "another keeper's death": KeeperLost(node=0, generation=0, at_s=1.0),
        "a verdict": VerdictReached(verdict=verdict),
        "another setting": SettingsChanged(change=Change(epoch=1, step=1, values={"lr": 9.0})),
        "a node cordoned": NodeCordoned(node=0, at_s=1.0, reason=""),
        "a checkpoint of nobody": CheckpointSaved(
            generation=0, step=10**9, path="/etc", bytes=1, stall_s=0.0, save_s=0.0, at_s=1.0
        ),
        "another quorum": QuorumFormed(quorum_id=99, step=1, members=("evil",)),
    }


async def test_an_agent_is_no_operator_and_no_other_node(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """D3: whatever an agent tells that is not its own is dropped, and its stream goes on."""
    async with controlling(site) as service:
        hostile, honest = await site.connect("agent-1"), await site.connect("agent-0")
        subject, seq = subject_events(JOB, 1), 0
        for what, event in lies().items():
            refused, seq = service.inbox.drops.count, seq + 1
            data = encode(EventMessage(1, (EventBatch("a1-evil", seq, (event,)),)))
            await hostile.request(subject, data, timeout_s=PATIENCE_S)
            assert service.inbox.drops.count == refused + 1, what
        rank = EventMessage(1, (EventBatch("g0-r0-p7", 1, (lies()["an end of the job"],)),))
        await hostile.request(subject, encode(rank), timeout_s=PATIENCE_S)
        for bad in ("a0-1", "l12-ab", "run-7", ""):
            await hostile.request(
                subject, render_events(bad, 1, lies()["a verdict"]), timeout_s=PATIENCE_S
            )
        mine = NodeRegistered(node=1, incarnation="a1-evil", host="h", boot_id="b", slots=1)
        both = EventMessage(1, (EventBatch("a1-evil", seq + 1, (lies()["a verdict"], mine)),))
        told = await hostile.request(subject, encode(both), timeout_s=PATIENCE_S)
        assert told == b'{"seqs":{"a1-evil":%d},"term":1}' % (seq + 2), "what is its own is taken"
        his = NodeRegistered(node=0, incarnation="a0-1", host="h", boot_id="b", slots=1)
        told = await honest.request(
            subject_events(JOB, 0), render_events("a0-1", 0, his), timeout_s=PATIENCE_S
        )
        assert told == b'{"seqs":{"a0-1":1},"term":1}', "nobody else has used its numbers"
        assert (
            await ask(await site.connect("operator"), subject_commands(JOB), command("ping"))
        ).ok
        await hostile.publish(subject_beats(JOB, 0), b"{}")
        await until(lambda: 'beats.0"' in site.log.read_text(), "the server lets it be node 0")
    bodies = [entry.body for entry in await read_all(site)]
    kinds = {type(body).__name__ for body in bodies}
    kinds -= {"Decision"}
    assert kinds == {"JobSubmitted", "ControllerStarted", "NodeRegistered"}
    assert sum(isinstance(body, ControllerStarted) for body in bodies) == 1
    assert "dropped: event of the agent of node 1: CommandReceived is not for" in caplog.text


async def read_all(site: Site) -> list[JournalEntry]:
    stream = NatsStream(await site.connect("operator"), JOB)
    lines = b"".join(await stream.read_all()).splitlines()
    return [decode(line, JournalEntry) for line in lines]


async def test_an_oversized_message_costs_its_sender_the_connection(site: Site) -> None:
    async with controlling(site):
        agent, subject = await site.connect("agent-0"), subject_events(JOB, 0)
        honest = NodeRegistered(node=0, incarnation="a", host="h", boot_id="b", slots=1)
        early = agent.request(subject, render_events("a0-1", 0, honest), timeout_s=PATIENCE_S)
        assert await early == b'{"seqs":{"a0-1":1},"term":1}'
        operator = load_endpoint(site.paths)
        host, port = operator.url.removeprefix("nats://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
            login = json.dumps({"user": "operator", "pass": operator.token, "verbose": False})
            raw.sendall(f"CONNECT {login}\r\n".encode())
            raw.sendall(f"PUB {subject_commands(JOB)} 9000000\r\n".encode())
            answer = b""
            with contextlib.suppress(ConnectionError):
                while chunk := raw.recv(65536):
                    answer += chunk
        assert b"Maximum Payload Violation" in answer
        assert "maximum payload exceeded" in site.log.read_text()
        both = render_events("a0-1", 0, honest, honest)
        assert (
            await agent.request(subject, both, timeout_s=PATIENCE_S)
            == b'{"seqs":{"a0-1":2},"term":1}'
        )
        bus = await site.connect("operator")
        assert (await ask(bus, subject_commands(JOB), command("ping"))).ok
    assert sum(isinstance(e.body, NodeRegistered) for e in await read_all(site)) == 2


async def test_a_stuck_subscriber_is_cut_off_and_holds_up_nobody(site: Site) -> None:
    """How long the slowest append takes is bounded by the gate `append-beside-stuck`."""
    await append_beside_a_stuck_one(site)


async def append_beside_a_stuck_one(site: Site) -> float:
    """Return the seconds of the slowest append while a subscriber reads nothing."""
    slowest_s = 0.0
    viewer = load_endpoint(site.paths, "viewer")
    host, port = viewer.url.removeprefix("nats://").split(":")
    stream = await NatsStream.open(await site.connect("controller"), JOB)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        login = json.dumps({"user": "viewer", "pass": viewer.token, "verbose": False})
        raw.sendall(f"CONNECT {login}\r\nSUB {subject_journal(JOB)} 1\r\nPING\r\n".encode())
        for number in range(120):  # 60 MB, of which the subscriber reads nothing
            began_s = time.monotonic()
            await stream.append(b"x" * 500_000, expected_last=number, message_id=f"m{number}")
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        await until(lambda: "Slow Consumer" in site.log.read_text(), "not cut off")
    return slowest_s


# --- TLS, and a server of one's own --------------------------------------------------------------


async def test_tls_wherever_it_is_not_loopback(home: Site) -> None:
    set_certificate(home.server, SPEC.nats)
    assert home.server.certificate is None
    home.server.host = "127.0.0.1"
    certificate = make_tls(home)
    home.start()
    bus = await home.connect("operator")
    assert bus.client.is_connected
    endpoint = load_endpoint(home.paths)
    assert endpoint.url.startswith("tls://")
    assert endpoint.ca == Path(certificate).read_text()
    plain = Endpoint(
        url=endpoint.url.replace("tls:", "nats:"), token=endpoint.token, clock_offset_s=0,
        user="operator",
    )  # fmt: skip
    assert "no safe connection" in await hear_refusal(plain)  # It knows no authority to trust.
    await home.close()


def make_tls(home: Site) -> str:
    """Have the server's own certificate made as for an address that is not loopback."""
    home.server.host = "192.0.2.1"
    set_certificate(home.server, SPEC.nats)
    assert home.server.certificate is not None
    cert, key = home.server.certificate
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    found = x509.load_pem_x509_certificate(Path(cert).read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "192.0.2.1" in map(str, names.get_values_for_type(x509.IPAddress))
    home.server.host, home.server.certificate = "127.0.0.1", None
    from perdure.adapters.nats import make_certificate

    home.server.certificate = make_certificate(home.server.folder, "127.0.0.1")
    return home.server.certificate[0]


def test_certificate_and_key_belong_together(home: Site) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        set_certificate(home.server, NatsConfig(tls_cert="a.pem"))
    with pytest.raises(PlatformError, match="holds no certificate"):
        set_certificate(home.server, NatsConfig(tls_cert="/nowhere.pem", tls_key="/nowhere.key"))
