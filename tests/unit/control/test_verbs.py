"""Drain, cordon, evict and restore: done, refused with a reason, or taken back whole."""

from typing import Any

import msgspec
import pytest
from tests.unit.control.driver import Driver, one, started
from tests.unit.control.test_placement import start

from perdure.control.job import JobState
from perdure.control.machine import Controller
from perdure.control.steering.verbs import preview_verb
from perdure.model.codec import decode, encode
from perdure.model.events import (
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    FailureDecided,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    KeysDeclared,
    NodeCordoned,
    NodeLost,
    NodeRestored,
    ProgressNoted,
    RankJoined,
    RanksStarted,
    SettingsChanged,
    StoreReady,
    TimerFired,
)
from perdure.model.orders import (
    AnswerCommand,
    AnyAction,
    AssignNodes,
    CordonNode,
    InjectFault,
    NoteDraining,
    RecordEvent,
    RestoreNode,
    ResumeRanks,
    SendBoundary,
)
from perdure.model.steering import KeySpec


def ask(driver: Driver, kind: str, *targets: str, id_: str = "", **args: Any) -> list[AnyAction]:
    command = CommandReceived(
        id=id_ or f"{kind}-{len(driver.log)}",
        kind=kind,  # type: ignore[arg-type]
        args={"targets": list(targets), **args},
        who="ada",
        at_s=driver.now,
    )
    return driver.do(command)


def agree(driver: Driver, sent: SendBoundary) -> None:
    for rank in driver.controller.state.ranks:
        driver.do(BoundaryAnswered(id=sent.id, rank=rank, ok=True, step=sent.step - 1))


def hold(driver: Driver, sent: SendBoundary) -> list[AnyAction]:
    actions: list[AnyAction] = []
    for rank in driver.controller.state.ranks:
        reached = BoundaryReached(id=sent.id, rank=rank, step=sent.step, at_s=driver.now)
        actions += driver.do(reached)
    return actions


def save(driver: Driver, step: int) -> list[AnyAction]:
    return driver.do(
        CheckpointSaved(
            generation=driver.controller.state.generation, step=step, path="p", bytes=1,
            stall_s=0.01, save_s=0.1, at_s=driver.now,
        )
    )  # fmt: skip


def resume(driver: Driver, step: int) -> AnswerCommand:
    """Bring the newest generation to its first step, from `step`; return the answer to that."""
    state = driver.controller.state
    generation = state.generation
    for node in range(driver.spec.num_nodes):
        driver.do(GenerationStopped(node=node, generation=generation - 1, at_s=driver.now))
    driver.do(StoreReady(generation=generation, host="h", port=7, agent_store=True))
    for node in state.world.placement:
        started = RanksStarted(
            node=node, generation=generation, pids={}, at_s=driver.now, warm=True
        )
        driver.do(started)
    for rank in state.ranks:
        driver.do(RankJoined(generation=generation, rank=rank))
        driver.do(CheckpointRestored(generation=generation, rank=rank, step=step, path="p"))
    driver.now += 1.5
    stepping = GenerationStepping(generation=generation, at_s=driver.now, step=step)
    answer: AnswerCommand = one(driver.do(stepping), AnswerCommand)
    return answer


def test_drain_moves_the_ranks_at_an_agreed_step_and_loses_none() -> None:
    driver = start()
    actions = ask(driver, "drain", "node:1", why="fan")
    assert one(actions, NoteDraining).node == 1
    sent = one(actions, SendBoundary)
    assert (sent.kind, sent.move) == ("drain", "prepare")
    agree(driver, sent)
    assert not any(isinstance(a, AssignNodes) for a in hold(driver, sent)), "not saved yet"
    actions = save(driver, sent.step)
    order = one(actions, AssignNodes)
    assert order.assignment.placement == (0, 2)
    assert "fan" in order.reason
    assert one(actions, CordonNode).who == "ada"
    answer = resume(driver, sent.step)
    assert answer.ok
    assert answer.result["steps_lost"] == 0
    assert answer.result["moves"] == [{"node": 1, "to": 2, "ranks": [2, 3]}]
    assert answer.result["took_s"] == 1.5
    assert "ranks 2, 3 from node 1 to node 2 in 1.50 s" in answer.reason
    assert driver.controller.state.spares == ()


