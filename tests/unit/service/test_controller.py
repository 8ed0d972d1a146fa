# ruff: noqa: ASYNC110
"""The controller's loop against agents in memory: no NATS, no processes."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from tests.fakes import FakeBus, FakeServer, FakeStream, number_entries
from tests.waiting import PATIENCE_S

from perdure.model.bus.access import BROUGHT_BY
from perdure.model.bus.wire import (
    Command,
    CommandReply,
    EventAck,
    EventBatch,
    EventMessage,
    NodeOrder,
    subject_beats,
    subject_commands,
    subject_events,
    subject_orders,
)
from perdure.model.codec import decode, encode
from perdure.model.errors import FencedError, PlatformError
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    Decision,
    GenerationStopped,
    JobEnded,
    NodeRegistered,
    RankExited,
    RanksAgreed,
    RanksStarted,
    StoreReady,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.model.signals.progress import NodeBeat, RankAccount
from perdure.service.controller import journal as journal_module
from perdure.service.controller import loop
from perdure.service.controller.journal import Journal
from perdure.service.controller.loop import ControllerService
from perdure.service.jobfiles import parse_journal

SPEC = JobSpec(name="job", script="train.py", nproc=2)


class Rig:
    """One agent's end of the bus, and controllers that can be ended and started again."""

    def __init__(self) -> None:
        self.server, self.stream = FakeServer(), FakeStream()
        self.agent = FakeBus(self.server)
        self.orders: list[NodeOrder] = []
        self.snapshots: list[Snapshot] = []
        self.seqs: dict[str, int] = {}
        self.source, self.time_s = "a0-1", 1000.0
        self.task: asyncio.Task[JobEnded] | None = None
        self.controllers = 0

    async def start(self) -> None:
        for node in ("0", "all"):
            await self.agent.subscribe(subject_orders("job", node), self._take)
        await self.start_controller()

    def _take(self, data: bytes) -> None:
        self.orders.append(decode(data, NodeOrder))

    async def start_controller(self) -> None:
        self.controllers += 1
        name = f"c{self.controllers}"
        service = ControllerService(
            SPEC,
            FakeBus(self.server),
            Journal(self.stream, writer=name),
            clock=lambda: self.time_s,
            incarnation=name,
            submitted_s=990.0,
            show=self.snapshots.append,
        )
        self.task = asyncio.create_task(service.run())
        await self.until(lambda: any(order.controller == name for order in self.orders))

    async def end_controller(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.server.servers.clear()
        self.server.patterns.clear()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0)

    async def send(self, *events: AnyEvent, first_seq: int = 0) -> int:
        """Send as the agent, or as rank 0 what only ranks tell; return what is taken of it."""
        self.source = "a0-1" if "agent" in BROUGHT_BY[type(events[0])] else "g0-r0-p10"
        if not first_seq:
            first_seq, self.seqs[self.source] = self.seq + 1, self.seq + len(events)
        message = EventMessage(node=0, batches=(EventBatch(self.source, first_seq, events),))
        data = await self.agent.request(
            subject_events("job", 0), encode(message), timeout_s=PATIENCE_S
        )
        return decode(data, EventAck).seqs[self.source]  # type: ignore[no-any-return]

    @property
    def seq(self) -> int:
        """Of the newest event of who has sent last."""
        return self.seqs.get(self.source, 0)

    def assigned(self) -> list[tuple[str, int]]:
        found = [o.assignment for o in self.orders if o.assignment]
        return [(a.phase, a.generation) for a in found]

    def bodies(self) -> list[AnyEvent | Decision]:
        lines = b"".join(self.stream.messages).splitlines(keepends=True)
        return [entry.body for entry in parse_journal(lines)]

    async def form(self) -> None:
        """Bring generation 0 up."""
        await self.send(
            NodeRegistered(node=0, incarnation="a1", host="h", boot_id="b", slots=2),
            GenerationStopped(node=0, generation=-1, at_s=1000.0),
            StoreReady(generation=0, host="127.0.0.1", port=5000, agent_store=True),
            RanksStarted(node=0, generation=0, pids={0: 10, 1: 11}, at_s=1001.0, warm=True),
        )


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    if rig.task is not None and not rig.task.done():
        await rig.end_controller()


