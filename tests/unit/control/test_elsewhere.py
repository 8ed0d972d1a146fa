"""Replica groups that others start: what the lighthouse tells of them, and what is ordered."""

import sys
from typing import Any

import pytest
from tests.lighthouse import make_member

from perdure.control.lighthouse.names import Names
from perdure.control.lighthouse.outputs import Answered, LeftOut, Output, Refused, Seen
from perdure.control.lighthouse.patience import QuorumConfig
from perdure.control.lighthouse.quorum import Quorums
from perdure.control.machine import Controller
from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.control.recovery.elsewhere import HELD_MAX
from perdure.control.senders import find_untrue
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CommandReceived,
    JobSubmitted,
    JournalEntry,
    KeysDeclared,
    NodeRegistered,
    QuorumFormed,
    RankAttached,
    RankLeft,
    ReplicaSeen,
)
from perdure.model.job import HeldGroup, JobSpec, TorchftConfig
from perdure.model.orders import (
    LIGHTHOUSE,
    AnswerCommand,
    AnyAction,
    EndJob,
    EvictReplica,
    HoldReplicas,
    ReplicaGroup,
    SendBoundary,
)
from perdure.model.steering import KeySpec
from perdure.telemetry.accounting.ledger import make_report
from perdure.telemetry.live.replicas import ReplicaFold

SPEC = JobSpec(script="", torchft=TorchftConfig(replicas=1, elsewhere=True))


class Lab:
    def __init__(self, spec: JobSpec = SPEC) -> None:
        self.machine, self.now = Controller(), 100.0
        self.log: list[JournalEntry] = []
        self.actions: list[AnyAction] = []
        self.lives: dict[int, int] = {}
        self.count = self.quorums = 0
        self.add(JobSubmitted(spec=spec, at_s=100.0))

    def add(self, event: AnyEvent) -> list[AnyAction]:
        self.now += 1.0
        self.log.append(JournalEntry(len(self.log) + 1, self.now, event))
        self.actions = self.machine.handle(self.now, event)
        return self.actions

    def name(self, group: int) -> str:
        return f"t_{group}:{self.lives[group]}"

    def come(self, group: int) -> list[AnyAction]:
        self.lives[group], self.count = self.count, self.count + 1
        return self.add(
            ReplicaSeen(
                replica=self.name(group),
                group=group,
                at_s=self.now,
                life=self.lives[group],
                manager=f"http://host{group}:1",
                ranks=1,
            )
        )

    def form(self, *groups: int, step: int = 10) -> None:
        self.quorums += 1
        names = tuple(self.name(group) for group in groups)
        formed = QuorumFormed(quorum_id=self.quorums, step=step, members=names, at_s=self.now)
        self.add(formed)

    def leave(
        self,
        group: int,
        reason: str = "no heartbeat",
        *,
        silent: bool = True,
        heard_s: float = 0.0,
    ) -> None:
        self.add(
            ReplicaSeen(
                replica=self.name(group), group=group, at_s=self.now, gone=True, reason=reason,
                silent=silent, life=self.lives[group], step=12, heard_s=heard_s,
            )
        )  # fmt: skip

    def attach(self, group: int) -> None:
        self.add(
            RankAttached(
                generation=self.lives[group], rank=group, pid=7, host="h", devices=("cpu-0",),
                at_s=self.now,
            )
        )  # fmt: skip

    def ask(self, kind: Any, **args: Any) -> AnswerCommand | None:
        id_ = f"c{self.now}"
        actions = self.add(CommandReceived(id=id_, kind=kind, args=args, who="me", at_s=self.now))
        found = [a for a in actions if isinstance(a, AnswerCommand)]
        return found[0] if found else None

    def orders(self, kind: type) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    lab.come(0)
    lab.come(1)
    lab.form(0, 1)
    return lab


def test_a_group_runs_from_its_first_request_on_and_its_next_life_takes_its_place(lab: Lab) -> None:
    state = lab.machine.state
    assert state.phase == "running"
    assert [w.phase for w in state.worlds.values()] == ["running", "running"]
    lab.leave(1)
    assert state.worlds[1].replica.absent == "no heartbeat"
    assert lab.actions == [], "there is nobody to start it again"
    lab.come(1)
    (hold,) = lab.orders(HoldReplicas)
    assert hold.groups == (ReplicaGroup(0, 0, ""), ReplicaGroup(1, 2, ""))
    assert state.worlds[1].replica.absent == ""
    assert lab.machine.next_deadline() is None


