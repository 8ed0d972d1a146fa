"""Events in, orders out: members that leave a node, and agreements while members come and go."""

from typing import Any

from tests.unit.control.test_elastic_spares import Lab, order_of, started

from perdure.control.membership import membership_of
from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    CommandReceived,
    GenerationStepping,
    KeysDeclared,
)
from perdure.model.orders import (
    AnswerCommand,
    AnyAction,
    AssignNodes,
    InjectFault,
    ReformWorld,
    ResumeRanks,
    SendBoundary,
)
from perdure.model.steering import KeySpec


def train(nproc: int = 2, nodes: int = 2, spares: int = 0) -> Lab:
    """Return the laboratory of a world that trains at step 5."""
    lab = Lab(nproc=nproc, nodes=nodes, spares=spares)
    lr = KeySpec(name="lr", type="float", default=0.5)
    lab.say(KeysDeclared(generation=0, keys=(lr,)))
    lab.say(GenerationStepping(generation=0, at_s=lab.now, step=5))
    return lab


def ask(lab: Lab, kind: Any, **args: Any) -> list[AnyAction]:
    return lab.say(CommandReceived(id=f"{kind}-1", kind=kind, args=args, who="me", at_s=lab.now))


def find(actions: list[AnyAction], type_: Any) -> Any:
    (found,) = [a for a in actions if isinstance(a, type_)]
    return found


def promise(lab: Lab, boundary: SendBoundary, *ranks: int) -> list[AnyAction]:
    """The ranks promise; return what the last one's word brought."""
    actions: list[AnyAction] = []
    for rank in ranks:
        actions = lab.say(BoundaryAnswered(id=boundary.id, rank=rank, ok=True, step=5))
    return actions


def reach(lab: Lab, boundary: SendBoundary, *ranks: int, dropped: bool = False) -> list[AnyAction]:
    actions: list[AnyAction] = []
    for rank in ranks:
        actions += lab.say(
            BoundaryReached(
                id=boundary.id, rank=rank, step=boundary.step, at_s=lab.now, dropped=dropped,
                error="away" if dropped else "",
            )
        )  # fmt: skip
    return actions


def test_members_of_a_drained_node_leave_at_a_step_and_the_others_go_on() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    assert (prepare.ranks, prepare.leaves) == ((0, 1, 2, 3), (2, 3))
    commit = find(promise(lab, prepare, 0, 1, 2, 3), SendBoundary)
    assert commit.move == "commit"
    actions = reach(lab, prepare, 0, 1, 2, 3)
    order = order_of(actions)
    assert (order.ranks, order.urgent) == ((0, 1), False)
    answer = find(actions, AnswerCommand)
    assert answer.ok
    assert answer.result["moves"] == [{"node": 1, "to": None, "ranks": [2, 3]}]
    assert lab.machine.state.cordoned.keys() == {1}


def test_members_that_have_dropped_a_drain_stay_and_are_asked_again() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    dropped = reach(lab, prepare, 0, 1, 2, 3, dropped=True)
    assert not [a for a in dropped if isinstance(a, ReformWorld)], "all four train on"
    (later,) = [a for a in dropped if isinstance(a, SendBoundary) and a.move == "prepare"]
    promise(lab, later, 0, 1, 2, 3)
    assert not [a for a in reach(lab, later, 0) if isinstance(a, ReformWorld)], "one of four"
    assert order_of(reach(lab, later, 1, 2, 3)).ranks == (0, 1)


def test_a_node_that_its_members_have_left_is_left_already() -> None:
    lab = train(spares=2)
    for rank in (4, 5):
        lab.ready(rank)
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    reach(lab, prepare, 0, 1, 2, 3)
    for number, verb in enumerate(("drain", "evict"), 2):
        again = CommandReceived(id=f"d{number}", kind=verb, args={"targets": ["1"]}, at_s=lab.now)  # type: ignore[arg-type]
        answer = find(lab.say(again), AnswerCommand)
        assert (answer.ok, answer.reason) == (True, "node 1 is left and cordoned already")
        assert answer.result["already"] == ["node 1 is left and cordoned already"]


