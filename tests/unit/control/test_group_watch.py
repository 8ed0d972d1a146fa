"""Who stands still where the lighthouse is torchft's own: found from heartbeats, and told."""

from typing import Any

import pytest
from tests.unit.control.groups_lab import Lab

from perdure.control.lighthouse.watch import ReplicaWatch
from perdure.control.membership.quorum import make_quorum_config
from perdure.model.events import (
    ActionWithheld,
    AnyEvent,
    RanksStarted,
    ReplicaLate,
    ReplicaSeen,
    ReplicaWaiting,
    TimerFired,
)
from perdure.model.job import DetectConfig, JobSpec, TorchftConfig
from perdure.model.orders import AnyAction, AssignNodes, EvictReplica, FenceAbort, RecordEvent
from perdure.model.signals.progress import (
    BusyPhase,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)

GROUPS = 3


class World:
    """Three groups of a rank each, which step together; what is found goes to the controller."""

    def __init__(self, *, observe: bool = True, **torchft: Any) -> None:
        config = TorchftConfig(replicas=GROUPS, lighthouse="stock", **torchft)
        spec = JobSpec(script="x.py", nodes=GROUPS, torchft=config, observe=observe)
        self.lab = Lab(observe=observe, lighthouse="stock", **torchft)
        self.watch, self.now, self.step = ReplicaWatch(1, make_quorum_config(spec)), 1000.0, 10
        self.states, self.still = ["S"] * GROUPS, set[int]()
        self.busy: BusyPhase | None = None
        self.found: list[AnyEvent] = []
        self.journal: list[tuple[float, AnyEvent]] = []
        self.actions: list[AnyAction] = []
        self.steps = [10] * GROUPS
        self.train(2.0)
        assert not self.found

    def take(self, event: AnyEvent) -> None:
        self.lab.now = self.now
        self.journal.append((self.now, event))
        self.actions += self.lab.machine.handle(self.now, event)
        self.watch.note(self.now, event)

    def take_over(self) -> None:
        """Another controller comes: it has heard the journal, and no heartbeat yet."""
        self.watch = ReplicaWatch(1, make_quorum_config(self.lab.machine.state.the_spec()))
        for at_s, event in self.journal:
            self.watch.note(at_s, event)

    def beat(self) -> None:
        """Let a fifth of a second pass, and every agent say what it sees."""
        self.now += 0.2
        for group in range(GROUPS):
            account = RankAccount(start_step=0, step=self.steps[group])
            rank = RankProgress(
                rank=group, pid=9, phase="step", phase_since_s=1.0, heartbeat_s=self.now,
                account=account, proc=ProcSample(state=self.states[group]),
                busy_phase=self.busy if group in self.still else None,
            )  # fmt: skip
            number = self.lab.generation(group)
            beat = NodeBeat(group, "a", 1, self.now, generation=number, ranks=(rank,))
            for event in self.watch.take_beat(self.now, beat):
                self.found.append(event)
                self.take(event)
        due_s = self.lab.machine.next_deadline()
        if due_s is not None and due_s <= self.now:
            self.take(TimerFired())

    def train(self, seconds: float) -> None:
        """All train but those that stand still, whom nobody waits for any more."""
        until_s = self.now + seconds
        while self.now < until_s:
            self.steps = [s + (g not in self.still) for g, s in enumerate(self.steps)]
            self.beat()

    def wait(self, seconds: float, *, over: bool = False) -> None:
        """The others wait for those that stand still."""
        until_s, since_s, told = self.now + seconds, self.now, False
        while self.now < until_s:
            self.beat()
            if not told and self.now - since_s > 0.5:
                told = True
                self.tell(since_s)
        if over:
            self.tell(since_s, over=True)

    def tell(self, since_s: float, *, over: bool = False) -> None:
        for group in set(range(GROUPS)) - self.still:
            self.take(
                ReplicaWaiting(
                    generation=self.lab.generation(group), rank=group, quorum_id=1,
                    step=self.steps[group], since_s=since_s, timeout_s=60.0, over=over,
                )
            )  # fmt: skip

    def would(self) -> list[str]:
        """Return what was not done, and take note of it."""
        events = [a.event for a in self.actions if isinstance(a, RecordEvent)]
        assert not [a for a in self.actions if isinstance(a, EvictReplica | FenceAbort)]
        assert not [a for a in self.actions if isinstance(a, AssignNodes)]
        self.actions.clear()
        return [e.would for e in events if isinstance(e, ActionWithheld)]

    def told(self) -> list[str]:
        found, self.found = self.found, []
        return [
            f"{type(e).__name__} {e.group}{' gone' * bool(getattr(e, 'gone', False))}"
            f"{' over' * bool(getattr(e, 'over', False))}"
            for e in found
            if isinstance(e, ReplicaSeen | ReplicaLate)
        ]


def test_a_stopped_group_is_told_of_and_left_alone_each_time() -> None:
    world = World()
    for _ in range(2):
        world.states[2], world.still = "T", {2}
        world.wait(3.0)
        assert world.told() == ["ReplicaSeen 2 gone"]
        assert world.would() == ["left the group out of the quorum", "restarted the group"]
        assert world.lab.machine.state.worlds[2].phase == "running"
        world.states[2] = "S"
        world.still = set()
        world.train(1.0)
        assert world.told() == ["ReplicaSeen 2"]
        assert world.lab.machine.state.worlds[2].replica.absent == ""


def test_a_stop_that_is_over_at_once_is_nothing() -> None:
    world = World()
    world.states[2] = "T"
    world.train(0.3)
    world.states[2] = "S"
    world.train(3.0)
    assert (world.told(), world.would()) == ([], [])