def test_a_drained_group_is_held_with_its_next_lives_until_it_is_restored(lab: Lab) -> None:
    assert lab.ask("drain", targets=["replica:1"]) is None
    (hold,) = lab.orders(HoldReplicas)
    assert [group.held for group in hold.groups] == [False, True]
    lab.form(0)
    (answer,) = lab.orders(AnswerCommand)
    assert answer.ok
    assert "lives on, and is held" in answer.reason
    assert lab.orders(EvictReplica) == []
    lab.come(1)
    (hold,) = lab.orders(HoldReplicas)
    assert [group.held for group in hold.groups] == [False, True]
    answer = lab.ask("restore", targets=["t_1"])
    assert answer is not None
    assert answer.ok
    (hold,) = lab.orders(HoldReplicas)
    assert [group.held for group in hold.groups] == [False, False]


def test_an_evicted_group_is_ended_by_its_manager_and_its_next_life_is_held(lab: Lab) -> None:
    assert lab.ask("evict", targets=["rank:1"]) is None
    (evict,) = lab.orders(EvictReplica)
    assert (evict.replica, evict.group, evict.kill, evict.recipients) == (
        "t_1:1", 1, True, (LIGHTHOUSE,),
    )  # fmt: skip
    assert evict.sent_max > 1, "it is said again until it is done"
    (hold,) = lab.orders(HoldReplicas)
    assert hold.groups[1].held, "before its next life asks"
    lab.leave(1, evict.reason)
    (answer,) = lab.orders(AnswerCommand)
    assert answer.ok
    assert evict.list_answered(lab.log[-1].body) == (LIGHTHOUSE,)  # type: ignore[arg-type]
    refused = lab.ask("evict", targets=["replica:0"])
    assert refused is not None
    assert not refused.ok
    assert "it would be lost" in refused.reason


def test_a_group_whose_manager_does_not_answer_is_evicted_and_said_not_to_have_ended(
    lab: Lab,
) -> None:
    lab.ask("evict", targets=["replica:1"])
    lab.leave(1, "evict; its manager has not answered for 3 s", silent=False)
    (answer,) = lab.orders(AnswerCommand)
    assert "its manager has not answered for 3 s" in answer.reason


def test_no_more_groups_are_held_than_can_be_remembered(lab: Lab) -> None:
    for number in range(2, HELD_MAX + 2):
        lab.come(number)
        lab.form(0)
        assert lab.ask("drain", targets=[f"replica:{number}"]).ok  # type: ignore[union-attr]
    assert len(lab.machine.state.worlds) == HELD_MAX + 2
    for verb in ("drain", "cordon", "evict"):
        answer = lab.ask(verb, targets=["replica:1"])
        assert answer is not None
        assert not answer.ok
        assert "restore those that do not come back" in answer.reason
    assert lab.ask("restore", targets=["replica:2"]).ok  # type: ignore[union-attr]
    assert lab.ask("drain", targets=["replica:1"]).ok  # type: ignore[union-attr]


def test_a_target_that_nobody_has_seen_is_refused(lab: Lab) -> None:
    for target in ("replica:7", "nobody", "node:-1", "replica:²"):
        answer = lab.ask("drain", targets=[target])
        assert answer is not None
        assert not answer.ok
        assert "so far came replicas 0, 1" in answer.reason


def test_a_setting_needs_a_line_of_all_who_train(lab: Lab) -> None:
    answer = lab.ask("set", changes={"lr": 0.1})
    assert answer is not None
    assert not answer.ok
    assert "group 0 (t_0:0), group 1 (t_1:1): no line" in answer.reason
    lab.attach(0)
    lab.add(
        KeysDeclared(generation=0, keys=(KeySpec(name="lr", type="float", default=0.5),), step=3)
    )
    answer = lab.ask("set", changes={"lr": 0.1})
    assert answer is not None
    assert "group 1 (t_1:1): no line" in answer.reason
    assert "group 0" not in answer.reason
    lab.attach(1)
    assert lab.ask("set", changes={"lr": 0.1}) is None
    asked = lab.orders(SendBoundary)
    assert [(order.generation, order.ranks) for order in asked] == [(0, (0,)), (1, (1,))]
    step = asked[0].step
    for rank in (0, 1):
        lab.add(
            BoundaryAnswered(id=f"{asked[rank].id}", rank=rank, ok=True, step=step - 1, quorum_id=1)
        )
    for rank in (0, 1):
        lab.add(BoundaryReached(id=asked[rank].id, rank=rank, step=step, at_s=lab.now))
    (answer,) = lab.orders(AnswerCommand)
    assert answer.ok
    assert answer.result["ranks"] == [0, 1]


