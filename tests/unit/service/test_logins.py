# ruff: noqa: ASYNC110
"""D3: whose login was ended stays out, and a request that fails costs nobody else anything."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import FakeBus, FakeStream
from tests.waiting import PATIENCE_S

from perdure.model.bus.wire import (
    Admission,
    Command,
    CommandReply,
    Endpoint,
    JoinRequest,
    subject_commands,
    subject_joins,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.events import digest_secret
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.access import credentials
from perdure.service.access.credentials import (
    end_asked,
    end_logins,
    make_server,
    renew_logins,
    write_credentials,
)
from perdure.service.access.sealing import open_sealed
from perdure.service.controller.journal import Journal
from perdure.service.controller.loop import ControllerService
from perdure.service.jobfiles import MINE, load_endpoint, write_document
from perdure.service.jobfolders import paths_of
from perdure.service.placement import Placement
from perdure.service.supervisor import Supervisor

JOB = "far"
SPEC = JobSpec(name=JOB, script="train.py", nodes=3, remote=2)


# --- what a machine is told that asks for a place ------------------------------------------------


class Door:
    """A controller's, in memory; `passwords` are those that hold now."""

    def __init__(self) -> None:
        self.bus, self.count = FakeBus(), 0
        self.passwords = {1: "one", 2: "two"}
        self.service: ControllerService

    async def ask(self, kind: str, **args: Any) -> CommandReply:
        self.count += 1
        asked = Command(id=f"c{self.count}", kind=kind, args=args)  # type: ignore[arg-type]
        data = await self.bus.request(subject_commands(JOB), encode(asked), timeout_s=PATIENCE_S)
        return decode(data, CommandReply)  # type: ignore[no-any-return]

    async def invite(self, id_: str) -> None:
        assert (await self.ask("invite", id=id_, digest=digest_secret(id_), uses=1)).ok

    async def send(self, request: bytes) -> CommandReply:
        data = await self.bus.request(subject_joins(JOB), request, timeout_s=PATIENCE_S)
        return decode(data, CommandReply)  # type: ignore[no-any-return]


def render_request(machine: str, invitation: str, *, sealed: bool = False) -> bytes:
    return encode(JoinRequest(
        id="same", machine=machine, host=machine, invitation=invitation, secret=invitation,
        speaks=MINE, sealed=sealed,
    ))  # fmt: skip


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door()
    service = ControllerService(
        SPEC, FakeBus(door.bus.server), Journal(FakeStream(), writer="c"), clock=lambda: 1000.0,
        incarnation="c", submitted_s=990.0, show=lambda snapshot: None,
    )  # fmt: skip
    door.service = service
    service.inbox.admit = lambda node: Admission(
        node=node, spec=SPEC, endpoint=Endpoint("nats://x", door.passwords[node], 0.0)
    )
    task = asyncio.create_task(service.run())
    async with asyncio.timeout(PATIENCE_S):
        while subject_joins(JOB) not in door.bus.server.servers:
            await asyncio.sleep(0)
    yield door
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_old_request_for_a_place_brings_nobody_the_new_login(door: Door) -> None:
    """D3: its answer was kept, and gave whoever repeated it the password of now."""
    await door.invite("i1")
    request = render_request("evil", "i1")
    for _ in range(2):  # The first answer may be lost.
        told = await door.send(request)
        assert (told.ok, told.result["admission"]["endpoint"]["token"]) == (True, "one")
    assert (await door.ask("revoke", id="i1")).result["served"] == [1]
    door.passwords[1] = "another"
    told = await door.send(request)
    assert (told.ok, told.reason) == (False, "invitation i1 was revoked")
    assert "another" not in str(told)


async def test_a_machine_cannot_read_what_another_is_admitted_with(door: Door) -> None:
    """All that were invited have the login `joiner`, and heard the login of every other node."""
    await door.invite("i1")
    told = await door.send(render_request("honest", "i1", sealed=True))
    assert told.ok
    assert "one" not in str(told.result)
    with pytest.raises(ProtocolError, match="another secret"):
        open_sealed(told.result["sealed"], "i2")
    admission: Admission = decode(open_sealed(told.result["sealed"], "i1"), Admission)
    assert (admission.node, admission.endpoint.token) == (1, "one")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/secret/path"), "No space left"),
        (PlatformError("the register does not answer"), "does not answer"),
    ],
)
async def test_a_machine_that_cannot_be_admitted_now_is_told_why_and_the_job_goes_on(
    door: Door, error: Exception, words: str
) -> None:
    def fail(node: int) -> Admission:
        raise error

    await door.invite("i1")
    works, door.service.inbox.admit = door.service.inbox.admit, fail
    told = await door.send(render_request("far", "i1"))
    assert not told.ok
    assert words in told.reason
    assert "/secret" not in told.reason
    door.service.inbox.admit = works
    told = await door.send(render_request("far", "i1"))
    assert (told.ok, told.result["admission"]["node"]) == (True, 1)


