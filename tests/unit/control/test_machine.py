"""The controller read as prose: events in, actions out, no clock and no process."""

import typing

import pytest
from tests.unit.control.driver import Driver, agree, one, started, verdict

from perdure.control.machine import HANDLERS, Controller
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    GenerationStopped,
    KeeperLost,
    NodeLost,
    OwnChecked,
    RankExited,
    RanksStarted,
    StacksTaken,
    StoreReady,
    TimerFired,
)
from perdure.model.failures import ExitRecord
from perdure.model.orders import (
    FETCH_S,
    AnswerCommand,
    AnyAction,
    AssignNodes,
    CheckOwn,
    EndJob,
    SendBoundary,
    TakeStacks,
)
from perdure.model.signals.progress import RankAccount

NOTHING_FOLLOWS = {
    "MetricsLogged", "ControllerLost", "NodeDraining", "LinksNoted", "RoomNoted", "ProbeJudged",
    "CollectivesInterrupted", "MachineReported", "ActionWithheld",
    "QuorumIdsReserved", "ReplicaWaiting", "ReplicaLate", "OperatorNoted", "SettingsChanged",
    "JobPaused", "JobResumed", "RanksAgreed", "JournalMended", "RankLeft", "SlotLeftEmpty",
    "ResumeCompared", "TornFound",
}  # fmt: skip
"""Events that are told to others: the detector, the folds, whoever reads."""
FIRST = {"JobSubmitted", "FailureDecided"}


def test_every_event_is_reacted_to_or_declared_to_be_for_others() -> None:
    known = {type_.__name__ for type_ in typing.get_args(AnyEvent)}
    handled = {kind: {each.__name__ for each in table} for kind, table in HANDLERS.items()}
    assert handled["one world"] | handled["replica groups"] | NOTHING_FOLLOWS | FIRST == known
    assert not (handled["one world"] | handled["replica groups"]) & (NOTHING_FOLLOWS | FIRST)
    alone = {"QuorumFormed", "ReplicaSeen", "RankAttached"}
    assert handled["replica groups"] - handled["one world"] == alone


def test_world_forms_once_all_nodes_are_there() -> None:
    driver = Driver(nodes=2)
    assert driver.register(0) == []
    action = one(driver.register(1), AssignNodes)
    assert action.nodes == (0, 1)
    assert (action.assignment.phase, action.assignment.generation) == ("store", 0)


def test_own_checkpoints_are_checked_when_nothing_older_lives_anywhere() -> None:
    driver = Driver(nodes=2, checkpoint={"own": ["out/checkpoint-*"]})
    for node in (0, 1):
        driver.register(node)
    for generation in (0, 1):
        if generation:
            one(driver.exit(1, signal=9), AssignNodes)
        store = StoreReady(generation=generation, host="h", port=8, agent_store=True)
        stopped = [
            GenerationStopped(node=node, generation=generation - 1, at_s=1.0) for node in (0, 1)
        ]
        assert driver.do(stopped[0]) == []
        asked = one([*driver.do(stopped[1]), *driver.do(store)], CheckOwn)
        assert (asked.generation, asked.nodes) == (generation, (0, 1))
        again = driver.do(ControllerStarted(incarnation=f"c{generation + 2}"))
        assert one(again, CheckOwn).nodes == (0, 1)
        assert driver.do(OwnChecked(node=0, generation=generation, at_s=1.0)) == []
        checked = driver.do(OwnChecked(node=1, generation=generation, at_s=1.0))
        assert one(checked, AssignNodes).assignment.phase == "run"
        assert driver.do(OwnChecked(node=1, generation=generation, at_s=1.0)) == []
        for node in (0, 1):
            pids = {2 * node: 1, 2 * node + 1: 2}
            driver.do(
                RanksStarted(node=node, generation=generation, pids=pids, at_s=1.0, warm=True)
            )