def test_a_setting_of_groups_that_began_anew_comes_with_their_own_steps(lab: Lab) -> None:
    lab.form(0, 1, step=5000)
    lab.leave(0)
    lab.leave(1)
    lab.come(0)
    lab.form(0, step=7)
    lab.attach(0)
    lab.add(
        KeysDeclared(generation=2, keys=(KeySpec(name="lr", type="float", default=0.5),), step=7)
    )
    assert lab.ask("set", changes={"lr": 0.1}) is None
    (asked,) = lab.orders(SendBoundary)
    assert asked.step < 20, "not after the step that others had come to"
    fold = ReplicaFold()
    for entry in lab.log:
        fold.add(entry.body)  # type: ignore[arg-type]
    assert fold.step == 7


def test_what_a_group_without_the_line_cannot_do_is_not_said_to_be_armed(lab: Lab) -> None:
    answer = lab.ask("inject", rank=1, fault="crash", at_step=99)
    assert answer is not None
    assert not answer.ok
    assert "rank 1 has no line" in answer.reason
    answer = lab.ask("set", changes={"checkpoint.every_s": 5})
    assert answer is not None
    assert not answer.ok
    assert "save by themselves" in answer.reason
    lab.attach(1)
    answer = lab.ask("inject", rank=1, fault="crash", at_step=99)
    assert answer is not None
    assert answer.ok


def test_nothing_can_be_saved_and_a_stop_ends_no_group(lab: Lab) -> None:
    answer = lab.ask("checkpoint")
    assert answer is not None
    assert "save by themselves" in answer.reason
    answer = lab.ask("stop")
    assert answer is not None
    assert answer.ok
    assert lab.orders(EvictReplica) == []
    (end,) = lab.orders(EndJob)
    assert (end.status, end.exit_code) == ("stopped", 0)


def test_a_rank_speaks_by_way_of_the_lighthouse_and_for_itself(lab: Lab) -> None:
    def judge(source: str, event: AnyEvent, sender: str = LIGHTHOUSE) -> str:
        return find_untrue(lab.machine.state, {}, sender, source, event)

    own = KeysDeclared(generation=1, keys=())
    assert judge("g1-r1-p7", own) == ""
    assert "another generation" in judge("g0-r0-p7", own)
    assert "there is no generation 9" in judge("g9-r1-p7", KeysDeclared(generation=9, keys=()))
    assert "there is no generation 0 of rank 5" in judge(
        "g0-r5-p7", KeysDeclared(generation=0, keys=())
    )
    assert "not for a rank" in judge("g1-r1-p7", ReplicaSeen(replica="x", group=0, at_s=1.0))
    other = Controller()
    other.handle(1.0, JobSubmitted(spec=JobSpec(script="x.py"), at_s=1.0))
    said = find_untrue(other.state, {}, LIGHTHOUSE, "g0-r0-p7", KeysDeclared(generation=0, keys=()))
    assert "no rank of this job" in said


def test_a_rank_elsewhere_speaks_by_the_relay_that_it_has_named_and_no_other(lab: Lab) -> None:
    def judge(sender: str, event: AnyEvent, source: str = "g1-r1-p7") -> str:
        return find_untrue(lab.machine.state, {}, sender, source, event)

    own = KeysDeclared(generation=1, keys=())
    registered = NodeRegistered(node=2, incarnation="a2-1-x", host="h", boot_id="b", slots=1)
    attached = RankAttached(
        generation=1, rank=1, pid=7, host="gpu2", devices=("d",), at_s=1.0, place=2
    )
    assert judge("2", attached) == ""
    assert "does not speak from there" in judge("3", attached)
    assert "does not speak from there" in judge(LIGHTHOUSE, attached)
    lab.add(attached)
    assert judge("2", own) == ""
    assert "does not speak from there" in judge("3", own)
    assert "does not speak from there" in judge(LIGHTHOUSE, own)
    assert "no agent is there" in judge("2", registered, "a2-1-x")
    lab.come(1)  # Its next life may be anywhere.
    life = lab.lives[1]
    assert judge("3", KeysDeclared(generation=life, keys=()), f"g{life}-r1-p8") == ""


