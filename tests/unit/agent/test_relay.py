"""Agreements, faults and signals between the controller and the ranks."""

import signal
from typing import Any

import msgspec
import pytest

from perdure.agent.machine import Agent
from perdure.agent.messages import (
    KeeperUp,
    OrderReceived,
    Report,
    Request,
    TellKeeper,
    TellWorker,
    WorkerSaid,
)
from perdure.agent.state import NodeIdentity
from perdure.model.bus.wire import (
    KeeperSignal,
    KeeperState,
    NodeOrder,
    WorkerHello,
    WorkerQuery,
    WorkerSignal,
)
from perdure.model.events import FaultInjected, NodeAsked
from perdure.model.job import JobSpec
from perdure.model.orders import (
    AnyOrder,
    Assignment,
    InjectFault,
    InterruptCollectives,
    SendBoundary,
)

PREPARE = SendBoundary(
    id="b1.1", move="prepare", kind="checkpoint", step=9, ranks=(0, 1), generation=2, reason=""
)
COMMIT = msgspec.structs.replace(PREPARE, move="commit")
ABORT = msgspec.structs.replace(PREPARE, move="abort")
RUN = Assignment(number=5, generation=2, phase="run")


def make_agent(**spec: Any) -> Agent:
    agent = Agent(
        JobSpec(name="j", script="s.py", nproc=2, **spec), NodeIdentity(node=0, incarnation="a1")
    )
    agent.handle(
        0.0,
        KeeperUp(state=KeeperState(pid=50, generation=2, running={0: 100, 1: 101}, exits=())),
    )
    send(agent, assignment=RUN)
    return agent


@pytest.fixture
def agent() -> Agent:
    return make_agent()


def send(agent: Agent, *orders: AnyOrder, **fields: Any) -> list[Request]:
    message = NodeOrder(controller="c1", orders=orders, **fields)
    return agent.handle(1.0, OrderReceived(order=message))


def say(agent: Agent, message: Any, rank: int = 1, now: float = 2.0) -> list[Request]:
    return agent.handle(now, WorkerSaid(rank=rank, generation=2, message=message))


def hello(agent: Agent, rank: int = 1) -> list[Request]:
    return say(agent, WorkerHello("j", rank, 2, 100 + rank), rank)


def test_each_move_reaches_each_rank_once(agent: Agent) -> None:
    both = [TellWorker(0, PREPARE), TellWorker(1, PREPARE)]
    assert send(agent, PREPARE) == both
    assert send(agent, PREPARE) == []
    assert send(agent, COMMIT) == [TellWorker(0, COMMIT), TellWorker(1, COMMIT)]
    assert send(agent, COMMIT) == []
    assert send(agent, PREPARE) == []  # Late: decided is decided.


def test_agreement_of_another_generation_is_not_passed_on(agent: Agent) -> None:
    assert send(agent, msgspec.structs.replace(PREPARE, generation=1)) == []


def test_rank_that_was_out_of_touch_hears_the_newest(agent: Agent) -> None:
    send(agent, PREPARE)
    assert hello(agent) == [TellWorker(1, PREPARE)]
    send(agent, COMMIT)
    assert hello(agent) == [TellWorker(1, COMMIT)]


def test_query_is_answered_once_decided(agent: Agent) -> None:
    assert say(agent, WorkerQuery("b1.1")) == []
    send(agent, PREPARE)
    assert say(agent, WorkerQuery("b1.1")) == []
    send(agent, ABORT)
    assert say(agent, WorkerQuery("b1.1")) == [TellWorker(1, ABORT)]


def test_a_newer_agreement_tells_that_the_old_one_was_aborted(agent: Agent) -> None:
    send(agent, PREPARE)
    later = msgspec.structs.replace(PREPARE, id="b1.2", step=12)
    told = send(agent, later)
    assert told == [TellWorker(r, o) for o in (ABORT, later) for r in (0, 1)]


def test_silence_of_the_controller_ends_no_promise(agent: Agent) -> None:
    """The ranks have said yes, so others may be told to go ahead: only the controller ends it."""
    send(agent, PREPARE)
    for _ in range(20):
        assert send(agent, assignment=RUN) == []
    assert send(agent, ABORT) == [TellWorker(0, ABORT), TellWorker(1, ABORT)]