def test_spares_on_a_cordoned_node_are_drained_once() -> None:
    lab = train(spares=2)
    for rank in (4, 5):
        lab.ready(rank)
    ask(lab, "cordon", targets=["2"])
    drained = ask(lab, "drain", targets=["2"])
    assert [a.rank for a in drained if isinstance(a, InjectFault)] == [4, 5]
    lab.die(4)
    lab.die(5)
    again = CommandReceived(id="d2", kind="drain", args={"targets": ["2"]}, at_s=lab.now)
    assert find(lab.say(again), AnswerCommand).result["already"]


def test_a_drain_that_members_cannot_agree_on_ends_no_wait_for_there_is_none() -> None:
    lab = train()
    actions = ask(lab, "drain", targets=["1"])
    while lab.machine.state.moves:
        prepare = next(a for a in actions if isinstance(a, SendBoundary) and a.move == "prepare")
        no = BoundaryAnswered(id=prepare.id, rank=0, ok=False, step=prepare.step, reason="passed")
        actions = lab.say(no)
        assert not [a for a in actions if isinstance(a, ResumeRanks)]
    assert "did not agree on a step" in find(actions, AnswerCommand).reason
    assert lab.machine.state.released is None


def test_a_drained_node_is_taken_back_by_restore() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    reach(lab, prepare, 0, 1, 2, 3)
    for rank in (2, 3):
        assert started(lab.leave(rank)) == {}
    lab.formed()
    assert started(ask(lab, "restore", targets=["1"])) == {6: 1, 7: 1}
    assert order_of(lab.ready(6)).ranks == (0, 1, 6)


def test_a_member_that_dies_on_its_way_out_is_left_out() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    actions = lab.die(3)
    assert order_of(actions).ranks == (0, 1, 2)
    assert started(actions) == {}  # Nobody is started on a node that is being left.
    actions = reach(lab, prepare, 0, 1, 2)
    assert order_of(actions).ranks == (0, 1)
    assert find(actions, AnswerCommand).ok


def test_a_node_with_all_members_is_not_left() -> None:
    lab = train(nproc=2, nodes=1)
    answer = find(ask(lab, "drain", targets=["0"]), AnswerCommand)
    assert not answer.ok
    assert "no member of the world would be left" in answer.reason


def test_an_evicted_node_is_left_out_at_once() -> None:
    lab = train()
    actions = ask(lab, "evict", targets=["1"])
    assert order_of(actions).ranks == (0, 1)
    assert [a.rank for a in actions if isinstance(a, InjectFault)] == [2, 3]
    assert find(actions, AnswerCommand).ok
    assert started(lab.die(2)) == {}


def test_a_change_is_decided_once_the_last_one_who_was_silent_is_gone() -> None:
    lab = train()
    prepare = find(ask(lab, "set", changes={"lr": 0.1}), SendBoundary)
    assert promise(lab, prepare, 0, 1, 2) == []
    actions = lab.die(3)
    commit = find(actions, SendBoundary)
    assert (commit.move, commit.ranks, commit.epoch) == ("commit", (0, 1, 2), 1)
    assert actions.index(order_of(actions)) < actions.index(commit)
    answer = find(reach(lab, prepare, 0, 1, 2), AnswerCommand)
    assert answer.result["ranks"] == [0, 1, 2]


def test_who_comes_in_before_the_decision_is_asked_and_after_it_is_told() -> None:
    lab = train()
    lab.die(3)
    lab.formed()
    prepare = find(ask(lab, "set", changes={"lr": 0.1}), SendBoundary)
    actions = lab.ready(7)
    assert order_of(actions).steering.changes == ()
    assert find(actions, SendBoundary).ranks == (0, 1, 2, 7)
    assert promise(lab, prepare, 0, 1, 2) == []
    lab.formed()
    assert find(promise(lab, prepare, 7), SendBoundary).move == "commit"
    lab.die(2)
    lab.formed()
    (change,) = order_of(lab.ready(6)).steering.changes
    assert change.values == {"lr": 0.1}