def test_a_group_that_hangs_is_late_at_once_and_left_behind_once_torchft_has_done_so() -> None:
    world = World()
    world.still = {1}
    world.wait(5.0)
    assert world.told() == ["ReplicaLate 1"]
    assert world.would() == [], "nothing would have been done so far"
    world.train(2.0)  # torchft's own lighthouse goes on without it.
    assert world.told() == ["ReplicaSeen 1 gone"]
    assert world.would() == ["left the group out of the quorum"]
    world.train(1900.0)
    assert world.would() == ["restarted the group"]
    world.still = set()
    world.train(1.0)
    assert world.told() == ["ReplicaLate 1 over", "ReplicaSeen 1"]


def test_a_pause_is_learned_and_a_declared_one_is_none() -> None:
    world = World()
    world.still = {1}
    world.wait(4.0, over=True)
    world.still = set()
    world.train(1.0)
    assert world.told() == ["ReplicaLate 1", "ReplicaLate 1 over"]
    world.still = {1}
    world.wait(5.0, over=True)  # 1.5 times as long as before is nothing new.
    world.still = set()
    world.train(1.0)
    assert (world.told(), world.would()) == ([], [])
    world.still, world.busy = {1}, BusyPhase("evaluate", world.now, world.now + 600)
    world.wait(100.0)
    assert (world.told(), world.would()) == ([], [])


def test_who_is_waited_for_in_vain_for_as_long_as_the_job_file_says_is_left_behind() -> None:
    world = World(hung_s=2.0)
    world.still = {1}
    world.wait(5.0)
    assert world.told() == ["ReplicaLate 1", "ReplicaSeen 1 gone"]
    assert world.would() == ["left the group out of the quorum"]


def test_the_first_steps_of_a_group_may_take_a_minute() -> None:
    world = World()
    world.watch = ReplicaWatch(1, make_quorum_config(world.lab.machine.state.the_spec()))
    world.still = {1}
    began_s = world.now
    world.wait(65.0)
    (gone,) = world.found
    assert isinstance(gone, ReplicaSeen)
    assert gone.at_s - began_s > 59.0


def test_a_controller_that_takes_over_tells_nothing_twice() -> None:
    world = World()
    world.states[2], world.still = "T", {2}
    world.wait(3.0)
    world.told()
    world.take_over()
    world.would()
    world.wait(3.0)
    assert (world.told(), world.would()) == ([], [])
    assert world.lab.machine.next_deadline() is None


def test_a_stopped_group_is_started_again_where_the_job_is_not_only_observed() -> None:
    world = World(observe=False)
    world.states[2], world.still = "T", {2}
    world.wait(3.0)
    orders = [a for a in world.actions if isinstance(a, AssignNodes)]
    assert [(o.nodes, o.assignment.phase) for o in orders] == [((2,), "store")]


@pytest.mark.parametrize("observe", [True, False])
def test_t9_who_comes_back_after_a_takeover_is_not_restarted(observe: bool) -> None:
    """T9: it saves for long, is left out, and trains again under the next controller."""
    world = World(observe=observe, hung_s=2.0)
    world.still = {1}
    world.wait(5.0)
    assert world.told() == ["ReplicaLate 1", "ReplicaSeen 1 gone"]
    world.actions.clear()
    world.take_over()
    world.train(3.0)
    world.still = set()
    world.train(1.0)
    assert world.told() == ["ReplicaLate 1 over", "ReplicaSeen 1"]
    assert world.lab.machine.next_deadline() is None
    assert world.actions == []


def test_t9_what_was_told_of_an_earlier_life_is_not_held_against_the_next() -> None:
    world = World()
    world.states[2], world.still = "T", {2}
    world.wait(3.0)
    world.told()
    world.take_over()
    number = world.lab.generation(2)
    world.watch.note(
        world.now, RanksStarted(node=2, generation=number, pids={2: 9}, at_s=world.now, warm=True)
    )
    world.states[2], world.still = "S", set()
    world.train(3.0)
    assert world.told() == []


def test_who_has_just_come_back_is_not_said_to_be_left_behind() -> None:
    """Its own heartbeat of the step that all have taken comes last."""
    world = World()
    world.still = {2}
    world.wait(5.0)
    assert world.told() == ["ReplicaLate 2"]
    world.still = set()
    world.steps = [s + 9 for s in world.steps]  # Many steps go by between two heartbeats.
    world.beat()
    world.train(1.0)
    assert world.told() == ["ReplicaLate 2 over"]
    assert world.would() == []


def test_a_wait_of_long_ago_accuses_nobody_after_a_takeover() -> None:
    """One that ended in an error was never told to be over."""
    world = World()
    world.still = {2}
    world.tell(world.now)  # Those of 0 and 1.
    world.still = {1, 2}
    world.tell(world.now, over=True)  # That of 0.
    world.now += 600.0
    world.steps = [s + 100 for s in world.steps]
    world.take_over()
    for _ in range(5 * 70):  # All of them validate, longer than the first steps may take.
        world.beat()
    assert (world.told(), world.would()) == ([], [])


def test_a_hang_is_found_across_a_takeover() -> None:
    world = World()
    world.still = {1}
    world.wait(5.0)
    assert world.told() == ["ReplicaLate 1"]
    world.take_over()
    for _ in range(5 * 62):
        world.beat()
    assert world.told() == ["ReplicaSeen 1 gone"]


def test_what_is_set_live_holds_for_the_first_steps_of_a_group() -> None:
    world = World()
    world.take_over()
    world.watch.reconfigure(DetectConfig(phase_allowance_s=90.0))
    world.still = {1}
    world.wait(85.0)
    assert world.told() == []
    for _ in range(5 * 8):
        world.beat()
    assert world.told() == ["ReplicaSeen 1 gone"]