def exited(rank: int, **how: int) -> RankExited:
    record = ExitRecord(rank=rank, generation=0, pid=10 + rank, at_s=1002.0, **how)
    return RankExited(node=0, record=record, account=RankAccount(), detected_s=1002.0)


async def test_a_job_from_submission_to_its_end(rig: Rig) -> None:
    await rig.form()
    assert rig.assigned() == [("store", 0), ("run", 0)]
    assert await rig.send(exited(0), exited(1)) == 6
    assert rig.assigned()[-1] == ("end", 1)
    await rig.send(GenerationStopped(node=0, generation=1, at_s=1003.0))
    assert rig.task is not None
    ended = await asyncio.wait_for(rig.task, PATIENCE_S)
    assert (ended.status, ended.exit_code) == ("done", 0)
    names = [type(body).__name__ for body in rig.bodies()]
    assert names[:2] == ["JobSubmitted", "ControllerStarted"]
    assert names[-1] == "JobEnded"
    assert rig.snapshots[-1].state == "done"


async def test_a_crash_is_answered_in_the_turn_that_hears_of_it(rig: Rig) -> None:
    await rig.form()
    groups = len(rig.stream.messages)
    await rig.send(exited(1, signal=9))
    assert rig.assigned()[-1] == ("store", 1)
    assert len(rig.stream.messages) == groups + 1  # one sync for the event and what it led to
    told = [type(body).__name__ for body in rig.bodies()[-3:]]
    assert told == ["RankExited", "FailureDecided", "Decision"]


async def test_repeated_events_are_taken_once_and_gaps_are_not_skipped(rig: Rig) -> None:
    await rig.form()
    assert await rig.send(exited(1, signal=9)) == 5
    entries = len(rig.bodies())
    assert await rig.send(exited(1, signal=9), first_seq=5) == 5
    assert await rig.send(exited(0, signal=9), first_seq=8) == 5
    assert len(rig.bodies()) == entries


async def test_the_next_controller_replays_and_issues_again(rig: Rig) -> None:
    await rig.form()
    await rig.end_controller()
    rig.orders.clear()
    await rig.start_controller()
    await rig.until(lambda: rig.assigned())
    assert rig.assigned()[-1] == ("run", 0)
    assert any(order.register for order in rig.orders)
    assert await rig.send(exited(1, signal=9), first_seq=4) == 4  # known: it was in the journal


async def test_nothing_is_sent_before_the_journal_has_it(rig: Rig) -> None:
    await rig.form()
    rig.stream.failures = [(PlatformError("no space left"), False)] * 3
    sent = len(rig.orders)
    task = asyncio.create_task(rig.send(exited(1, signal=9)))
    await rig.until(lambda: len(rig.stream.failures) < 3)
    assert len(rig.orders) == sent
    assert not task.done()
    assert await asyncio.wait_for(task, PATIENCE_S) == 5
    assert rig.assigned()[-1] == ("store", 1)


async def test_a_fenced_controller_leaves(rig: Rig) -> None:
    await rig.form()
    rig.stream.messages.append(rig.stream.messages[-1])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.send(exited(1, signal=9)), 0.2)
    assert rig.task is not None
    with pytest.raises(FencedError):
        await asyncio.wait_for(rig.task, PATIENCE_S)
    assert rig.assigned()[-1] == ("run", 0)


async def ask(rig: Rig, command: Command) -> CommandReply:
    data = await rig.agent.request(subject_commands("job"), encode(command), timeout_s=PATIENCE_S)
    reply: CommandReply = decode(data, CommandReply)
    return reply


async def test_status_and_ping_are_answered_without_a_line_in_the_journal(rig: Rig) -> None:
    entries = len(rig.bodies())
    assert (await ask(rig, Command(id="1", kind="ping"))).result["controller"] == "c1"
    assert (await ask(rig, Command(id="2", kind="status"))).result["job"] == "job"
    assert len(rig.bodies()) == entries