def test_a_journal_is_replayed_to_the_same_and_from_a_snapshot_as_well(lab: Lab) -> None:
    lab.attach(0)
    lab.ask("drain", targets=["replica:1"])
    lab.form(0)
    half = len(lab.log)
    lab.ask("restore", targets=["replica:1"])
    lab.leave(1)
    lab.come(1)
    lab.ask("evict", targets=["replica:1"])
    whole, known = Memory(SPEC), Memory(SPEC)
    for entry in lab.log:
        whole.replay(entry)
    for entry in lab.log[:half]:
        known.replay(entry)
    again = decode_memory(encode_memory(known), SPEC)
    for entry in lab.log[half:]:
        again.replay(entry)
    assert encode_memory(again) == encode_memory(whole)
    assert whole.machine.state.worlds == lab.machine.state.worlds
    assert whole.machine.state.moves.keys() == lab.machine.state.moves.keys() != set()


def test_a_group_that_left_is_an_incident_until_its_next_life_trains(lab: Lab) -> None:
    lab.leave(1)
    gone_s = lab.log[-1].body.at_s  # type: ignore[union-attr]
    (lost,) = make_report(lab.log, lab.now + 50.0).recoveries
    assert (lost.culprit, lost.cause, lost.rung) == ("group 1, t_1:1", "no heartbeat", "left out")
    assert lost.at_s == gone_s
    assert lost.total_s == lab.now + 50.0 - gone_s
    assert "has not started it again" in lost.reason
    lab.form(0, step=20)
    lab.come(1)
    lab.form(0, 1, step=35)
    (lost,) = make_report(lab.log, lab.now + 50.0).recoveries
    assert lost.rung == "restart"
    assert lost.total_s == lab.log[-1].body.at_s - gone_s  # type: ignore[union-attr]
    assert "others started it again" in lost.reason
    assert "23 steps were made without it" in lost.reason


def test_a_group_is_lost_since_it_was_heard_last(lab: Lab) -> None:
    heard_s = lab.now
    lab.now += 4.0
    told_s = lab.now
    lab.leave(1, "its group was started again", heard_s=heard_s)
    lab.come(1)
    lab.now += 2.0
    lab.form(0, 1, step=30)
    back_s = lab.log[-1].body.at_s  # type: ignore[union-attr]
    report = make_report(lab.log, lab.now + 5.0)
    (lost,) = report.recoveries
    assert (lost.culprit, lost.rung) == ("group 1, t_1:1", "restart")
    assert (lost.at_s, lost.detect_s, lost.total_s) == (heard_s, told_s - heard_s, back_s - heard_s)
    assert lost.detect_s + lost.communicator_s == lost.total_s
    assert report.ledger["reconfiguration.detect"].s == told_s - heard_s
    assert report.ledger["unattributed"].s == 0.0
    lab.leave(1, heard_s=1.0)
    lost = make_report(lab.log, lab.now).recoveries[-1]
    assert lost.at_s == back_s, "not before its own first quorum"


def test_a_group_whose_script_has_ended_well_is_no_incident(lab: Lab) -> None:
    lab.attach(1)
    lab.add(RankLeft(generation=1, rank=1, at_s=lab.now))
    lab.leave(1, "rank 1: its process has ended")
    assert make_report(lab.log, lab.now + 50.0).recoveries == ()
    fold = ReplicaFold()
    for entry in lab.log:
        fold.add(entry.body)  # type: ignore[arg-type]
    assert (fold.groups[1].away, fold.losses) == ("finished", 0)
    lab.leave(0)
    report = make_report(lab.log, lab.now)
    (lost,) = report.recoveries
    assert lost.culprit == "group 0, t_0:0"
    assert report.steps_committed == 12


def test_only_time_in_sight_is_paid_for(lab: Lab) -> None:
    lab.leave(1)
    gone_s = lab.now
    report = make_report(lab.log, lab.now + 100.0)
    assert report.ranks == 2
    first_s = lab.log[1].body.at_s  # type: ignore[union-attr]
    second_s = lab.log[2].body.at_s  # type: ignore[union-attr]
    paid_s = (lab.now + 100.0 - first_s) + (gone_s - 1.0 - second_s)
    assert report.slot_s == pytest.approx(paid_s)
    assert report.ledger["unattributed"].s == 0.0