@pytest.mark.parametrize("observe", [False, True])
def test_own_checkpoints_of_a_job_that_is_only_observed_are_left_alone(observe: bool) -> None:
    driver = Driver(nodes=1, observe=observe, checkpoint={"own": ["out/checkpoint-*"]})
    driver.register(0)
    store = StoreReady(generation=0, host="h", port=8, agent_store=True)
    said = [
        *driver.do(GenerationStopped(node=0, generation=-1, at_s=1.0)), *driver.do(store),
    ]  # fmt: skip
    assert any(isinstance(action, CheckOwn) for action in said) == (not observe)


def test_nothing_is_moved_while_a_lost_node_may_write() -> None:
    driver = Driver(nodes=1, spares=2, checkpoint={"own": ["out/checkpoint-*"]})
    for node in (0, 1):
        driver.register(node)
    driver.run()
    driver.do(NodeLost(node=0, at_s=1.0, reason="silent"))
    assert driver.controller.state.world.phase == "forming"
    store = StoreReady(generation=1, host="h", port=8, agent_store=True)
    said = [*driver.do(store), *driver.do(GenerationStopped(node=1, generation=0, at_s=1.0))]
    assert not [action for action in said if isinstance(action, CheckOwn)]
    assert one(said, AssignNodes).assignment.phase == "run"


def test_a_node_that_stands_in_for_a_lost_one_fetches_and_moves_nothing() -> None:
    driver = Driver(nodes=1, spares=2, checkpoint={"own": ["out/checkpoint-*"], "url": "/away"})
    for node in (0, 1):
        driver.register(node)
    driver.run()
    driver.do(NodeLost(node=0, at_s=1.0, reason="silent"))
    store = StoreReady(generation=1, host="h", port=8, agent_store=True)
    said = [*driver.do(store), *driver.do(GenerationStopped(node=1, generation=0, at_s=1.0))]
    asked = one(said, CheckOwn)
    assert (asked.nodes, asked.move) == ((1,), False)
    assert not [action for action in said if isinstance(action, AssignNodes)]
    checked = driver.do(OwnChecked(node=1, generation=1, at_s=2.0))
    assert one(checked, AssignNodes).assignment.phase == "run"


@pytest.mark.parametrize("url", ["", "/away"])
def test_a_spare_node_that_comes_during_a_check_is_not_waited_for(url: str) -> None:
    driver = Driver(nodes=1, spares=2, checkpoint={"own": ["out/checkpoint-*"], "url": url})
    said = [*driver.register(0), *driver.register(1)]
    said += driver.do(StoreReady(generation=0, host="h", port=8, agent_store=True))
    for node in (0, 1):
        said += driver.do(GenerationStopped(node=node, generation=-1, at_s=1.0))
    asked = one(said, CheckOwn)
    assert asked.nodes == (0, 1)
    driver.register(2)
    driver.do(GenerationStopped(node=2, generation=-1, at_s=2.0))
    said = []
    for node in asked.nodes:
        said += driver.do(OwnChecked(node=node, generation=0, at_s=2.0))
    assert one(said, AssignNodes).assignment.phase == "run"


@pytest.mark.parametrize("keys", [{}, {"own_copy": True}, {"url": "/away"}])
def test_a_start_waits_for_a_copy_that_is_put_in_place(keys: dict[str, object]) -> None:
    driver = Driver(nodes=1, checkpoint={"own": ["out/ckpt.pt"], **keys})
    driver.register(0)
    driver.run()
    driver.exit(0, signal=9)
    driver.do(StoreReady(generation=1, host="h", port=8, agent_store=True))
    world = driver.controller.state.world
    before_s = world.deadline_s
    one(driver.do(GenerationStopped(node=0, generation=0, at_s=1.0)), CheckOwn)
    assert world.deadline_s is not None
    assert before_s is not None
    assert world.deadline_s == before_s + (FETCH_S if keys else 0.0)


def test_the_second_failure_to_load_a_torn_checkpoint_ends_the_job() -> None:
    driver = started()
    torn = {"code": 1, "error": "EOFError: x", "torn": "/w/a.pt", "torn_why": "a.pt (cut); mv a b"}
    one(driver.exit(0, **torn), AssignNodes)
    driver.run()
    driver.exit(0, **(torn | {"torn": "/w/b.pt"}))
    assert not driver.controller.state.over, "it is another file"
    driver.run()
    driver.exit(0, **(torn | {"torn": "/w/b.pt"}))
    assert driver.controller.state.ending is not None
    assert "a.pt (cut); mv a b" in driver.controller.state.ending.reason