# --- who ends logins -----------------------------------------------------------------------------


class Site:
    """A job's server, not started, and everybody's credentials."""

    def __init__(self, home: Path) -> None:
        self.paths: JobPaths = paths_of(str(home), JOB)
        self.server = make_server(SPEC, self.paths, Placement())
        self.server.port = 4222
        self.server.command()
        write_credentials(SPEC, self.paths, self.server, url="nats://x", clock_offset_s=0)
        self.asked = Path(self.paths.credential("run")).parent / "end-logins.json"
        self.reloads = 0

    def reload(self) -> None:
        self.reloads += 1

    def look(self) -> str:
        return end_asked(self.paths, self.server, self.reload)

    def find_token(self, node: int) -> str:
        return load_endpoint(self.paths, f"agent-{node}").token

    def check_agreement(self, node: int) -> None:
        """What is asked of a node is what its credentials show, on disk and in memory."""
        token = self.find_token(node)
        assert token in [user.password for user in self.server.users]
        assert token in Path(self.server.folder, "nats-server.conf").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_logins_of_those_who_are_asked_for_are_renewed(site: Site) -> None:
    assert site.look() == ""
    before = [site.find_token(node) for node in range(3)]
    write_document(str(site.asked), [1, 2], mode=0o600)
    assert site.look() == "logins are ended, as asked: of nodes 1, 2"
    assert [site.find_token(node) == before[node] for node in range(3)] == [True, False, False]
    assert (site.asked.exists(), site.reloads) == (False, 1)
    for node in range(3):
        site.check_agreement(node)


def put_link(path: Path) -> None:
    os.symlink(path, path)  # To itself: as unreadable to root as a file of root's to others.


BAD: dict[str, Callable[[Path], object]] = {
    "unreadable": put_link,
    "no list": lambda path: path.write_text('{"a":1}'),
    "not JSON": lambda path: path.write_bytes(b"\xff"),
    "no such node": lambda path: path.write_text("[99]"),
}


@pytest.mark.parametrize("put", BAD.values(), ids=BAD)
def test_a_request_that_cannot_be_read_is_refused_and_gone(
    site: Site, put: Callable[[Path], object]
) -> None:
    before = site.find_token(1)
    put(site.asked)
    assert site.look().startswith("logins are not ended, or not wholly: ")
    assert not os.path.lexists(site.asked)
    assert site.look() == ""
    assert site.find_token(1) == before


def test_what_cannot_be_removed_ends_nothing_else(site: Site) -> None:
    site.asked.mkdir()
    assert site.look() == site.look() != "", "the same words, which the supervisor says once"


def test_who_asks_in_vain_leaves_no_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "_ANSWER_S", 0.0)
    with pytest.raises(PlatformError, match="in time"):
        end_logins(site.paths, [1])
    assert not site.asked.exists()


def test_a_renewal_that_cannot_be_written_changes_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3: a full disk left files, memory and server each with another password."""
    before = site.find_token(1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_document(str(site.asked), [1, 2], mode=0o600)
    with monkeypatch.context() as full:
        full.setattr("perdure.adapters.nats.server.replace_file", refuse)
        assert "No space left" in site.look()
    assert (site.find_token(1), site.reloads) == (before, 1)
    for node in (1, 2):
        site.check_agreement(node)


def test_credentials_that_cannot_be_written_leave_the_old_login_ended(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safe side: nobody comes by the old one, and asking again mends it."""

    def fail(path: str, value: object, *, mode: int) -> None:
        raise PlatformError(f"cannot write {path}: No space left on device")

    before = site.find_token(1)
    write_document(str(site.asked), [1], mode=0o600)
    with monkeypatch.context() as full:
        full.setattr(credentials, "write_document", fail)
        assert "cannot write" in site.look()
    assert site.reloads == 1
    server = site.server
    assert before not in Path(server.folder, "nats-server.conf").read_text()
    renew_logins(site.paths, server, [1])
    site.check_agreement(1)


async def test_it_is_said_when_nobody_looks_any_more(tmp_path: Path) -> None:
    """D3: a bug in one look ended all that is shown, reaped and asked by files, in silence."""
    said: list[str] = []
    supervisor = Supervisor(SPEC, str(tmp_path), "nats://x", said.append, lambda snapshot: None)

    async def fail() -> None:
        raise ValueError("boom")

    supervisor._watch_files = fail  # type: ignore[method-assign]
    watch = supervisor._start_watch()
    await asyncio.wait([watch])
    await asyncio.sleep(0)
    assert [line for line in said if "boom" in line], said