def test_nobody_comes_in_between_the_decision_and_the_doing_of_a_checkpoint() -> None:
    lab = train()
    lab.die(3)
    lab.formed()
    prepare = find(ask(lab, "checkpoint"), SendBoundary)
    promise(lab, prepare, 0, 1, 2)
    assert lab.ready(7) == []
    assert order_of(reach(lab, prepare, 0, 1, 2)).ranks == (0, 1, 2, 7)


def test_a_world_without_a_member_that_has_the_state_starts_again() -> None:
    lab = train(nproc=2, nodes=1)
    lab.die(1)
    lab.formed()
    assert order_of(lab.ready(3)).ranks == (0, 3)
    lab.die(0)  # 3 is a member, and has nothing yet.
    assert lab.machine.state.generation == 1


def test_who_alone_has_the_state_is_not_put_out_for_one_who_only_comes() -> None:
    lab = train(nproc=1, nodes=2)
    lab.die(1)
    lab.formed()
    assert order_of(lab.ready(3)).ranks == (0, 3)
    actions = ask(lab, "evict", targets=["0"])  # 3 has nothing yet.
    assert not [a for a in actions if isinstance(a, ReformWorld | AnswerCommand)]
    actions = lab.formed()
    assert find(actions, ReformWorld).ranks == (3,)
    assert find(actions, AnswerCommand).ok


def test_a_drain_that_is_decided_is_done_and_its_node_filled_anew_where_it_was_restored() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    assert find(ask(lab, "restore", targets=["1"]), AnswerCommand).ok
    actions = reach(lab, prepare, 0, 1, 2, 3)
    assert order_of(actions).ranks == (0, 1)
    assert lab.machine.state.cordoned == {}
    assert started(lab.leave(2)) == {6: 1}
    assert started(lab.leave(3)) == {6: 1, 7: 1}


def test_a_drain_that_is_not_decided_is_taken_back_by_restore() -> None:
    lab = train()
    ask(lab, "drain", targets=["1"])
    actions = ask(lab, "restore", targets=["1"])
    assert find(actions, SendBoundary).move == "abort"
    answers = {a.id: a.ok for a in actions if isinstance(a, AnswerCommand)}
    assert answers == {"drain-1": False, "restore-1": True}


def test_nobody_leaves_once_all_others_have_died() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    lab.die(0)
    lab.die(1)
    answer = find(reach(lab, prepare, 2, 3), AnswerCommand)
    assert not answer.ok
    assert membership_of(lab.machine.state).list_asked(lab.machine.state) == (2, 3)
    lab.leave(2)  # They had promised it: their end is not the job's.
    lab.leave(3)
    assert lab.machine.state.generation == 1
    assert lab.machine.state.world.phase == "forming"


def test_the_job_starts_again_where_the_others_die_while_the_last_one_leaves() -> None:
    lab = train()
    prepare = find(ask(lab, "drain", targets=["1"]), SendBoundary)
    promise(lab, prepare, 0, 1, 2, 3)
    lab.leave(2)
    lab.leave(3)
    lab.die(0)
    lab.die(1)
    assert lab.machine.state.generation == 1
    assert lab.machine.state.world.phase == "forming"


def test_a_restart_of_a_rank_ends_that_member_alone() -> None:
    lab = train()
    actions = ask(lab, "restart", rank=1)
    assert find(actions, AnswerCommand).ok
    order = find(actions, InjectFault)
    assert (order.rank, order.kind) == (1, "crash")
    assert not [action for action in actions if isinstance(action, AssignNodes)]
    assert lab.machine.state.generation == 0


def test_a_restart_without_a_rank_ends_all_members() -> None:
    lab = train()
    assert find(ask(lab, "restart"), AssignNodes).assignment.generation == 1