HELD = (
    HeldGroup(name="t_1", number=1, who="me", reason="drain asked for by me"),
    HeldGroup(name="t_2", number=2, who="me", reason="cordon asked for by me", trains="t_2:1"),
)


def test_groups_that_an_earlier_serve_held_are_held_until_they_are_restored() -> None:
    torchft = TorchftConfig(replicas=1, elsewhere=True, held=HELD)
    lab = Lab(JobSpec(script="", torchft=torchft))
    (hold,) = lab.orders(HoldReplicas)
    assert [(group.group, group.held) for group in hold.groups] == [(1, True), (2, True)]
    for fact in lab.machine.facts(lab.now):
        lab.add(fact)
    lab.come(0)
    lab.come(2)
    (hold,) = lab.orders(HoldReplicas)
    held = {group.group: group.held for group in hold.groups}
    assert held == {0: False, 1: True, 2: False}, "a cordoned group's own life trains on"
    lab.form(0, 2)
    refused = lab.ask("drain", targets=["t_0", "t_2"])
    assert refused is not None
    assert "it would be lost" in refused.reason
    lab.come(1)
    lab.come(2)
    (hold,) = lab.orders(HoldReplicas)
    held = {group.group: group.held for group in hold.groups}
    assert held == {0: False, 1: True, 2: True}, "and its next life does not"
    answer = lab.ask("restore", targets=["t_1"])
    assert answer is not None
    assert answer.ok
    (hold,) = lab.orders(HoldReplicas)
    assert {group.group: group.held for group in hold.groups} == {0: False, 1: False, 2: True}
    lab.come(1)
    (hold,) = lab.orders(HoldReplicas)
    assert not hold.groups[1].held, "for good"


def test_a_held_group_that_has_not_come_is_shown_and_can_be_restored_before_it_does() -> None:
    lab = Lab(JobSpec(script="", torchft=TorchftConfig(replicas=1, elsewhere=True, held=HELD[:1])))
    fold = ReplicaFold()
    for entry in lab.log:
        fold.add(entry.body)  # type: ignore[arg-type]
    assert (fold.groups[1].replica, fold.groups[1].away) == ("t_1:", "drained")
    lab.come(0)
    lab.form(0)
    for verb in ("evict", "drain", "cordon", "restore"):
        lab.ask(verb, targets=["t_1"])
        answers = lab.orders(AnswerCommand)
        assert [answer.ok for answer in answers] == [True], answers
    refused = lab.ask("drain", targets=["t_0"])
    assert refused is not None
    assert "it would be lost" in refused.reason, "one that has never come has no state"


# --- at the lighthouse --------------------------------------------------------------------------


class Door:
    """A lighthouse whose groups others start; heartbeats come from those in `alive`."""

    def __init__(self, **config: Any) -> None:
        self.machine = Quorums(QuorumConfig(elsewhere=True, **config))
        self.now, self.token = 100.0, 0
        self.alive: set[str] = set()

    def ask(self, name: str, step: int) -> list[Output]:
        self.token += 1
        self.alive.add(name)
        return self.machine.ask(self.now, self.token, make_member(name, "same:29500", step))

    def wait(self, seconds: float) -> list[Output]:
        outputs: list[Output] = []
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for name in sorted(self.alive):
                outputs += self.machine.hear(self.now, name)
            outputs += self.machine.tick(self.now)
        return outputs


def members(outputs: list[Output]) -> list[str]:
    answered = [output for output in outputs if isinstance(output, Answered)]
    return [member.replica for member in answered[-1].members] if answered else []


def test_groups_are_known_by_their_names_though_their_stores_are_alike() -> None:
    door = Door()
    seen = [o for o in door.ask("a_1:x", 0) if isinstance(o, Seen)]
    assert [(o.group, o.generation) for o in seen] == [(1, 0)]
    seen = [o for o in door.ask("a_0:y", 0) if isinstance(o, Seen)]
    assert [(o.group, o.generation) for o in seen] == [(0, 1)]
    door.ask("a_1:x", 1)
    door.now += 2.0
    again = door.ask("a_1:z", 0)
    (left,) = [o for o in again if isinstance(o, LeftOut)]
    assert (left.replica, left.group, left.generation, left.silent) == ("a_1:x", 1, 0, True)
    assert door.ask("a_1:x", 2) == [], "the life before is over, whatever it says"


