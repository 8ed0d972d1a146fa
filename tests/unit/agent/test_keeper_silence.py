"""A keeper that lives and does not answer: what is said of it, and when it is ended."""

import pytest

from perdure.agent.machine import Agent
from perdure.agent.messages import (
    EndKeeper,
    Input,
    KeeperGone,
    KeeperHeard,
    KeeperSilent,
    KeeperUp,
    OrderReceived,
    Report,
    Request,
    StartKeeper,
)
from perdure.agent.state import NodeIdentity
from perdure.model.bus.wire import KeeperState, NodeOrder
from perdure.model.events import KeeperLost, NodeAsked, VerdictReached, VerdictWithdrawn
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.orders import Assignment

HELD = KeeperState(pid=7, generation=2, running={0: 10, 1: 11}, exits=())


@pytest.fixture
def agent() -> Agent:
    return start()


def start(*, observe: bool = False) -> Agent:
    detect = DetectConfig(quiet_action_s=30.0)
    spec = JobSpec(name="j", script="s.py", nproc=2, detect=detect, observe=observe)
    agent = Agent(spec, NodeIdentity(node=0, incarnation="a"))
    agent.handle(0.0, KeeperUp(state=HELD))
    run = Assignment(number=5, generation=2, phase="run")
    agent.handle(0.0, OrderReceived(order=NodeOrder("c1", assignment=run)))
    return agent


def silent(state: str = "T", silent_s: float = 2.5, ended: tuple[int, ...] = ()) -> KeeperSilent:
    return KeeperSilent(pid=7, state=state, silent_s=silent_s, ended=ended)


def ends(requests: list[Request]) -> list[str]:
    return [request.reason for request in requests if isinstance(request, EndKeeper)]


def events(requests: list[Request]) -> list[object]:
    return [request.event for request in requests if isinstance(request, Report)]


def test_it_is_named_once_and_a_checkpoint_asked_for(agent: Agent) -> None:
    first = agent.handle(100.0, silent())
    reached, command = events(first)
    assert isinstance(reached, VerdictReached)
    assert reached.verdict.kind == "Unresponsive"
    assert reached.verdict.first_seen_s == 97.5
    assert "pid 7) is stopped (state T)" in reached.verdict.reason
    assert not reached.verdict.actionable
    assert isinstance(command, NodeAsked)
    assert command.kind == "checkpoint"
    assert agent.handle(100.5, silent(silent_s=3.0)) == []


def test_of_a_job_that_is_only_observed_it_is_named_and_left_alone() -> None:
    """Item 3: its end would be that of ranks that train on; only once one has ended is it ended."""
    agent = start(observe=True)
    (reached,) = events(agent.handle(100.0, silent()))
    assert isinstance(reached, VerdictReached)
    assert ends(agent.handle(200.0, silent(silent_s=1000.0))) == []
    assert ends(agent.handle(201.0, silent(silent_s=1001.0, ended=(1,)))) != []


def test_its_voice_takes_the_verdict_back(agent: Agent) -> None:
    assert agent.handle(99.0, KeeperHeard()) == []
    agent.handle(100.0, silent())
    (withdrawn,) = events(agent.handle(101.0, KeeperHeard()))
    assert isinstance(withdrawn, VerdictWithdrawn)
    assert len(events(agent.handle(200.0, silent()))) == 2


@pytest.mark.parametrize(
    ("word", "why"),
    [(silent(ended=(1,)), r"ranks [1] have ended"), (silent(silent_s=30.0), "for 30 s")],
)
def test_it_is_ended_once_there_is_a_reason(agent: Agent, word: Input, why: str) -> None:
    assert ends(agent.handle(100.0, silent())) == []
    (reason,) = ends(agent.handle(101.0, word))
    assert why in reason
    assert ends(agent.handle(102.0, word)) == []


def test_silence_alone_ends_nobody_unless_the_job_file_says_so() -> None:
    """T5: its ranks train on; they would die with it."""
    spec = JobSpec(name="j", script="s.py", nproc=2)
    agent = Agent(spec, NodeIdentity(node=0, incarnation="a"))
    agent.handle(0.0, KeeperUp(state=HELD))
    assert ends(agent.handle(100.0, silent())) == []
    assert ends(agent.handle(4000.0, silent(silent_s=3900.0))) == []


def test_it_is_ended_as_soon_as_an_order_waits(agent: Agent) -> None:
    agent.handle(100.0, silent())
    store = Assignment(number=6, generation=3, phase="store")
    agent.handle(100.1, OrderReceived(order=NodeOrder("c1", assignment=store)))
    (reason,) = ends(agent.handle(100.5, silent()))
    assert "an order waits" in reason


def test_one_that_never_said_what_it_holds_is_ended_at_once() -> None:
    agent = Agent(JobSpec(name="j", script="s.py"), NodeIdentity(node=0, incarnation="a"))
    requests = agent.handle(100.0, silent())
    assert "nobody knows" in ends(requests)[0]
    assert len(events(requests)) == 1


def test_its_loss_says_why(agent: Agent) -> None:
    agent.handle(100.0, silent(silent_s=30.0))
    told = agent.handle(101.0, KeeperGone(at_s=101.0))
    assert StartKeeper() in told
    (lost,) = [event for event in events(told) if isinstance(event, KeeperLost)]
    assert "stopped (state T)" in lost.cause
    assert agent.state.lost_cause == ""
