"""T6: from a slow rank's heartbeats to its node's replacement, or to the reason why not."""

from typing import Any

from msgspec.structs import replace
from tests.unit.control.driver import one
from tests.unit.control.test_placement import run, start
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Noise, Run

from perdure.model.events import (
    ActionWithheld,
    CheckpointSaved,
    GenerationStepping,
    GenerationStopped,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    ProgressNoted,
    RanksStarted,
    StoreReady,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.orders import AnyAction, AssignNodes, RecordEvent


class Watched:
    """A simulated training of two nodes, the real detector over it, and the real controller."""

    def __init__(self, *faults: Fault, spares: int = 2, **spec: Any) -> None:
        """Begin; the faults are those of rank 2, on node 1."""
        self.driver = start(spares=spares, **spec)
        self.driver.controller.state.world.stepping_s = BEGIN_S
        self.watch = Run(Layout(4, nproc=2), faults[0], noise=Noise(jitter=0.05))
        self.actions: list[tuple[float, AnyAction]] = []

    def run(self, seconds: float) -> "Watched":
        """Hand what the detector says to the controller, and what that records to both."""
        for now, beat in self.watch.training.run(seconds):
            for event in self.watch.detector.take_beat(now, beat):
                self.watch.detector.note(now, event)
                if isinstance(event, VerdictReached | VerdictWithdrawn):
                    self.tell(event, now)
        return self

    def tell(self, event: Any, now: float | None = None) -> list[AnyAction]:
        """Hand one event to the controller."""
        self.driver.now = self.watch.training.now if now is None else now
        actions = self.driver.do(event)
        self.actions += [(self.driver.now, action) for action in actions]
        return actions

    @property
    def reasons(self) -> list[str]:
        """Return why nothing was done, each time that was journaled."""
        events = [a.event for _, a in self.actions if isinstance(a, RecordEvent)]
        return [e.reason for e in events if isinstance(e, ActionWithheld)]

    @property
    def orders(self) -> list[AssignNodes]:
        """Return the worlds that were ordered."""
        return [a for _, a in self.actions if isinstance(a, AssignNodes)]


def slow(factor: float, begin_s: float = FAULT_S, **options: Any) -> Watched:
    watched = Watched(Fault("slow-host", begin_s, 2, 0, factor), **options)
    return watched.run(begin_s - BEGIN_S + 55)


def progress(watched: Watched) -> ProgressNoted:
    return ProgressNoted(generation=0, at_s=watched.watch.training.now, step=9, accounts={})


def test_a_node_twice_as_slow_gives_its_place_to_the_spare_within_a_minute() -> None:
    watched = slow(2.0)
    (order,) = watched.orders
    assert order.assignment.placement == (0, 2)
    assert "node 2 stands in for node 1" in order.reason
    assert "of every step" in order.reason
    at_s = next(at_s for at_s, a in watched.actions if isinstance(a, AssignNodes))
    assert at_s - FAULT_S < 50.0


def test_what_is_too_little_is_journaled_once_with_its_reason() -> None:
    watched = slow(1.3)
    for _ in range(50):
        watched.tell(progress(watched))
    assert watched.orders == []
    (reason,) = watched.reasons
    assert "x of the step is below policy.evict_factor = 1.5" in reason


def without_spare(fault: Fault) -> Watched:
    """Return a job whose spare node is away, before the fault."""
    watched = Watched(fault)
    watched.tell(NodeLost(node=2, at_s=BEGIN_S, reason="silent"))
    return watched


LATE = NodeRegistered(node=2, incarnation="a2", host="h", boot_id="b", slots=2)


def test_a_spare_that_comes_later_stands_in_then() -> None:
    watched = without_spare(Fault("slow-host", FAULT_S, 2, 0, 2.0))
    watched.run(FAULT_S - BEGIN_S + 55)
    assert watched.orders == []
    (reason,) = watched.reasons
    assert "there is no spare node" in reason
    _, order = [a for a in watched.tell(LATE) if isinstance(a, AssignNodes)]
    assert order.assignment.placement == (0, 2)


def test_a_cordoned_spare_that_is_restored_stands_in_then() -> None:
    watched = Watched(Fault("slow-host", FAULT_S, 2, 0, 2.0))
    watched.driver.controller.state.cordoned[2] = "said so"
    watched.run(FAULT_S - BEGIN_S + 55)
    assert watched.orders == []
    restored = NodeRestored(node=2, at_s=watched.watch.training.now, reason="mended")
    assert one(watched.tell(restored), AssignNodes).assignment.placement == (0, 2)


def test_a_restart_that_would_cost_too_much_waits_for_a_checkpoint() -> None:
    watched = Watched(Fault("slow-host", FAULT_S, 2, 0, 2.0))
    state = watched.driver.controller.state
    state.world.stepping_s = state.saved_s = FAULT_S - 3600.0
    watched.run(FAULT_S - BEGIN_S + 55)
    assert watched.orders == []
    assert "later than policy.payback_s = 600" in watched.reasons[0]
    saved = CheckpointSaved(
        generation=0, step=9, path="p", bytes=1, stall_s=0.1, save_s=0.2,
        at_s=watched.watch.training.now,
    )  # fmt: skip
    assert one(watched.tell(saved), AssignNodes).assignment.placement == (0, 2)


def test_hours_of_work_without_a_checkpoint_are_not_given_for_a_slow_node() -> None:
    """T6: a restart of a plain script loses all that it has done, as far as anybody knows."""
    watched = Watched(Fault("slow-host", FAULT_S, 2, 0, 2.0))
    state = watched.driver.controller.state
    state.world.stepping_s = FAULT_S - 7200.0
    watched.run(FAULT_S - BEGIN_S + 55)
    assert watched.orders == []
    assert " s of work that is in no checkpoint" in watched.reasons[0]
    assert "later than policy.payback_s = 600" in watched.reasons[0]


def test_a_nodes_clock_makes_no_hours_of_work() -> None:
    """T6: when training began is told by the controller's own clock."""
    watched = Watched(Fault("slow-host", FAULT_S, 2, 0, 2.0))
    watched.tell(GenerationStepping(generation=0, at_s=BEGIN_S - 7200.0, step=5), BEGIN_S)
    watched.run(FAULT_S - BEGIN_S + 55)
    assert watched.orders[0].assignment.placement == (0, 2)


def test_work_counts_from_the_ranks_start_where_the_script_declares_no_steps() -> None:
    """T6: without steps nobody says when training began, and a restart still loses all of it."""
    driver = start()
    state, driver.now = driver.controller.state, 7300.0
    driver.exit(0, code=1)
    assert state.world.stepping_s is None
    for node in range(driver.spec.num_nodes):
        driver.do(GenerationStopped(node=node, generation=0, at_s=driver.now))
    driver.do(StoreReady(generation=1, host="h", port=7, agent_store=True))
    for node in state.world.placement:
        driver.do(RanksStarted(node=node, generation=1, pids={}, at_s=driver.now, warm=True))
    assert (state.world.phase, state.world.stepping_s) == ("running", 7300.0)


def test_what_grows_is_weighed_again() -> None:
    watched = slow(1.35)
    assert watched.orders == []
    watched.watch.training.fault = Fault("slow-host", FAULT_S, 2, 0, 2.5)
    watched.run(90)
    assert one([a for _, a in watched.actions], AssignNodes).assignment.placement == (0, 2)


def test_what_has_ended_is_not_acted_upon() -> None:
    watched = without_spare(Fault("slow-host", FAULT_S, 2, 0, 2.0, FAULT_S + 50))
    watched.run(FAULT_S - BEGIN_S + 70)
    assert watched.reasons != []
    watched.tell(LATE)
    assert watched.driver.controller.state.generation == 0


def test_ranks_that_are_as_slow_on_another_node_stay_there() -> None:
    """A replacement that won nothing is not repeated: it is their work that takes so long."""
    watched = slow(2.0)
    assert len(watched.orders) == 1
    run(watched.driver)
    again = Run(Layout(4, nproc=2), Fault("slow-host", BEGIN_S, 2, 0, 2.0))
    again.run(55)
    verdict = again.standing
    assert verdict is not None
    shift = watched.driver.now - BEGIN_S
    moved = {"generation": 1, "first_seen_s": verdict.first_seen_s + shift}
    actions = watched.driver.do(VerdictReached(verdict=replace(verdict, **moved)))
    assert [type(a) for a in actions] == [RecordEvent]
    assert "it is their work" in actions[0].reason