def test_a_drain_twice_is_one_and_says_so() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1", id_="a"), SendBoundary)
    again = one(ask(driver, "drain", "rank:3", id_="b"), AnswerCommand)
    assert again.ok
    assert "node 1 is being drained already (drain asked for by ada)" in again.reason
    assert ask(driver, "drain", "1", id_="a") == [], "the same command"
    agree(driver, sent)
    hold(driver, sent)
    save(driver, sent.step)
    first = resume(driver, sent.step)
    assert ask(driver, "drain", "1", id_="a") == [first], "its answer, again"
    late = one(ask(driver, "evict", "1"), AnswerCommand)
    assert late.ok
    assert late.reason == "node 1 is left and cordoned already"


def test_evict_ends_the_world_at_once_and_counts_what_is_made_again() -> None:
    driver = start()
    save(driver, 8)
    generation = driver.controller.state.generation
    driver.do(ProgressNoted(generation=generation, at_s=driver.now, step=11, accounts={}))
    actions = ask(driver, "evict", "rank:2")
    assert one(actions, AssignNodes).assignment.placement == (0, 2)
    assert one(actions, CordonNode).node == 1
    assert driver.controller.state.failures.kept == [], "nobody failed"
    answer = resume(driver, 8)
    assert answer.result["steps_lost"] == 3
    assert "3 steps are made again" in answer.reason


def test_without_a_spare_node_it_is_refused_and_nothing_changes() -> None:
    driver = start(spares=0)
    for verb in ("drain", "evict", "cordon"):
        answer = one(ask(driver, verb, "1"), AnswerCommand)
        assert not answer.ok
        assert "would be 1 short: no spare node is ready" in answer.reason
    state = driver.controller.state
    assert (state.moves, state.cordoned, state.world.placement) == ({}, {}, (0, 1))


def test_evict_waits_for_a_spare_node_where_it_may() -> None:
    driver = start()
    ask(driver, "cordon", "2")
    driver.do(NodeCordoned(node=2, at_s=driver.now, reason="r", who="ada"))
    assert not one(ask(driver, "evict", "1"), AnswerCommand).ok
    actions = ask(driver, "evict", "1", wait=True)
    assert not any(isinstance(action, AssignNodes | AnswerCommand) for action in actions)
    actions = ask(driver, "restore", "2")
    assert one(actions, RestoreNode).node == 2
    assert one(actions, AssignNodes).assignment.placement == (0, 2)


def test_what_waits_for_too_long_is_taken_back() -> None:
    driver = start()
    ask(driver, "cordon", "2")
    ask(driver, "evict", "1", wait=True, deadline_s=5.0)
    assert driver.controller.next_deadline() == driver.now + 5.0
    driver.now += 5.0
    actions = driver.do(TimerFired())
    answer = one(actions, AnswerCommand)
    assert not answer.ok
    assert answer.reason.endswith("nothing was moved")
    assert one(actions, NoteDraining).over
    assert driver.controller.state.cordoned.keys() == {2}


def test_a_drain_past_its_deadline_releases_the_ranks() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1", deadline_s=3.0), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    driver.now += 3.0
    actions = driver.do(TimerFired())
    assert one(actions, ResumeRanks).id == sent.id
    answer = one(actions, AnswerCommand)
    assert not answer.ok
    assert "not verified yet when its deadline passed; nothing was moved" in answer.reason
    assert driver.controller.state.world.placement == (0, 1)
    assert driver.controller.state.cordoned == {}
    assert driver.controller.state.spares == (2,)