def test_ranks_start_only_when_nothing_older_lives_anywhere() -> None:
    driver = started(nodes=2)
    one(driver.exit(1, signal=9), AssignNodes)
    store = StoreReady(generation=1, host="h", port=8, agent_store=True)
    assert driver.do(store) == []
    assert driver.do(GenerationStopped(node=0, generation=0, at_s=1.0)) == []
    run = one(driver.do(GenerationStopped(node=1, generation=0, at_s=1.0)), AssignNodes)
    assert (run.assignment.phase, run.assignment.master_port) == ("run", 8)


def test_killed_rank_restarts_the_world_with_the_reason() -> None:
    driver = started()
    action = one(driver.exit(1, signal=9), AssignNodes)
    assert (action.assignment.generation, action.assignment.restart_count) == (1, 1)
    assert "rank 1" in action.reason
    assert "SIGKILL" in action.reason


@pytest.mark.parametrize(("nproc", "phase"), [(2, "store"), (1, "end")])
def test_a_rank_that_interrupts_itself_has_failed(nproc: int, phase: str) -> None:
    """No Ctrl-C reaches a rank; all of them at once may be what a library wants."""
    action = one(started(nproc=nproc).exit(nproc - 1, signal=2), AssignNodes)
    assert action.assignment.phase == phase


def test_repeated_and_stale_events_change_nothing() -> None:
    driver = started()
    driver.exit(1, signal=9)
    before = driver.controller.state.generation
    stale = ExitRecord(rank=0, generation=0, pid=1, at_s=0.0, signal=9)
    event = RankExited(node=0, record=stale, account=RankAccount(), detected_s=0.0)
    assert driver.do(event) == []
    assert driver.do(event) == []
    assert driver.controller.state.generation == before


def test_job_is_done_when_every_rank_ended_well() -> None:
    driver = started()
    assert driver.exit(0) == []
    end = one(driver.exit(1), AssignNodes)
    assert end.assignment.phase == "end"
    done = one(driver.do(GenerationStopped(node=0, generation=0, at_s=1.0)), EndJob)
    assert (done.status, done.exit_code) == ("done", 0)


def test_exit_code_of_the_job_is_the_ranks_own() -> None:
    driver = started()
    for _ in range(3):
        actions = driver.exit(0, step=5, code=17, error="ValueError: x")
        if any(isinstance(a, AssignNodes) and a.assignment.phase == "end" for a in actions):
            break
        driver.run()
    generation = driver.controller.state.generation
    event = GenerationStopped(node=0, generation=generation, at_s=1.0)
    done = one(driver.do(event), EndJob)
    assert (done.status, done.exit_code) == ("failed", 17)
    assert "3 times at step 5" in done.reason


def test_hang_is_looked_at_first_and_acted_upon_when_its_time_has_come() -> None:
    driver = started()
    stacks = one(driver.do(verdict(False)), TakeStacks)
    assert stacks.ranks == (1, 0)
    driver.do(StacksTaken(generation=0, at_s=driver.now, stacks={0: "wait", 1: "step"}))
    action = one(driver.do(verdict(True)), AssignNodes)
    assert action.assignment.generation == 1


def test_checkpoint_is_answered_when_it_is_verified() -> None:
    driver = started()
    sent = one(driver.do(CommandReceived(id="x", kind="checkpoint")), SendBoundary)
    assert sent.move == "prepare"
    commit = agree(driver, sent)
    for rank in (0, 1):
        actions = driver.do(BoundaryReached(id=commit.id, rank=rank, step=commit.step, at_s=1.0))
        assert actions == []
    saved = CheckpointSaved(
        generation=0, step=commit.step, path="p", bytes=3, stall_s=0.1, save_s=0.2, at_s=1.0
    )
    answer = one(driver.do(saved), AnswerCommand)
    assert (answer.ok, answer.result["step"]) == (True, commit.step)