def test_what_was_overtaken_by_a_newer_try_is_dropped(agent: Agent) -> None:
    older = msgspec.structs.replace(PREPARE, number=1)
    newer = msgspec.structs.replace(PREPARE, id="b1.2", step=14, number=2)
    assert send(agent, newer) == [TellWorker(0, newer), TellWorker(1, newer)]
    assert send(agent, older) == []
    assert send(agent, msgspec.structs.replace(older, move="abort")) == []
    commit = msgspec.structs.replace(newer, move="commit")
    assert send(agent, commit) == [TellWorker(0, commit), TellWorker(1, commit)]


def test_commit_is_never_taken_back(agent: Agent) -> None:
    send(agent, PREPARE)
    send(agent, COMMIT)
    for _ in range(9):
        assert send(agent, assignment=RUN) == []
    assert hello(agent) == [TellWorker(1, COMMIT)]


def fault(kind: str, **fields: Any) -> InjectFault:
    return InjectFault(id=f"f-{kind}", generation=2, kind=kind, reason="", **{"rank": 1, **fields})


@pytest.mark.parametrize(("kind", "number"), [("crash", 9), ("stop", signal.SIGSTOP)])
def test_faults_by_signal_wait_for_the_journal(agent: Agent, kind: str, number: int) -> None:
    (report,) = send(agent, fault(kind))
    assert isinstance(report, Report)
    assert report.event == FaultInjected(id=f"f-{kind}", rank=1, kind=kind, at_s=1.0)
    assert report.after == (TellKeeper(KeeperSignal(2, 1, number)),)
    assert send(agent, fault(kind)) == []
    assert hello(agent) == []


def test_other_faults_are_the_ranks_own(agent: Agent) -> None:
    for order in (fault("spin"), fault("crash", at_step=7)):
        assert send(agent, order) == [TellWorker(1, order)]
        assert send(agent, order) == []
    assert [type(r) for r in hello(agent)] == [TellWorker, TellWorker]
    assert hello(agent, rank=0) == []


def test_a_fault_for_a_step_waits_for_a_rank_that_does_not_run_yet(agent: Agent) -> None:
    agent.state.keeper.running.pop(1)  # type: ignore[union-attr]
    order = fault("crash", at_step=7)
    assert send(agent, order) == []
    agent.state.keeper.running[1] = 5  # type: ignore[union-attr]
    assert hello(agent) == [TellWorker(1, order)]
    agent.state.keeper.running.pop(1)  # type: ignore[union-attr]
    (report,) = send(agent, fault("stop"))
    assert isinstance(report, Report)
    assert isinstance(report.event, FaultInjected)
    assert "does not run" in report.event.error


def test_faults_that_cannot_be(agent: Agent) -> None:
    assert send(agent, msgspec.structs.replace(fault("crash"), generation=1)) == []
    assert send(agent, fault("crash", rank=5)) == []
    blind = make_agent(no_python=True)
    (report,) = send(blind, fault("spin"))
    assert isinstance(report, Report)
    assert isinstance(report.event, FaultInjected)
    assert "--no-python" in report.event.error


def test_sigterm_to_all_ranks_is_one_stop(agent: Agent) -> None:
    told = [*say(agent, WorkerSignal(15), 0), *say(agent, WorkerSignal(15), 1)]
    commands = [r.event for r in told if isinstance(r, Report)]
    assert all(isinstance(c, NodeAsked) and c.kind == "stop" for c in commands)
    assert {c.id for c in commands if isinstance(c, NodeAsked)} == {"sigterm-g2"}


def test_sigusr1_is_a_checkpoint_and_echoes_are_not(agent: Agent) -> None:
    (first,) = say(agent, WorkerSignal(10), 0, now=5.0)
    assert isinstance(first, Report)
    assert isinstance(first.event, NodeAsked)
    assert (first.event.kind, first.event.who) == ("checkpoint", "SIGUSR1 to rank 0")
    assert say(agent, WorkerSignal(10), 1, now=5.1) == []
    assert len(say(agent, WorkerSignal(10), 0, now=8.0)) == 1


def test_interruption_reaches_the_ranks_that_run_here_and_each_repeat_does(agent: Agent) -> None:
    order = InterruptCollectives(generation=2, ranks=(1, 7), reason="rank 0 hangs")
    assert send(agent, order) == [TellWorker(1, order)]
    assert send(agent, order) == [TellWorker(1, order)]
    assert send(agent, msgspec.structs.replace(order, generation=1)) == []