def test_a_forced_drain_evicts_at_its_deadline() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1", deadline_s=3.0, force=True), SendBoundary)
    driver.now += 3.0
    actions = driver.do(TimerFired())
    assert one(actions, AssignNodes).assignment.placement == (0, 2)
    assert one(actions, SendBoundary).move == "abort"
    assert sent.id == one(actions, SendBoundary).id
    answer = one(actions, AnswerCommand)
    assert answer.ok
    assert "had not all come to step 7 when its deadline passed" in answer.result["instead"]
    assert "the new world is forming and not training yet" in answer.reason


def test_a_checkpoint_that_fails_takes_the_drain_back() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1"), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    failed = CheckpointFailed(
        generation=driver.controller.state.generation, step=sent.step, error="disk full", at_s=1.0
    )
    actions = driver.do(failed)
    assert one(actions, ResumeRanks)
    assert "disk full" in one(actions, AnswerCommand).reason


def test_supervised_scripts_are_only_drained_by_force() -> None:
    driver = start()
    driver.controller.state.world.joined.clear()
    refused = one(ask(driver, "drain", "1"), AnswerCommand)
    assert not refused.ok
    assert "does not call perdure.init()" in refused.reason
    actions = ask(driver, "drain", "1", force=True)
    assert one(actions, AssignNodes).assignment.placement == (0, 2)


def test_restore_takes_a_drain_back_and_lets_go_of_a_cordon() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1", id_="d"), SendBoundary)
    actions = ask(driver, "restore", "1")
    assert one(actions, SendBoundary).move == "abort"
    assert sent.id == one(actions, SendBoundary).id
    answers = {a.id: a for a in actions if isinstance(a, AnswerCommand)}
    assert not answers["d"].ok
    assert "restore asked for by ada; nothing was moved" in answers["d"].reason
    assert one(ask(driver, "restore", "1"), AnswerCommand).reason.endswith("already")
    ask(driver, "cordon", "1")
    assert one(ask(driver, "restore", "1"), RestoreNode).who == "ada"


def test_cordoned_node_keeps_its_ranks_until_the_next_world() -> None:
    driver = start()
    answer = one(ask(driver, "cordon", "1"), AnswerCommand)
    assert answer.ok
    assert "ranks 2, 3 stay until the next world" in answer.reason
    assert driver.controller.state.world.phase == "running"
    order = one(driver.exit(0, signal=9), AssignNodes)
    assert order.assignment.placement == (0, 2)


def test_a_failure_meanwhile_moves_the_ranks_and_the_answer_says_so() -> None:
    driver = start()
    save(driver, 5)
    ask(driver, "drain", "1")
    actions = driver.exit(0, step=9, signal=9)
    assert one(actions, AssignNodes).assignment.placement == (0, 2)
    assert one(actions, CordonNode).node == 1
    answer = resume(driver, 5)
    assert answer.ok
    assert answer.result["steps_lost"] == 4
    assert "the world was ended before its ranks agreed on a step" in answer.reason


def test_loss_of_the_spare_node_takes_a_drain_back() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1"), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    driver.do(NodeLost(node=2, at_s=driver.now, reason="silent"))
    actions = save(driver, sent.step)
    assert "the spare node is gone" in one(actions, AnswerCommand).reason
    assert one(actions, ResumeRanks)
    assert driver.controller.state.world.phase == "running"


def test_several_nodes_are_all_moved_or_none() -> None:
    driver = start(nodes=3, spares=2)
    answer = one(ask(driver, "evict", "0", "1"), AnswerCommand)
    assert not answer.ok
    driver = start(nodes=3, spares=4)
    actions = ask(driver, "evict", "0", "1")
    assert one(actions, AssignNodes).assignment.placement == (3, 4, 2)


def test_targets_that_are_not_there_are_refused() -> None:
    driver = start()
    for target, why in (
        ("9", "there is no node 9: the nodes are 0 to 2"),
        ("rank:4", "there is no rank 4: the ranks are 0 to 3"),
        ("replica:0", "this is no torchft job"),
        ("GPU-1", "there is no device `GPU-1`"),
    ):
        answer = one(ask(driver, "drain", target), AnswerCommand)
        assert not answer.ok
        assert why in answer.reason
    driver.register(2, device_ids=("GPU-1",))
    assert one(ask(driver, "cordon", "GPU-1"), CordonNode).node == 2