def test_veto_aborts_and_tries_a_later_step() -> None:
    driver = started()
    sent = one(driver.do(CommandReceived(id="x", kind="checkpoint")), SendBoundary)
    abort, again = driver.do(BoundaryAnswered(id=sent.id, rank=0, ok=False, step=50))
    assert isinstance(abort, SendBoundary)
    assert isinstance(again, SendBoundary)
    assert (abort.move, abort.id) == ("abort", sent.id)
    assert again.move == "prepare"
    assert again.id != sent.id
    assert again.step > 50


def test_silence_aborts_at_the_deadline() -> None:
    driver = started()
    sent = one(driver.do(CommandReceived(id="x", kind="checkpoint")), SendBoundary)
    deadline = driver.controller.next_deadline()
    assert deadline is not None
    driver.now = deadline
    moves = [a.move for a in driver.do(TimerFired()) if isinstance(a, SendBoundary)]
    assert moves == ["abort", "prepare"]
    late = BoundaryAnswered(id=sent.id, rank=0, ok=True, step=0)
    assert driver.do(late) == []


def test_stop_is_agreed_and_the_job_counts_as_stopped() -> None:
    driver = started()
    sent = one(driver.do(CommandReceived(id="s", kind="stop", who="me")), SendBoundary)
    commit = agree(driver, sent)
    for rank in (0, 1):
        driver.do(BoundaryReached(id=commit.id, rank=rank, step=commit.step, at_s=1.0))
    driver.exit(0)
    actions = driver.exit(1)
    assert one(actions, AnswerCommand).ok
    done = one(driver.do(GenerationStopped(node=0, generation=0, at_s=1.0)), EndJob)
    assert done.status == "stopped"


def test_keeper_death_restarts_the_world() -> None:
    driver = started()
    action = one(driver.do(KeeperLost(node=0, generation=0, at_s=1.0)), AssignNodes)
    assert action.assignment.generation == 1


def test_new_controller_issues_again_what_is_open() -> None:
    driver = started()
    driver.do(CommandReceived(id="x", kind="checkpoint"))
    successor = Controller()
    for now, event in driver.log:
        successor.handle(now, event)
    actions = successor.handle(driver.now, ControllerStarted(incarnation="c2"))
    assert one(actions, AssignNodes).assignment == driver.controller.state.assignment
    assert one(actions, SendBoundary).move == "prepare"


def test_agent_that_comes_back_gets_the_newest_assignment() -> None:
    driver = started()
    again = one(driver.register(0, generation=0, running=(0, 1)), AssignNodes)
    assert again.assignment == driver.controller.state.assignment
    assert driver.controller.state.world.phase == "running"


def test_agent_that_comes_back_empty_means_lost_ranks() -> None:
    driver = started()
    action = one(driver.register(0, generation=-1), AssignNodes)
    assert action.assignment.generation == 1


def test_a_stop_that_nobody_agrees_to_is_carried_out_with_signals() -> None:
    driver = started()
    driver.do(CommandReceived(id="s", kind="stop", who="me"))
    ends: list[AnyAction] = []
    while not ends and driver.now < 200.0:
        deadline = driver.controller.next_deadline()
        assert deadline is not None
        driver.now = deadline
        ends = [
            action
            for action in driver.do(TimerFired())
            if isinstance(action, AssignNodes) and action.assignment.phase == "end"
        ]
    (end,) = ends
    assert driver.now == 130.0
    assert end.assignment.grace_s == driver.spec.restart.grace_s  # type: ignore[attr-defined]


def test_what_was_due_is_waited_for_no_longer_once_the_job_is_over() -> None:
    """A probe's round comes to its end in a job that has none: nothing is journaled behind that."""
    driver = started()
    driver.do(CommandReceived(id="p", kind="probe", who="me"))
    due = driver.controller.next_deadline()
    driver.do(CommandReceived(id="k", kind="kill", who="me"))
    end = driver.controller.next_deadline()
    assert due is not None
    assert end is not None
    assert end > due
    driver.now = end
    one(driver.do(TimerFired()), EndJob)
    assert driver.controller.next_deadline() is None
    assert driver.do(TimerFired()) == []
