"""An agent obeys no controller that it knows to be deposed."""

from perdure.agent.machine import Agent
from perdure.agent.messages import KeeperUp, OrderReceived, TermHeard
from perdure.agent.state import NodeIdentity
from perdure.model.bus.wire import KeeperState, NodeOrder
from perdure.model.job import JobSpec
from perdure.model.orders import Assignment, FenceAbort


def make_agent() -> Agent:
    agent = Agent(JobSpec(script="s.py", nodes=3), NodeIdentity(node=1, incarnation="a1"))
    agent.handle(1.0, KeeperUp(state=KeeperState(pid=5, generation=-1, running={0: 7}, exits=())))
    return agent


def obeys(agent: Agent, term: int, number: int) -> bool:
    wanted = Assignment(number=number, generation=0, phase="store")
    order = NodeOrder(controller=f"c{term}", term=term, assignment=wanted)
    agent.handle(2.0, OrderReceived(order=order))
    held = agent.state.assignment
    return held is not None and held.number == number


def test_an_order_of_an_earlier_term_changes_nothing() -> None:
    agent = make_agent()
    agent.handle(1.5, TermHeard(term=5))
    assert not obeys(agent, 4, 1)
    assert obeys(agent, 5, 2)
    assert obeys(agent, 9, 3)
    assert not obeys(agent, 5, 4)
    agent.handle(3.0, TermHeard(term=5))  # An acknowledgement that was long under way.
    assert not obeys(agent, 8, 5)


def test_an_abort_of_the_lighthouse_has_no_term_and_is_passed_on() -> None:
    agent = make_agent()
    agent.handle(1.5, TermHeard(term=5))
    fence = NodeOrder(controller="l", orders=(FenceAbort(reason="", quorum_id=1, groups=(1,)),))
    assert len(agent.handle(2.0, OrderReceived(order=fence))) == 1
