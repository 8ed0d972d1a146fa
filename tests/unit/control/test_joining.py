"""Who is given which place, and what a machine that comes into a lost one's starts."""

from tests.unit.control.driver import Driver, one
from tests.unit.control.test_elastic_spares import Lab, started

from perdure.model.events import (
    CommandReceived,
    NodeCordoned,
    NodeLost,
    NodeRegistered,
    PreemptionNoticed,
    TimerFired,
)
from perdure.model.job import TorchftConfig
from perdure.model.orders import AnswerCommand, AssignNodes, RecordEvent


def ask(driver: Driver, machine: str, **more: object) -> AnswerCommand:
    args = {"machine": machine, "host": machine, **more}
    id_ = f"join-{len(driver.log)}"
    told: AnswerCommand = one(
        driver.do(CommandReceived(id=id_, kind="join", args=args, who="", at_s=driver.now)),
        AnswerCommand,
    )
    return told


def test_each_machine_has_a_place_of_its_own_and_the_same_when_it_asks_again() -> None:
    driver = Driver(nodes=3, remote=2)
    assert [ask(driver, m).result["node"] for m in ("x", "y", "x")] == [1, 2, 1]
    refused = ask(driver, "z")
    assert not refused.ok
    assert "nodes 1, 2 are taken" in refused.reason
    driver.now += 31.0
    assert ask(driver, "z").result["node"] == 1, "x has never come"


def test_a_machine_with_groups_keeps_its_place_until_its_login_is_ended() -> None:
    """Whoever came to it before would have the same login, and tell of ranks under its name."""
    driver = Driver(torchft=TorchftConfig(replicas=1, elsewhere=True), remote=2)
    made = {"id": "i1", "digest": "0" * 64, "expires_s": 60.0, "uses": 0}

    def order(kind: str, **args: object) -> AnswerCommand:
        id_ = f"{kind}-{len(driver.log)}"
        event = CommandReceived(id=id_, kind=kind, args=args, who="", at_s=driver.now)
        actions = driver.do(event)
        for record in (action for action in actions if isinstance(action, RecordEvent)):
            driver.do(record.event)
        return one(actions, AnswerCommand)

    assert order("invite", **made).ok

    def come(machine: str) -> int:
        came = {"machine": machine, "host": machine, "invitation": "i1", "proof": "0" * 64}
        return int(order("join", **came).result["node"])

    assert [come(machine) for machine in ("x", "y", "x")] == [0, 1, 0]
    driver.now += 1e6
    refused = ask(driver, "z")
    assert "places 0, 1 are taken" in refused.reason
    assert order("revoke", id="i1").result["nodes"] == [0, 1]
    assert "places 0, 1 are taken" in ask(driver, "z").reason
    assert order("revoke", id="i1", end_login=True).ok
    assert ask(driver, "z").result["node"] == 0


def test_a_copy_of_a_machine_that_is_heard_of_gets_no_place() -> None:
    """It was given the first one's, and the job started again."""
    driver = Driver(nodes=2, remote=1)
    assert ask(driver, "x").result["node"] == 1
    driver.register(0)
    driver.register(1)
    driver.run()
    copy = ask(driver, "x", silent_s={"0": 0.1, "1": 0.3})
    assert not copy.ok
    assert "node 1 already" in copy.reason
    assert copy.result["silent_in_s"] > 2.0
    assert ask(driver, "x", silent_s={"0": 0.1, "1": 2.1}).result["node"] == 1, "it came back"
    driver.do(NodeLost(node=1, at_s=driver.now, reason="its connections ended"))
    assert ask(driver, "x", silent_s={"0": 0.1, "1": 0.3}).result["node"] == 1, "it is lost"


def test_the_world_waits_for_its_nodes_and_not_for_spare_ones() -> None:
    driver = Driver(nodes=2, remote=1)
    assert driver.register(0) == []
    assert one(driver.register(1), AssignNodes)
    spare = Driver(nodes=1, spares=2, remote=1)
    assert one(spare.register(0), AssignNodes)
    spare.run()
    spare.register(1)
    assert spare.controller.state.spares == (1,)


def test_the_place_of_a_lost_machine_is_free_for_another() -> None:
    driver = Driver(nodes=2, remote=1)
    assert ask(driver, "x").result["node"] == 1
    driver.register(0)
    driver.register(1)
    driver.run()
    assert not ask(driver, "y").ok
    driver.now += 60.0
    driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    driver.now += 0.5
    assert ask(driver, "y").result["node"] == 1
    assert not ask(driver, "z").ok, "y was given it"


def test_a_job_without_places_says_so() -> None:
    assert "--remote" in ask(Driver(nodes=2), "x").reason


def test_a_new_machine_in_a_lost_ones_place_starts_new_members_only() -> None:
    lab = Lab(nproc=1, nodes=2, spares=0)
    lab.say(NodeLost(node=1, at_s=lab.now, reason="silent"))
    lab.formed()
    back = NodeRegistered(node=1, incarnation="b", host="h", boot_id="other", slots=1)
    actions = lab.say(back)
    assert started(actions) == {3: 1}
    for action in actions:
        if isinstance(action, AssignNodes) and 1 in action.nodes:
            assert action.assignment.gone == (1,)


def test_the_place_of_a_node_that_an_operator_has_left_is_not_given_away() -> None:
    driver = Driver(nodes=1, spares=2, remote=1)
    assert ask(driver, "x").result["node"] == 1
    driver.register(0)
    driver.register(1)
    driver.run()
    cordon = CommandReceived(
        id="c", kind="cordon", args={"targets": ["1"]}, who="ada", at_s=driver.now
    )
    driver.do(cordon)
    driver.do(NodeCordoned(node=1, at_s=driver.now, reason="r", who="ada"))
    driver.now += 60.0
    driver.do(NodeLost(node=1, at_s=driver.now, reason="silent"))
    driver.now += 60.0
    assert not ask(driver, "y").ok


def test_a_world_grows_to_its_places_and_what_is_spare_stays_so() -> None:
    lab = Lab(nproc=2, nodes=1, spares=0, nodes_max=3)
    assert lab.spec.num_nodes == 3
    assert started(lab.begun) == {}, "nobody is there but the first node"
    first = started(lab.register(1))
    assert first == {2: 1, 3: 1}
    for member in first:
        lab.ready(member)
        lab.formed()
    assert lab.machine.state.world.elastic.members == (0, 1, 2, 3)
    assert started(lab.register(2)).items() >= {4: 2, 5: 2}.items()


def test_a_machine_in_the_place_of_one_that_was_taken_away_runs_at_once() -> None:
    lab = Lab(nproc=1, nodes=1, spares=0, nodes_max=2)
    lab.say(join_of("a"))
    lab.ready(*started(lab.register(1)))
    lab.formed()
    lab.say(PreemptionNoticed(node=1, at_s=lab.now, grace_s=50.0, source="scale", waits=True))
    lab.now += 1.0
    lab.say(TimerFired())
    lab.say(NodeLost(node=1, at_s=lab.now, reason="silent"))
    assert lab.machine.state.going == {1}
    lab.say(join_of("b"))
    assert started(lab.register(1)) != {}, "another pod, on the same machine"
    assert lab.machine.state.going == set()


def join_of(machine: str) -> CommandReceived:
    args = {"machine": machine, "host": f"pod-{machine}"}
    return CommandReceived(id=f"join-{machine}", kind="join", args=args, who="", at_s=0.0)