async def test_a_repeated_command_gets_its_first_answer_also_from_the_next_controller(
    rig: Rig,
) -> None:
    await rig.form()
    command = Command(id="x", kind="inject", args={"rank": 9, "kind": "crash"}, who="test")
    first = await ask(rig, command)
    assert not first.ok
    assert first.reason
    entries = len(rig.bodies())
    assert await ask(rig, command) == first
    assert len(rig.bodies()) == entries
    await rig.end_controller()
    await rig.start_controller()
    assert await ask(rig, command) == first


async def test_an_answer_is_in_the_journal_with_its_result(rig: Rig) -> None:
    await rig.form()
    told = await ask(rig, Command(id="x", kind="note", args={"text": "a remark"}, who="test"))
    answers = [b for b in rig.bodies() if isinstance(b, Decision) and b.action == "AnswerCommand"]
    assert [(a.summary, a.reason, a.result) for a in answers] == [("x: ok", "", told.result)]
    assert told.result.keys() == {"step"}


async def test_who_was_answered_sees_at_once_what_the_answer_says(rig: Rig) -> None:
    await rig.form()
    assert rig.snapshots[-1].version < len(rig.bodies())  # A picture is made twice a second.
    command = Command(id="x", kind="inject", args={"rank": 9, "kind": "crash"}, who="test")
    assert (await ask(rig, command)).reason
    assert rig.snapshots[-1].version == len(rig.bodies())


async def test_orders_are_repeated_until_the_job_ends(rig: Rig) -> None:
    await rig.form()
    count = len(rig.assigned())
    rig.time_s += 1.1
    beat = NodeBeat(node=0, incarnation="a1", seq=1, sent_s=rig.time_s, generation=0)
    await rig.agent.publish(subject_beats("job", 0), encode(beat))
    await rig.until(lambda: len(rig.assigned()) > count)
    assert rig.assigned()[-1] == ("run", 0)


NO_SUCH_COMM = (
    b'{"node":0,"incarnation":"a0-1","seq":1,"sent_s":1000.0,"generation":0,"ranks":[{"rank":0,'
    b'"pid":7,"phase":"step","phase_since_s":1.0,"heartbeat_s":1.0,"account":{},'
    b'"comms":[{"name":"w","size":2,"started_seq":1,"ended_seq":0}],'
    b'"spans":[[-9,1,"send",1,1.0,0.0,0.0,1]]}]}'
)
"""A heartbeat that ended the controller, and the next one as well (T1)."""


async def test_malformed_messages_are_refused(rig: Rig) -> None:
    await rig.agent.publish(subject_beats("job", 0), b"{")
    data = await rig.agent.request(subject_events("job", 0), b"nonsense", timeout_s=PATIENCE_S)
    assert "malformed" in decode(data, EventAck).refused
    await rig.form()
    await rig.agent.publish(subject_beats("job", 0), NO_SUCH_COMM)
    assert (await ask(rig, Command(id="p", kind="ping", who="test"))).ok


async def test_an_entry_over_the_limit_is_cut_and_the_controller_goes_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """T3: it stalled for ever, and the healthy server was killed for it every eight seconds."""
    rig.stream.bytes_max = 64 << 10
    rig.agent.server.payload_max = 8 << 20
    await rig.form()
    record = ExitRecord(rank=0, generation=0, pid=10, at_s=1002.0, code=1, traceback="x" * 500_000)
    end = RankExited(node=0, record=record, account=RankAccount(), detected_s=1002.0)
    await rig.send(end, registered())
    bodies = rig.bodies()
    (told,) = [body for body in bodies if isinstance(body, RankExited)]
    assert "500,000 characters, cut]" in told.record.traceback
    assert "dropped: NodeRegistered of a0-1: " in caplog.text
    assert max(map(len, rig.stream.messages)) <= 64 << 10
    await rig.end_controller()
    await rig.start_controller()  # What was decided from is what was journaled.
    assert rig.assigned()[-1][1] == 1