def test_two_groups_that_live_with_one_name_are_two_and_neither_loses_its_state() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.wait(1.0)
    door.ask("a_0:x", 700)
    door.wait(0.3)
    came = door.ask("a_0:y", 0)
    assert came == [], "the heartbeats of the first will tell"
    came = door.wait(0.1)
    assert [(o.group, o.generation) for o in came if isinstance(o, Seen)] == [(1, 1)]
    assert members(came) == [], "it waits for the one who trains, and heals from it"
    answered = [o for o in door.ask("a_0:x", 701) if isinstance(o, Answered)]
    assert [(m.replica, m.step) for m in answered[-1].members] == [("a_0:x", 701), ("a_0:y", 0)]
    door.alive.clear()
    door.wait(2.0)
    door.machine.forgive(door.now, 0.3)
    back = [o for o in door.ask("a_0:z", 0) if isinstance(o, Seen)]
    assert [o.group for o in back] == [0], "silent, though it was forgiven, it is over"


@pytest.mark.parametrize("away_s", [0.2, 0.9, 1.5, 3.0, 4.5])
@pytest.mark.parametrize("waited_for", [False, True])
def test_the_next_life_of_a_group_is_the_end_of_the_one_before_since_that_was_heard(
    away_s: float, waited_for: bool
) -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.ask("b_1:y", 0)
    door.ask("a_0:x", 1)
    door.wait(1.0)
    door.alive.discard("b_1:y")
    killed_s = door.now
    if waited_for:
        door.ask("a_0:x", 2)
    told = [*door.wait(away_s), *door.ask("b_1:z", 0)]
    if away_s < 1.0:
        assert members(told) == [], "the one before may live"
        due_s = door.machine.next_deadline()
        assert due_s is not None
        assert due_s <= killed_s + 1.1
        told += door.wait(1.1 - away_s)
    left, seen = [o for o in told if isinstance(o, LeftOut | Seen)]
    assert isinstance(left, LeftOut)
    assert (left.replica, left.group, left.generation) == ("b_1:y", 1, 1)
    assert (left.silent, left.heard_s) == (True, killed_s)
    assert "its group was started again" in left.reason
    assert isinstance(seen, Seen)
    assert (seen.group, seen.generation) == (1, 2)
    if not waited_for:
        told = door.ask("a_0:x", 2)
    assert members(told) == ["a_0:x", "b_1:z"]


def test_an_open_newcomer_joins_nothing_and_is_forgotten_with_its_end() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.ask("b_1:y", 0)
    door.machine.regroup(door.now, (ReplicaGroup(0, 0, ""), ReplicaGroup(1, 1, "", held=True)))
    door.ask("a_0:x", 1)
    door.wait(0.5)
    door.alive.discard("b_1:y")
    assert door.ask("b_1:z", 0) == [], "whose next life is held, is not seen yet"
    assert door.machine.introduce(door.now, "b_1:z") == []
    assert door.machine.is_open("b_1:z")
    assert members(door.ask("a_0:x", 2)) == ["a_0:x"]
    door.machine.evict(door.now, "b_1:z", "evict asked for by me")
    assert not door.machine.is_open("b_1:z")
    assert not [o for o in door.wait(2.0) if isinstance(o, Seen)]


def test_who_was_not_heard_because_we_stood_still_is_not_over() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.ask("a_0:x", 1)
    door.wait(0.5)
    door.now += 20.0
    door.machine.forgive(door.now, 20.0)
    assert not [o for o in door.ask("a_0:y", 0) if isinstance(o, LeftOut | Seen)]
    told = door.wait(0.1)
    assert not [o for o in told if isinstance(o, LeftOut)], "its heartbeats had waited, too"
    assert [o.group for o in told if isinstance(o, Seen)] == [1]


def test_a_group_that_is_silent_is_left_out_and_not_waited_for() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.ask("a_1:y", 0)
    door.ask("a_0:x", 1)
    assert door.machine.whole
    door.alive.discard("a_1:y")
    (left,) = [o for o in door.wait(6.0) if isinstance(o, LeftOut)]
    assert (left.replica, left.silent) == ("a_1:y", True)
    assert not door.machine.whole, "that its members go on is told no more"
    assert members(door.ask("a_0:x", 2)) == ["a_0:x"]


