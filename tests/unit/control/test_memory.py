"""T3: what a controller knows of its journal is bounded, whoever speaks."""

import msgspec
import pytest
from tests.unit.control.driver import started as started_job

from perdure.control import job, memory
from perdure.control.memory import Memory, decode_memory, encode_memory, prune_entries
from perdure.control.records import make_journal_event
from perdure.model.codec import decode
from perdure.model.errors import ProtocolError
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    GenerationStopped,
    JobSubmitted,
    JournalEntry,
    RanksStarted,
    ReplicaLate,
    ReplicaSeen,
    ReplicaWaiting,
)
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.signals.progress import (
    BusyPhase,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)

SPEC = JobSpec(name="job", script="train.py", nproc=2)


def test_what_no_memory_could_be_read_with_again_is_no_message() -> None:
    """A rank's word in it made every snapshot of the job unreadable: all was replayed each time."""
    said = b'{"type":"KeysDeclared","generation":0,"keys":[],"values":{"lr":{"a":[1]}}}'
    with pytest.raises(ProtocolError, match="values"):
        decode(said, AnyEvent)


def tell(known: Memory, source: str, number: int) -> None:
    event = GenerationStopped(node=0, generation=0, at_s=1.0)
    known.note(JournalEntry(known.seq + 1, 1.0, event, source, number))


def test_sources_without_end_are_forgotten_and_who_speaks_is_known(monkeypatch) -> None:
    monkeypatch.setattr(memory, "SOURCES_MAX", 40)
    known = Memory(SPEC)
    for number in range(1, 200):
        tell(known, f"a0-{number}", 1)
        tell(known, "g0-r1-p7", number)
        if number == 150:
            again = decode_memory(encode_memory(known), SPEC)
        elif number > 150:
            tell(again, f"a0-{number}", 1)
            tell(again, "g0-r1-p7", number)
    assert len(known.taken) == 40
    assert known.taken["g0-r1-p7"] == 199
    assert again.taken == known.taken, "from a snapshot as from the first entry on"


def test_what_stands_of_each_replica_group_is_heard_however_often_the_others_restart() -> None:
    """T9: each group of a torchft job has generations of its own."""
    spec = JobSpec(script="x.py", nodes=3, torchft=TorchftConfig(replicas=3))
    left = ReplicaSeen(replica="", group=1, at_s=2.0, gone=True)
    late = ReplicaLate(replica="", group=1, at_s=2.0, waited_s=1.0)
    wait = ReplicaWaiting(generation=2, rank=2, quorum_id=1, step=4, since_s=2.0)
    begun = [started(1, 0), started(0, 1), started(2, 2)]
    events: list[AnyEvent] = [JobSubmitted(spec=spec, at_s=1.0), *begun, left, late, wait]
    for generation in range(3, 60):
        seen = ReplicaSeen(replica="", group=0, at_s=3.0, gone=generation % 2 == 0)
        events += [started(0, generation), seen]
    entries = [JournalEntry(n, 1.0, event) for n, event in enumerate(events)]
    kept = prune_entries(entries)
    heard = [entry.body for entry in kept]
    assert [e for e in heard if isinstance(e, RanksStarted)] == [begun[0], begun[2], *events[-4::2]]
    assert [e for e in heard if isinstance(e, ReplicaSeen)] == [left, events[-1]]
    assert late in heard
    assert wait in heard
    for cut in range(0, len(entries), 7):
        assert prune_entries([*prune_entries(entries[:cut]), *entries[cut:]]) == kept


def started(node: int, generation: int) -> RanksStarted:
    return RanksStarted(node=node, generation=generation, pids={node: 9}, at_s=1.0, warm=True)


def test_an_overdue_world_is_told_who_is_busy_as_declared() -> None:
    phases = {0: BusyPhase("evaluate", 1.0, 90.0), 1: BusyPhase("evaluate", 1.0, 40.0), 2: None}
    spec = JobSpec(name="job", script="train.py", nproc=4)
    known = Memory(spec)
    known.machine.handle(0.0, JobSubmitted(spec=spec, at_s=0.0))
    ranks = [
        RankProgress(
            rank, 100 + rank, "step", 1.0, 1.0, RankAccount(),
            proc=ProcSample(state="S", cpu_s=0.0, io_bytes=0), busy_phase=phase,
        )
        for rank, phase in phases.items()
    ]  # fmt: skip
    stopped = ProcSample(state="T", cpu_s=0.0, io_bytes=0)
    ranks.append(msgspec.structs.replace(ranks[0], rank=3, proc=stopped))
    known.fold.take_beat(50.0, NodeBeat(0, "a", 1, 50.0, 0, tuple(ranks)))
    world = known.machine.state.world
    for step in ("a generation is begun", "its store is served, and nothing older lives"):
        world.enter(step)  # type: ignore[arg-type]
    world.enter("all its nodes have started its ranks")
    world.elastic.members, world.elastic.deadline_s = (0, 1, 2, 3), 60.0
    assert known.make_timer(59.0).busy == ()
    assert known.make_timer(60.0).busy == (0,)


def test_a_month_of_commands_and_failures_is_remembered_in_bounded_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept of each is written down, read and looked through for as long as the job runs."""
    monkeypatch.setattr(job, "ANSWERS_MAX", 20)
    driver = started_job(restart={"window_max": 1000, "window_s": 1.0})
    sizes = []
    for turn in range(1, 301):
        driver.now += 60.0
        for action in driver.do(CommandReceived(id=f"c{turn}", kind="note", args={"text": "."})):
            record = make_journal_event(driver.now, action)
            if record is not None:
                driver.do(record)
        driver.exit(0, step=turn, code=1, error=f"Error: {turn}")
        driver.run()
        for fact in driver.controller.facts(driver.now):
            driver.do(fact)
        if turn in (150, 300):
            known = Memory(driver.spec)
            known.machine = driver.controller
            sizes.append(len(encode_memory(known)))
    state = driver.controller.state
    assert state.failures.total == 300
    assert list(state.answered) == [f"c{turn}" for turn in range(281, 301)]
    assert sizes[1] < 1.1 * sizes[0]