async def test_many_ranks_answers_to_an_agreement_are_one_entry(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand entries for each checkpoint of a thousand ranks took a `report` a minute."""
    monkeypatch.setattr(loop, "_TOGETHER_MIN", 2)
    await rig.form()
    batches = tuple(
        EventBatch(
            f"g0-r{rank}-p{10 + rank}", 1,
            (
                BoundaryAnswered(id="b1", rank=rank, ok=True, step=5),
                BoundaryReached(id="b1", rank=rank, step=8, at_s=1002.0 + rank),
                BoundaryAnswered(id="b2", rank=rank, ok=not rank, step=9, reason="no" * rank),
            ),
        )
        for rank in range(2)
    )  # fmt: skip
    by_id = tuple(
        EventBatch(batch.source, number + 1, (batch.events[number],))
        for number in range(3)
        for batch in batches
    )
    message = encode(EventMessage(node=0, batches=by_id))
    data = await rig.agent.request(subject_events("job", 0), message, timeout_s=PATIENCE_S)
    assert decode(data, EventAck).seqs == {"g0-r0-p10": 3, "g0-r1-p11": 3}
    told = [b for b in rig.bodies() if isinstance(b, RanksAgreed | BoundaryAnswered)]
    answered, reached, alone, veto = told
    assert isinstance(answered, RanksAgreed)
    assert isinstance(reached, RanksAgreed)
    assert (answered.reached, answered.ranks, answered.steps) == (False, (0, 1), (5, 5))
    assert (reached.reached, reached.times_s) == (True, (1002.0, 1003.0))
    assert alone == batches[0].events[2]
    assert veto == batches[1].events[2]
    await rig.end_controller()
    await rig.start_controller()
    data = await rig.agent.request(subject_events("job", 0), message, timeout_s=PATIENCE_S)
    assert decode(data, EventAck).seqs == {"g0-r0-p10": 3, "g0-r1-p11": 3}
    assert [b for b in rig.bodies() if isinstance(b, RanksAgreed | BoundaryAnswered)] == told


async def test_a_document_that_no_message_holds_is_refused(rig: Rig) -> None:
    """T3: it cannot be cut, and without it there is no job."""
    stream = FakeStream()
    stream.bytes_max = 64 << 10
    spec = JobSpec(name="job", script="train.py", args=("x" * 7000,) * 20)
    service = ControllerService(
        spec, FakeBus(), Journal(stream, writer="c"), clock=lambda: 1.0, incarnation="c",
        submitted_s=0.0, show=lambda snapshot: None,
    )  # fmt: skip
    with pytest.raises(PlatformError, match="the job's document has"):
        await asyncio.wait_for(service.run(), PATIENCE_S)


async def test_nobody_is_killed_for_a_group_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """T3: a server started anew takes no larger messages."""
    monkeypatch.setattr(journal_module, "STUCK_S", 0.0)
    stuck: list[int] = []
    stream = FakeStream()
    journal = Journal(stream, writer="c", on_stuck=lambda: stuck.append(1))
    entries = number_entries(
        journal, [Decision(action="a", summary="x" * 5000, reason="")], at_s=0.0
    )
    stream.bytes_max = 1000
    append, tries = stream.append, list[bytes]()

    async def count(data: bytes, *, expected_last: int, message_id: str) -> int:
        tries.append(data)
        return await append(data, expected_last=expected_last, message_id=message_id)

    stream.append = count  # type: ignore[method-assign]
    appending = asyncio.create_task(journal.append(entries))
    async with asyncio.timeout(PATIENCE_S):
        while len(tries) < 4:
            await asyncio.sleep(0)
    assert stuck == []
    stream.bytes_max = 10_000
    await asyncio.wait_for(appending, PATIENCE_S)
    stream.failures = [(PlatformError("full"), False)] * 3
    await journal.append(
        number_entries(journal, [Decision(action="a", summary="", reason="")], at_s=0.0)
    )
    assert stuck


def registered() -> NodeRegistered:
    running = tuple(range(20_000))
    return NodeRegistered(node=0, incarnation="a2", host="h", boot_id="b", slots=2, running=running)
