"""Neighbours of other versions: those that cannot work together say so."""

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from tests.journals import Story, reseal
from tests.unit.service.test_controller import Rig
from tests.waiting import PATIENCE_S

from perdure.cli.app import run_command
from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.version import PROTOCOL, Spoken, can_talk
from perdure.model.bus.wire import Invitation
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.events import (
    ControllerStarted,
    Decision,
    JournalEntry,
    NodeRegistered,
)
from perdure.model.job import JobSpec
from perdure.service.access.joining import read_invitation
from perdure.service.agent.shell import _main as run_agent
from perdure.service.jobfiles import MINE, parse_journal, write_atomic, write_document
from perdure.service.jobfolders import paths_of

NEWER = Spoken(PROTOCOL + 2, PROTOCOL + 1, "9.0.0")


@pytest.mark.parametrize("command", ["report", "diagnose", "events"])
def test_a_journal_without_hashes_is_refused_in_one_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As perdure 0.1 wrote it. Nothing of it is changed, and its checkpoints can be used."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    story = Story()
    story.start()
    story.train(12)
    journal = tmp_path / "jobs" / "job" / "journal.jsonl"
    journal.parent.mkdir(parents=True)
    old = b"".join(encode(entry) + b"\n" for entry in story.entries)
    journal.write_bytes(old)
    write_document(str(journal.parent / "job.json"), story.spec)
    assert run_command([command, "job"]) == 3
    told = capsys.readouterr().err
    assert "a perdure before 0.2 wrote this journal" in told
    assert "hint: run the job under another name" in told
    assert journal.read_bytes() == old


def test_two_talk_where_they_share_a_number() -> None:
    mine = Spoken(5, 3, "a")
    spoken = [Spoken(high, low) for low, high in ((1, 2), (1, 3), (4, 4), (5, 9), (6, 9))]
    assert [can_talk(mine, each) for each in spoken] == [False, True, True, True, False]
    assert str(NEWER) == f"perdure 9.0.0 (protocols {PROTOCOL + 1} to {PROTOCOL + 2})"


def test_an_invitation_to_another_version_is_refused_in_a_line() -> None:
    for speaks, where in ((Spoken(), "where the job far runs"), (NEWER, "here")):
        endpoint = Endpoint(url="nats://h:1", token="t", clock_offset_s=0.0, speaks=speaks)
        with pytest.raises(PlatformError, match="do not work together") as caught:
            read_invitation(encode(Invitation(job="far", endpoint=endpoint)))
        assert str(speaks) in caught.value.message
        assert str(MINE) in caught.value.message
        assert where in caught.value.hint


async def test_an_agent_of_a_job_of_another_version_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks before it connects: the file of its credentials says what the job speaks."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    paths = paths_of(str(tmp_path), "job")
    credential = paths.credential("agent-0")
    os.makedirs(os.path.dirname(credential))
    write_document(paths.spec, JobSpec(name="job", script="x.py", nproc=1))
    old = {
        "url": "nats://127.0.0.1:1",
        "token": "t",
        "clock_offset_s": 0.0,
    }
    write_atomic(credential, msgspec.json.encode(old))
    with pytest.raises(PlatformError, match=r"\(protocol 0\)"):
        await asyncio.wait_for(run_agent("job", 0), PATIENCE_S)
    newer = Endpoint(**old, speaks=NEWER)  # type: ignore[arg-type]
    write_document(credential, newer)
    with pytest.raises(PlatformError, match=r"perdure 9\.0\.0"):
        await asyncio.wait_for(run_agent("job", 0), PATIENCE_S)


@pytest.fixture
async def rig():  # type: ignore[no-untyped-def]
    rig = Rig()
    await rig.start()
    yield rig
    await rig.end_controller()


async def test_a_newer_agent_is_told_to_leave_and_is_in_the_journal(rig: Rig) -> None:
    hello = NodeRegistered(node=0, incarnation="a0-1", host="h", boot_id="b", slots=2, speaks=NEWER)
    await rig.send(hello)
    assert rig.assigned() == [("end", 0)]
    (left,) = [b for b in rig.bodies() if isinstance(b, Decision) and b.summary == "node 0 leaves"]
    assert left.reason.startswith(f"node 0 runs {NEWER}, and this job {MINE}")
    rig.time_s += 1.0
    await rig.until(lambda: rig.snapshots and rig.snapshots[-1].reason == left.reason)
    mine = msgspec.structs.replace(hello, speaks=MINE)
    await rig.send(mine)
    assert rig.assigned()[-1] == ("store", 0), "the one that fits is taken"


async def test_what_a_newer_agent_adds_is_passed_over_or_dropped(rig: Rig) -> None:
    plain = json.loads(
        encode(NodeRegistered(node=0, incarnation="a0-1", host="h", boot_id="b", slots=2))
    )
    told = [plain | {"colour": "blue"}, {"type": "NodeDreamt", "node": 0}]
    message = {"node": 0, "batches": [{"source": "a0-1", "first_seq": 1, "events": told}]}
    data = msgspec.json.encode(message)
    answer = await rig.agent.request("perdure.job.events.0", data, timeout_s=PATIENCE_S)
    assert decode(answer, dict) == {"seqs": {"a0-1": 2}, "term": 1}
    assert "NodeRegistered" in [type(body).__name__ for body in rig.bodies()]


async def test_a_controller_does_not_go_on_with_a_newer_ones_journal(rig: Rig) -> None:
    await rig.form()
    await rig.end_controller()
    number = len(rig.bodies()) + 1
    started = ControllerStarted(incarnation="c9", speaks=NEWER)
    entry = encode(JournalEntry(number, 1000.0, started)) + b"\n"
    rig.stream.messages[:] = reseal([*rig.stream.messages, entry])
    rig.orders.clear()
    messages = list(rig.stream.messages)
    ended = rig.task
    starting = asyncio.create_task(rig.start_controller())
    await rig.until(lambda: rig.task is not ended)
    assert rig.task is not None
    with pytest.raises(PlatformError, match=r"written by perdure 9\.0\.0"):
        await rig.task
    starting.cancel()
    assert rig.orders == []
    assert rig.stream.messages == messages
    rig.controllers -= 1


def test_an_entry_that_only_a_newer_version_knows_names_that_version() -> None:
    started = JournalEntry(1, 1.0, ControllerStarted(incarnation="c", speaks=NEWER))
    unknown = b'{"seq":2,"at_s":1.0,"body":{"type":"NodeDreamt"}}\n'
    with pytest.raises(ProtocolError, match=r"entry 2 was written by perdure 9\.0\.0"):
        parse_journal(reseal([encode(started) + b"\n", unknown]))
