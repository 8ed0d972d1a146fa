"""Replica groups in the controller: one fails and restarts, the others are left alone."""

from typing import Any

from perdure.control import Controller
from perdure.model.actions import (
    AnswerCommand,
    AnyAction,
    AssignNodes,
    EndJob,
    EvictReplica,
    FenceAbort,
    HoldReplicas,
    InjectFault,
)
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    ControllerStarted,
    ExitRecord,
    GenerationStopped,
    JobSubmitted,
    NodeRegistered,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
    StoreReady,
    TimerFired,
)
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.progress import RankAccount


class Lab:
    def __init__(self, spares: int = 0) -> None:
        self.machine, self.now, self.actions = Controller(), 100.0, list[AnyAction]()
        self.count = 3 + spares
        spec = JobSpec(script="x.py", nodes=3, spares=spares, torchft=TorchftConfig(replicas=3))
        self.add(JobSubmitted(spec=spec, at_s=100.0))
        for node in range(self.count):
            self.add(
                NodeRegistered(node=node, incarnation="a", host="127.0.0.1", boot_id="b", slots=1)
            )
        for group in range(self.count):
            self.start(group)
            self.see(group)
        self.form(0, 1, 2)

    def add(self, event: AnyEvent) -> list[AnyAction]:
        self.now += 0.01
        self.actions = self.machine.handle(self.now, event)
        return self.actions

    def generation(self, group: int) -> int:
        return self.machine.state.groups[group].generation

    def name(self, group: int) -> str:
        return f"t_{group}:{self.generation(group)}"

    def start(self, group: int) -> list[AnyAction]:
        number = self.generation(group)
        self.add(GenerationStopped(node=group, generation=number - 1, at_s=self.now))
        ready = self.add(
            StoreReady(generation=number, host="127.0.0.1", port=4000 + number, agent_store=True)
        )
        self.add(
            RanksStarted(node=group, generation=number, pids={group: 9}, at_s=self.now, warm=True)
        )
        return ready

    def see(self, group: int, **more: Any) -> list[AnyAction]:
        return self.add(ReplicaSeen(replica=self.name(group), group=group, at_s=self.now, **more))

    def form(self, *groups: int, step: int = 10) -> None:
        names = tuple(self.name(group) for group in groups)
        self.add(QuorumFormed(quorum_id=5, step=step, members=names, at_s=self.now))

    def exit(self, group: int, **how: Any) -> list[AnyAction]:
        record = ExitRecord(
            rank=group, generation=self.generation(group), pid=9, at_s=self.now, **how
        )
        return self.add(
            RankExited(node=group, record=record, account=RankAccount(), detected_s=self.now)
        )

    def find(self, kind: type) -> Any:
        return next((a for a in self.actions if isinstance(a, kind)), None)


def test_each_group_has_a_generation_and_a_store_of_its_own() -> None:
    lab = Lab()
    assert [lab.generation(g) for g in range(3)] == [0, 1, 2]
    groups = lab.machine.state.groups
    assert [g.phase for g in groups.values()] == ["running"] * 3
    assignments = [g.assignment for g in groups.values()]
    assert [a.replica for a in assignments if a] == [0, 1, 2]
    assert [a.master_port for a in assignments if a] == [4000, 4001, 4002]


def test_a_death_restarts_its_group_and_releases_the_others() -> None:
    lab = Lab()
    before = lab.name(1)
    lab.exit(1, signal=9)
    assert lab.find(EvictReplica).replica == before
    fence = lab.find(FenceAbort)
    assert (fence.quorum_id, fence.groups) == (5, (0, 2))
    assigned = [a for a in lab.actions if isinstance(a, AssignNodes)]
    assert [a.nodes for a in assigned] == [(1,)]
    assert assigned[0].assignment.phase == "store"
    assert lab.generation(1) == 3
    ready = lab.start(1)
    assert [type(a) for a in ready] == [HoldReplicas, AssignNodes]
    hold = ready[0]
    assert isinstance(hold, HoldReplicas)
    assert {g.group: g.store for g in hold.groups}[1] == "127.0.0.1:4003"


def test_a_spare_takes_the_place_and_the_lost_group_becomes_the_spare() -> None:
    lab = Lab(spares=1)
    assert [g.active for g in lab.machine.state.groups.values()] == [True, True, True, False]
    lab.exit(0, signal=9)
    hold = lab.find(HoldReplicas)
    assert {g.group: g.held for g in hold.groups} == {1: False, 2: False, 3: False}
    ready = lab.start(0)
    assert isinstance(ready[0], HoldReplicas)
    assert {g.group: g.spare for g in ready[0].groups} == {0: True, 1: False, 2: False, 3: False}


def test_one_left_out_while_it_lives_gets_time_and_a_stopped_one_little() -> None:
    lab = Lab()
    lab.see(2, gone=True, reason="late")
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    assert deadline - lab.now > 20.0
    lab.form(0, 1, 2)
    assert lab.machine.next_deadline() is None
    lab.see(2, gone=True, reason="stopped", stopped=True)
    deadline = lab.machine.next_deadline()
    assert deadline is not None
    assert deadline - lab.now < 1.0
    lab.now = deadline
    lab.add(TimerFired())
    assert lab.generation(2) == 3


def test_the_job_ends_when_all_that_trained_have_finished() -> None:
    lab = Lab(spares=1)
    assert lab.exit(0) == []
    lab.exit(1, code=1, error="a peer left")
    assert lab.machine.state.groups[1].phase == "failed"
    lab.exit(2)
    assert lab.machine.state.phase == "ending"
    for node in range(4):
        lab.add(GenerationStopped(node=node, generation=lab.machine.state.generation, at_s=1.0))
    end = lab.find(EndJob)
    assert (end.status, end.exit_code) == ("done", 0)


def test_a_group_that_fails_again_and_again_is_given_up_and_the_others_go_on() -> None:
    lab = Lab()
    for _ in range(4):
        lab.exit(1, code=1, error="RuntimeError: no")
        if lab.machine.state.groups[1].phase == "forming":
            lab.start(1)
    assert lab.machine.state.groups[1].phase == "failed"
    assert lab.machine.state.phase == "running"


def test_a_new_controller_says_everything_again() -> None:
    lab = Lab()
    lab.add(ControllerStarted(incarnation="c2"))
    assigned = [a for a in lab.actions if isinstance(a, AssignNodes)]
    assert [a.nodes for a in assigned] == [(0,), (1,), (2,)]
    assert all(a.assignment.phase == "run" for a in assigned)
    assert lab.find(HoldReplicas) is not None


def test_a_pause_holds_all_groups_and_other_verbs_are_refused() -> None:
    lab = Lab()
    lab.add(CommandReceived(id="p", kind="pause", who="me"))
    assert all(g.held for g in lab.find(HoldReplicas).groups)
    assert lab.find(AnswerCommand).ok
    lab.add(CommandReceived(id="r", kind="resume"))
    assert not any(g.held for g in lab.find(HoldReplicas).groups)
    lab.add(CommandReceived(id="d", kind="drain", args={"node": 1}))
    assert not lab.find(AnswerCommand).ok


def test_a_fault_goes_to_the_generation_of_its_own_group() -> None:
    lab = Lab()
    lab.add(CommandReceived(id="i", kind="inject", args={"rank": 1, "kind": "crash"}))
    assert lab.find(InjectFault).generation == 1