def test_a_dry_run_says_what_would_happen_and_changes_nothing() -> None:
    driver = start()
    before = repr(driver.controller.state)
    told = preview_verb(driver.controller.state, "drain", {"targets": ["rank:2"], "dry_run": True})
    assert told is not None
    ok, words, result = told
    assert ok
    assert "ranks 2, 3 move from node 1 to node 2; no step is lost" in words
    assert result["moves"] == [{"node": 1, "to": 2, "ranks": [2, 3]}]
    assert repr(driver.controller.state) == before
    assert preview_verb(driver.controller.state, "drain", {"targets": ["1"]}) is None


def test_the_next_controller_goes_on_at_any_point() -> None:
    """Each prefix of a drain's events is replayed; the successor must know and say the same."""
    driver = start()
    sent = one(ask(driver, "drain", "1"), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    save(driver, sent.step)
    resume(driver, sent.step)
    for length in range(len(driver.log) + 1):
        heir = Driver.__new__(Driver)
        heir.controller, heir.log, heir.spec = type(driver.controller)(), [], driver.spec
        for heir.now, event in driver.log[:length]:
            heir.do(event)
        if not length or not isinstance(driver.log[0][1], JobSubmitted):
            continue
        moves = heir.controller.state.moves
        actions = heir.do(ControllerStarted(incarnation="c2"))
        if any(move.stage in ("waiting", "agreeing", "held") for move in moves.values()):
            assert any(isinstance(a, NoteDraining) for a in actions)
        cordoned = set(heir.controller.state.cordoned)
        assert cordoned == {a.node for a in actions if isinstance(a, CordonNode)}


def test_restoration_that_did_not_reach_the_journal_is_said_again() -> None:
    driver = start()
    ask(driver, "cordon", "2")
    driver.do(NodeCordoned(node=2, at_s=driver.now, reason="r", who="ada"))
    ask(driver, "restore", "2")
    again = driver.do(ControllerStarted(incarnation="c2"))
    assert one(again, RestoreNode).node == 2
    driver.do(NodeRestored(node=2, at_s=driver.now, reason="r", who="ada"))
    again = driver.do(ControllerStarted(incarnation="c3"))
    assert not any(isinstance(a, RestoreNode | CordonNode) for a in again)


def test_a_paused_job_is_drained_at_the_step_where_it_stands() -> None:
    driver = start()
    sent = one(ask(driver, "pause"), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    again = one(ask(driver, "drain", "1"), SendBoundary)
    assert (again.kind, again.step) == ("drain", sent.step)
    agree(driver, again)
    hold(driver, again)
    assert one(save(driver, again.step), AssignNodes).assignment.placement == (0, 2)
    state = driver.controller.state
    generation = state.generation
    for node in range(driver.spec.num_nodes):
        driver.do(GenerationStopped(node=node, generation=generation - 1, at_s=driver.now))
    driver.do(StoreReady(generation=generation, host="h", port=7, agent_store=True))
    for node in state.world.placement:
        pids = {0: 1}
        driver.do(RanksStarted(node=node, generation=generation, pids=pids, at_s=1.0, warm=True))
    for rank in state.ranks:
        driver.do(RankJoined(generation=generation, rank=rank))
        driver.do(CheckpointRestored(generation=generation, rank=rank, step=sent.step, path="p"))
    answer = one(hold(driver, sent), AnswerCommand)
    assert answer.ok
    assert answer.result["steps_lost"] == 0


def test_replica_groups_are_found_whichever_way_they_are_named() -> None:
    driver = Driver(nodes=2, spares=2, torchft={"replicas": 2})
    for node in range(driver.spec.num_nodes):
        driver.register(node)
    for target, replicas in (("replica:1", [1]), ("node:2", [2]), ("rank:3", [1])):
        answer = one(ask(driver, "drain", target, dry_run=True), AnswerCommand)
        assert answer.ok
        assert answer.result["replicas"] == replicas
    unknown = one(ask(driver, "drain", "replica:7"), AnswerCommand)
    assert "the replicas are 0 to 2" in unknown.reason


def test_moves_survive_being_written_down() -> None:
    driver = start()
    sent = one(ask(driver, "drain", "1"), SendBoundary)
    for moment in range(3):
        state = driver.controller.state
        known = decode(encode(state), JobState)
        assert repr(known) == repr(state)
        if moment == 0:
            agree(driver, sent)
            hold(driver, sent)
        else:
            save(driver, sent.step)


def test_a_fault_for_a_step_is_kept_for_a_job_that_does_not_train_yet() -> None:
    """And given to each generation until it has taken place."""
    driver = Driver()
    answer = one(ask(driver, "inject", id_="i", rank=1, at_step=50), AnswerCommand)
    assert (answer.ok, answer.reason) == (True, "armed")
    refused = one(ask(driver, "inject", id_="far", rank=9, at_step=50), AnswerCommand)
    assert not refused.ok
    driver.register()
    driver.run()
    sent = driver.do(GenerationStepping(generation=0, step=0, at_s=driver.now))
    order = one(sent, InjectFault)
    assert (order.id, order.rank, order.at_step, order.generation) == ("i", 1, 50, 0)


def test_a_fault_for_a_step_of_a_script_without_steps_is_refused() -> None:
    driver = started()
    driver.do(GenerationStepping(generation=0, step=-1, at_s=driver.now))
    answer = one(ask(driver, "inject", rank=1, at_step=50), AnswerCommand)
    assert not answer.ok
    assert "declared no step so far" in answer.reason


def test_a_checkpoint_that_fails_before_all_ranks_are_heard_is_answered() -> None:
    driver = start()
    sent = one(ask(driver, "checkpoint"), SendBoundary)
    agree(driver, sent)
    failed = CheckpointFailed(
        generation=driver.controller.state.generation, step=sent.step, error="it hangs", at_s=1.0
    )
    answer = one(driver.do(failed), AnswerCommand)
    assert not answer.ok
    assert "it hangs" in answer.reason


def drop(driver: Driver, sent: SendBoundary) -> list[AnyAction]:
    """Have all ranks say that they have dropped what was asked; return what follows."""
    actions: list[AnyAction] = []
    for rank in driver.controller.state.ranks:
        reached = BoundaryReached(
            id=sent.id, rank=rank, step=sent.step, at_s=driver.now, error="away", dropped=True
        )
        actions += driver.do(reached)
    return actions


@pytest.mark.parametrize("kind", ["checkpoint", "stop", "pause"])
@pytest.mark.parametrize("committed", [True, False])
def test_what_all_ranks_have_dropped_is_asked_again(kind: str, committed: bool) -> None:
    """Also after a commit, which reached none of them: no controller may rely on it."""
    driver = start()
    sent = one(ask(driver, kind), SendBoundary)
    if committed:
        agree(driver, sent)
    actions = drop(driver, sent)
    again = [a for a in actions if isinstance(a, SendBoundary) and a.move == "prepare"]
    (later,) = again
    assert later.id != sent.id
    assert later.step > sent.step
    assert driver.controller.state.steering.pause is None
    agree(driver, later)
    assert driver.controller.state.boundary is None or (
        driver.controller.state.boundary.move == "commit"
    )


def test_a_committed_change_that_all_ranks_have_dropped_is_taken_back() -> None:
    driver = start()
    spec = KeySpec(name="lr", type="float", default=0.5)
    generation = driver.controller.state.generation
    driver.do(KeysDeclared(generation=generation, keys=(spec,)))
    sent = one(ask(driver, "set", changes={"lr": 0.1}), SendBoundary)
    agree(driver, sent)
    steering = driver.controller.state.steering
    assert [change.values for change in steering.changes] == [{"lr": 0.1}]
    actions = drop(driver, sent)
    assert not steering.changes
    assert not steering.open
    (noted,) = [
        a.event.change
        for a in actions
        if isinstance(a, RecordEvent) and isinstance(a.event, SettingsChanged)
    ]
    assert (noted.values, noted.undoes) == ({"lr": 0.5}, 1)
    (later,) = [a for a in actions if isinstance(a, SendBoundary) and a.move == "prepare"]
    agree(driver, later)
    (change,) = steering.changes
    assert (change.values, change.step) == ({"lr": 0.1}, later.step)
    assert change.epoch > noted.epoch


def test_what_waits_behind_a_dropped_agreement_begins_once_that_is_given_up() -> None:
    driver = start()
    spec = KeySpec(name="lr", type="float", default=0.5)
    generation = driver.controller.state.generation
    driver.do(KeysDeclared(generation=generation, keys=(spec,)))
    at_step = driver.controller.state.step + 20
    sent = one(ask(driver, "set", changes={"lr": 0.1}, at=at_step), SendBoundary)
    assert not [a for a in ask(driver, "checkpoint") if isinstance(a, SendBoundary)], "it waits"
    actions = drop(driver, sent)
    assert not one([a for a in actions if isinstance(a, AnswerCommand)], AnswerCommand).ok
    begun = [a for a in actions if isinstance(a, SendBoundary) and a.move == "prepare"]
    assert [a.kind for a in begun] == ["checkpoint"]


def test_a_restart_forms_the_next_generation_and_is_no_failure_of_the_budget() -> None:
    driver = start()
    actions = ask(driver, "restart")
    answer = one(actions, AnswerCommand)
    assert answer.ok
    assignment = one(actions, AssignNodes).assignment
    assert (assignment.generation, assignment.phase) == (1, "store")
    state = driver.controller.state
    assert list(state.world.placement) == [0, 1]
    assert list(state.failures.kept) == []
    (decided,) = driver.controller.facts(driver.now)
    assert isinstance(decided, FailureDecided)
    assert (decided.cause, decided.culprit, decided.rung) == (
        "restart asked for by ada", "the job", "restart",
    )  # fmt: skip
    early = one(ask(driver, "restart", rank=1), AnswerCommand)
    assert (early.ok, early.reason) == (False, "the world is forming")


def test_a_restart_names_a_rank_that_there_is() -> None:
    driver = start()
    refused = one(ask(driver, "restart", rank=9), AnswerCommand)
    assert (refused.ok, refused.reason) == (False, "there is no rank 9")
    assert one(ask(driver, "restart", rank="x"), AnswerCommand).reason.startswith("malformed")
    assert one(ask(driver, "restart", rank=1), AnswerCommand).ok
    (decided,) = driver.controller.facts(driver.now)
    assert isinstance(decided, FailureDecided)
    assert decided.culprit == "rank 1"


def test_a_journal_in_which_a_setting_was_changed_that_is_gone_is_read() -> None:
    """Its world goes on without the change; the next one is made as always."""
    driver = start()
    driver.do(KeysDeclared(generation=driver.controller.state.generation, keys=()))
    sent = one(ask(driver, "set", changes={"detect.hang_floor_s": 2.0}, id_="set"), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    assert driver.controller.state.the_spec().detect.hang_floor_s == 2.0
    later = Controller()
    for now, event in driver.log:
        gone = isinstance(event, CommandReceived) and event.id == "set"
        more = {"args": {"changes": {"detect.gone_s": 2.0}}} if gone else {}
        later.handle(now, msgspec.structs.replace(event, **more))
    assert later.state.the_spec() == driver.spec
    driver.controller = later
    sent = one(ask(driver, "set", changes={"detect.hang_floor_s": 3.0}), SendBoundary)
    agree(driver, sent)
    hold(driver, sent)
    assert later.state.the_spec().detect.hang_floor_s == 3.0