def test_when_all_have_gone_the_first_one_back_waits_a_moment_for_the_others() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.ask("a_1:y", 0)
    door.ask("a_0:x", 1)
    door.ask("a_1:y", 1)
    door.alive.clear()
    door.wait(6.0)
    assert members(door.ask("a_0:z", 0)) == [], "the other one may have the state"
    assert members(door.wait(8.0)) == []
    assert members(door.wait(3.0)) == ["a_0:z"]


def count_calls(groups: int) -> int:
    """Return how many calls a step of so many groups costs the lighthouse."""
    door, calls = Door(), 0
    for number in range(groups):
        door.ask(f"a_{number}:x", 0)
    door.machine.regroup(door.now, tuple(ReplicaGroup(n, n, "") for n in range(groups)))
    for number in range(groups):
        door.ask(f"a_{number}:x", 1)

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for number in range(groups):
            door.ask(f"a_{number}:x", 2)
    finally:
        sys.setprofile(None)
    assert len(door.machine.members) == groups
    return calls


def test_a_step_of_many_groups_costs_each_request_no_more_than_their_number() -> None:
    assert count_calls(80) < 24 * count_calls(20), "16 times as much is quadratic, 64 cubic"


def test_an_evicted_group_that_lives_and_asks_is_refused_in_a_moment() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.ask("a_1:y", 0)
    door.ask("a_1:y", 1)
    asked = door.token
    door.alive.discard("a_1:y")
    told = door.machine.evict(door.now, "a_1:y", "evict asked for by me")
    assert not [o for o in told if isinstance(o, Refused)], "it may be about to end"
    due_s = door.machine.next_deadline()
    assert due_s is not None
    assert due_s <= door.now + 5.0
    (refused,) = [o for o in door.wait(5.2) if isinstance(o, Refused)]
    assert refused.token == asked
    assert "evict asked for by me. End its process" in refused.reason
    assert door.ask("a_1:y", 1) == []
    door.machine.hang_up(door.now, door.token)
    assert [o for o in door.wait(6.0) if isinstance(o, Refused)] == [], "it has ended"
    door.ask("a_1:y", 1)
    assert len([o for o in door.wait(6.0) if isinstance(o, Refused)]) == 1, "as often as it asks"


def test_a_held_group_whose_machine_is_gone_is_told_of_and_forgotten() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.machine.regroup(door.now, (ReplicaGroup(0, 0, ""), ReplicaGroup(1, 1, "", held=True)))
    door.ask("a_1:y", 0)
    door.alive.discard("a_1:y")
    (left,) = [o for o in door.wait(20.0) if isinstance(o, LeftOut)]
    assert (left.replica, left.silent) == ("a_1:y", True)
    door.wait(60.0)
    refused = [o for o in door.ask("a_2:z", 0) if isinstance(o, Refused)]
    assert len(refused) == 1, "its connection may be half open"
    assert "a_1:y" not in door.machine.replicas


def test_fewer_than_wanted_make_no_quorum() -> None:
    door = Door(min_replicas=2)
    assert members(door.ask("a_0:x", 0)) == []
    assert members(door.ask("a_1:y", 0)) == ["a_0:x", "a_1:y"]


def test_a_held_group_is_held_in_its_next_life() -> None:
    door = Door()
    door.ask("a_0:x", 0)
    door.machine.regroup(door.now, (ReplicaGroup(0, 0, ""), ReplicaGroup(1, 1, "", held=True)))
    assert members(door.ask("a_1:y", 0)) == []
    assert members(door.ask("a_0:x", 1)) == ["a_0:x"]


def test_names_are_bounded_and_those_without_one_take_free_places() -> None:
    names = Names()
    assert names.place("uuid-a", ()) == (0, 0)
    assert names.place("uuid-b", (0,)) == (1, 1)
    assert names.place("uuid-c", (1,)) == (0, 2)
    assert names.place("train_0:x", (0, 1)) == (2, 3), "the number is taken"
    for number in range(3, 1000):
        there = range(number)
        assert names.place(f"n{chr(97 + number % 26)}{number}x:u", there)[0] == number
    assert names.place("one too many:u", range(1000)) == (-1, -1)
    assert names.place("train_0:z", range(1000))[0] == 2
    assert names.place("one more:u", range(5, 1000))[0] >= 0, "some have gone"
