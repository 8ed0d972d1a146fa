"""Nothing that was begun is forgotten: by a new controller, a new generation, or a lost answer."""

from tests.unit.control.driver import Driver, agree, one, started, verdict

from perdure.control.machine import Controller
from perdure.model.events import (
    BoundaryReached,
    CheckpointSaved,
    CommandReceived,
    ControllerStarted,
    GenerationStopped,
    JobPaused,
    JobResumed,
    RankExited,
    StacksTaken,
    TimerFired,
    VerdictWithdrawn,
)
from perdure.model.failures import ExitRecord
from perdure.model.orders import (
    AnswerCommand,
    AssignNodes,
    EndJob,
    RecordEvent,
    SendBoundary,
    TakeStacks,
)
from perdure.model.signals.progress import RankAccount


def replayed(driver: Driver) -> Controller:
    successor = Controller()
    for now, event in driver.log:
        successor.handle(now, event)
    assert repr(successor.state) == repr(driver.controller.state)
    return successor


def fire(driver: Driver) -> list:  # type: ignore[type-arg]
    deadline = driver.controller.next_deadline()
    assert deadline is not None
    driver.now = deadline
    return driver.do(TimerFired())


def test_controller_that_died_before_it_could_end_the_job_ends_it_now() -> None:
    driver = started()
    driver.exit(0)
    driver.exit(1)
    one(driver.do(GenerationStopped(node=0, generation=0, at_s=1.0)), EndJob)
    successor = replayed(driver)  # The journal lacks JobEnded.
    done = one(successor.handle(driver.now, ControllerStarted(incarnation="c2")), EndJob)
    assert (done.status, done.exit_code) == ("done", 0)


def test_nodes_that_never_register_end_the_job_by_name() -> None:
    driver = Driver(nodes=3)
    driver.register(1)
    done = one(fire(driver), EndJob)
    assert done.status == "failed"
    assert "[0, 2]" in done.reason


def test_checkpoint_that_was_lost_with_its_world_is_made_again_and_answered() -> None:
    driver = started()
    sent = one(driver.do(CommandReceived(id="x", kind="checkpoint")), SendBoundary)
    commit = agree(driver, sent)
    for rank in (0, 1):
        driver.do(BoundaryReached(id=commit.id, rank=rank, step=commit.step, at_s=1.0))
    driver.exit(1, signal=9)  # Before rank 0 had written it.
    driver.run()
    again = driver.controller.state.boundary
    assert again is not None, "the command is still open"
    one_of = driver.controller.state
    prepare = SendBoundary(
        id=f"{again.id}.{again.tries}", move="prepare", kind="checkpoint", step=again.step,
        ranks=one_of.world, generation=1, reason="r",
    )  # fmt: skip
    commit = agree(driver, prepare)
    for rank in (0, 1):
        driver.do(BoundaryReached(id=commit.id, rank=rank, step=commit.step, at_s=1.0))
    saved = CheckpointSaved(
        generation=1, step=commit.step, path="p", bytes=3, stall_s=0.1, save_s=0.2, at_s=1.0
    )
    assert one(driver.do(saved), AnswerCommand).ok


def test_automatic_checkpoints_go_on_after_one_that_never_came_about() -> None:
    driver = started()
    agree(driver, one(fire(driver), SendBoundary))
    fire(driver)  # Nobody reached the step for ten minutes.
    assert driver.controller.state.boundary is None
    assert one(fire(driver), SendBoundary).move == "prepare"


def test_nothing_is_killed_before_its_stack_was_taken() -> None:
    driver = started()
    stacks = one(driver.do(verdict(False)), TakeStacks)
    assert driver.do(verdict(True)) == []
    half = StacksTaken(generation=0, at_s=driver.now, stacks={stacks.ranks[0]: "in forward"})
    assert driver.do(half) == []
    rest = StacksTaken(generation=0, at_s=driver.now, stacks={stacks.ranks[1]: "in wait"})
    action = one(driver.do(rest), AssignNodes)
    assert action.assignment.generation == 1
    assert "ComputeHang" in action.reason


def test_a_stack_that_never_comes_holds_the_restart_up_for_two_seconds_only() -> None:
    driver = started()
    one(driver.do(verdict(True)), TakeStacks)
    begun = driver.now
    assert one(replayed(driver).handle(begun, ControllerStarted(incarnation="c2")), TakeStacks)
    action = one(fire(driver), AssignNodes)
    assert action.assignment.generation == 1
    assert driver.now == begun + 2.0


def test_a_suspect_that_moves_again_while_its_stack_is_taken_is_spared() -> None:
    driver = started()
    driver.do(verdict(True))
    driver.do(VerdictWithdrawn(verdict=verdict(True).verdict, at_s=driver.now, reason="it moved"))
    both = StacksTaken(generation=0, at_s=driver.now, stacks={0: "", 1: ""})
    assert driver.do(both) == []
    assert driver.controller.state.world.phase == "running"


def late_exit(driver: Driver, rank: int, at_s: float, **how: object) -> None:
    record = ExitRecord(rank=rank, generation=0, pid=1, at_s=at_s, **how)  # type: ignore[arg-type]
    driver.do(RankExited(node=0, record=record, account=RankAccount(step=10), detected_s=at_s))


def test_the_culprit_is_who_died_first_not_who_was_heard_of_first() -> None:
    driver = started()
    driver.now = 105.0
    driver.exit(0, code=1, error="RuntimeError: Connection closed by peer")
    late_exit(driver, 1, at_s=104.0, signal=9)
    (failure,) = driver.controller.state.failures.kept
    assert (failure.culprit, failure.signal) == ("rank 1", 9)
    late_exit(driver, 1, at_s=104.9, signal=11)  # Neither earlier, nor new.
    assert driver.controller.state.failures.kept == [failure]


def test_exit_code_is_that_of_who_died_first() -> None:
    driver = started(restart={"max_restarts": 0})
    driver.exit(0, step=0, code=1, error="RuntimeError: Connection closed by peer")
    late_exit(driver, 1, at_s=driver.now - 1.0, signal=9)
    done = one(driver.do(GenerationStopped(node=0, generation=0, at_s=1.0)), EndJob)
    assert (done.status, done.exit_code) == ("failed", 137)
    assert "rank 1" in done.reason


def test_a_pause_that_was_over_before_it_was_written_down_is_written_down_with_its_time() -> None:
    driver = started()
    agree(driver, one(driver.do(CommandReceived(id="x", kind="pause")), SendBoundary))
    paused_s = driver.now
    driver.now += 5.0
    driver.do(CommandReceived(id="y", kind="resume"))  # The journal has neither of the two.
    again = replayed(driver).handle(driver.now + 9.0, ControllerStarted(incarnation="c2"))
    records = [action.event for action in again if isinstance(action, RecordEvent)]
    assert [(type(e), e.at_s) for e in records if isinstance(e, JobPaused | JobResumed)] == [
        (JobPaused, paused_s), (JobResumed, paused_s + 5.0),
    ]  # fmt: skip
    for event in records:
        driver.do(event)
    again = driver.do(ControllerStarted(incarnation="c3"))
    assert not any(isinstance(action, RecordEvent) for action in again)
