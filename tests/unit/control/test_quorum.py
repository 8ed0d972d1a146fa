"""The decision behind the lighthouse: requests in, answers, exclusions and fences out."""

import pytest

from perdure.control.groups.outputs import (
    Answered,
    Fenced,
    Formed,
    LeftOut,
    Output,
    QuorumConfig,
    Seen,
)
from perdure.control.groups.quorum import Quorums
from perdure.model.actions import ReplicaGroup
from perdure.model.lighthouse import make_member


class Lab:
    """Three groups and a clock; heartbeats come every 0.1 s from those that are alive."""

    def __init__(self, count: int = 3, spare: int = 0, **config: float) -> None:
        self.machine = Quorums(QuorumConfig(**config))  # type: ignore[arg-type]
        self.now, self.token = 100.0, 0
        self.alive = {f"train_{group}" for group in range(count + spare)}
        self.out: list[Output] = []
        self.regroup(count, held=range(count, count + spare))

    def regroup(self, count: int, held: range = range(0)) -> None:
        groups = tuple(
            ReplicaGroup(g, g, f"store:{g}", g in held) for g in range(count + len(held))
        )
        self.take(self.machine.regroup(self.now, groups))

    def take(self, outputs: list[Output]) -> list[Output]:
        self.out += outputs
        return outputs

    def ask(self, group: int, step: int, failures: int = 0, life: str = "") -> list[Output]:
        self.token += 1
        member = make_member(
            f"train_{group}{life}", f"store:{group}", step, commit_failures=failures
        )
        return self.take(self.machine.ask(self.now, self.token, member))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for name in sorted(self.alive):
                self.take(self.machine.hear(self.now, name))
            self.take(self.machine.tick(self.now))

    def steps(self, count: int, groups: tuple[int, ...] = (0, 1, 2), first: int = 0) -> None:
        for step in range(first, first + count):
            for group in groups:
                self.ask(group, step)
            self.wait(0.1)

    def last(self, kind: type) -> Output:
        return next(o for o in reversed(self.out) if isinstance(o, kind))

    def answers(self) -> int:
        return sum(isinstance(o, Answered) for o in self.out)


def test_the_first_quorum_waits_for_every_group() -> None:
    lab = Lab()
    lab.ask(0, 0)
    lab.ask(1, 0)
    lab.wait(5.0)
    assert lab.answers() == 0
    out = lab.ask(2, 0)
    assert isinstance(out[-1], Answered)
    assert len(out[-1].members) == 3
    assert out[-1].quorum_id == 1


def test_the_first_quorum_does_not_wait_for_ever() -> None:
    lab = Lab(startup_s=10.0)
    lab.ask(0, 0)
    lab.wait(10.5)
    assert lab.answers() == 1


def test_the_same_members_keep_their_quorum_and_a_failed_commit_does_not() -> None:
    lab = Lab()
    lab.steps(3)
    assert lab.machine.quorum_id == 1
    for group in range(3):
        lab.ask(group, 3, failures=int(group == 1))
    assert lab.machine.quorum_id == 2


def test_a_dead_member_releases_those_who_wait_for_it() -> None:
    lab = Lab()
    lab.steps(3)
    lab.ask(0, 3)
    lab.ask(1, 3)
    out = lab.take(lab.machine.end(lab.now, 2, "signal 9", fence=True))
    left, fence = out[0], out[1]
    assert isinstance(left, LeftOut)
    assert left.group == 2
    assert fence == Fenced(1, (0, 1), "train_2: signal 9")
    assert isinstance(out[-1], Answered)
    assert [m.replica for m in out[-1].members] == ["train_0", "train_1"]
    assert out[-1].quorum_id == 2


def test_a_dead_replica_is_never_heard_again() -> None:
    lab = Lab()
    lab.steps(2)
    lab.machine.evict(lab.now, "train_2", "told so")
    assert lab.ask(2, 9) == []
    lab.steps(1, (0, 1), first=2)
    answer = lab.last(Answered)
    assert isinstance(answer, Answered)
    assert len(answer.members) == 2


def test_one_that_leaves_in_good_order_interrupts_nobody() -> None:
    lab = Lab()
    lab.steps(2)
    out = lab.machine.end(lab.now, 2, "exit code 0", fence=False)
    assert not any(isinstance(o, Fenced) for o in out)


def test_silence_leaves_out_and_fences() -> None:
    lab = Lab()
    lab.steps(3)
    lab.alive.discard("train_1")
    lab.wait(1.0)
    left = lab.last(LeftOut)
    assert isinstance(left, LeftOut)
    assert left.group == 1
    assert "no heartbeat" in left.reason
    assert lab.last(Fenced) == Fenced(1, (0, 1, 2), f"train_1: {left.reason}"), "itself as well"


def test_one_whose_step_does_not_come_is_left_out_though_its_heart_beats() -> None:
    lab = Lab()
    lab.steps(5)
    lab.ask(0, 5)
    lab.ask(2, 5)
    lab.wait(0.9)
    assert not any(isinstance(o, LeftOut) for o in lab.out)
    lab.wait(0.5)
    left = lab.last(LeftOut)
    assert isinstance(left, LeftOut)
    assert left.group == 1
    answer = lab.last(Answered)
    assert isinstance(answer, Answered)
    assert len(answer.members) == 2


def test_two_replicas_suffice_to_find_the_hung_one() -> None:
    lab = Lab(2)
    lab.steps(5, (0, 1))
    lab.ask(0, 5)
    lab.wait(1.5)
    answer = lab.last(Answered)
    assert isinstance(answer, Answered)
    assert [m.replica for m in answer.members] == ["train_0"]


def test_one_in_its_first_steps_gets_time() -> None:
    lab = Lab()
    lab.steps(1)
    lab.ask(0, 1)
    lab.ask(2, 1)
    lab.wait(20.0)
    assert not any(isinstance(o, LeftOut) for o in lab.out)


def test_one_that_never_came_to_the_collective_is_left_out() -> None:
    lab = Lab()
    lab.steps(5)
    for group in (0, 2):
        lab.take(lab.machine.wait(lab.now, group, 1, lab.now - 0.3))
    lab.wait(1.2)
    left = lab.last(LeftOut)
    assert isinstance(left, LeftOut)
    assert left.group == 1
    assert "in a collective" in left.reason
    assert isinstance(lab.last(Fenced), Fenced)


def test_who_waits_on_one_that_has_given_up_is_released_at_once() -> None:
    lab = Lab()
    lab.steps(5)
    lab.ask(0, 5, failures=1)
    lab.ask(2, 5, failures=1)
    out = lab.take(lab.machine.wait(lab.now, 1, 1, lab.now))
    assert out == [Fenced(1, (1,), "a peer has given the collective up")]


def test_a_deadlock_is_broken_up() -> None:
    lab = Lab()
    lab.steps(5)
    for group in range(3):
        lab.take(lab.machine.wait(lab.now, group, 1, lab.now))
    lab.wait(4.0)
    assert not any(isinstance(o, Fenced) for o in lab.out)
    lab.wait(1.5)
    fence = lab.last(Fenced)
    assert isinstance(fence, Fenced)
    assert fence.groups == (0, 1, 2)


def test_word_of_an_older_quorum_is_ignored() -> None:
    lab = Lab()
    lab.steps(5)
    assert lab.machine.wait(lab.now, 0, 7, lab.now) == []
    assert lab.machine.next_deadline() is not None


@pytest.mark.parametrize("step", [5, 6, 9])
def test_one_that_was_left_out_heals_whatever_step_it_names(step: int) -> None:
    lab = Lab()
    lab.steps(5)
    lab.ask(0, 5)
    lab.ask(2, 5)
    lab.wait(1.3)
    lab.ask(0, 6)
    lab.take(lab.machine.ask(lab.now, 99, make_member("train_1", "store:1", step)))
    out = lab.ask(2, 6)
    answer = out[-1]
    assert isinstance(answer, Answered)
    steps = {m.replica: m.step for m in answer.members}
    assert steps["train_0"] == steps["train_2"] == 6
    assert steps["train_1"] < 6
    formed = lab.last(Formed)
    assert isinstance(formed, Formed)
    assert formed.recovering == ("train_1",)
    assert formed.step == 6


def test_one_stopped_while_it_asks_is_answered_once_it_goes_on() -> None:
    lab = Lab()
    lab.steps(5)
    lab.ask(1, 5)
    lab.alive.discard("train_1")
    lab.wait(1.0)
    lab.ask(0, 5)
    lab.ask(2, 5)
    lab.alive.add("train_1")
    lab.wait(0.2)
    lab.ask(0, 6)
    out = lab.ask(2, 6)
    assert isinstance(out[-1], Answered)
    assert len(out[-1].members) == 3


def test_newcomers_join_and_slow_nobody() -> None:
    lab = Lab()
    lab.steps(3)
    lab.alive.add("train_2:new")
    lab.wait(0.1)
    lab.steps(2, first=3)
    lab.ask(2, 0, life=":new")
    for group in (0, 1):
        lab.ask(group, 5)
    out = lab.ask(2, 5)
    assert isinstance(out[-1], Answered)
    assert len(out[-1].members) == 4


def test_a_held_spare_stays_out_until_it_is_released() -> None:
    lab = Lab(3, spare=1)
    lab.ask(3, 0)
    lab.steps(3)
    answer = lab.last(Answered)
    assert isinstance(answer, Answered)
    assert len(answer.members) == 3
    lab.machine.end(lab.now, 2, "signal 9", fence=True)
    groups = tuple(ReplicaGroup(g, g, f"store:{g}") for g in (0, 1, 3))
    lab.take(lab.machine.regroup(lab.now, groups))
    lab.ask(0, 3)
    out = lab.ask(1, 3)
    assert isinstance(out[-1], Answered)
    assert [m.replica for m in out[-1].members] == ["train_0", "train_1", "train_3"]


def test_a_restart_forms_no_solo_quorum_and_uses_no_id_twice() -> None:
    lab = Lab()
    lab.steps(3)
    before = lab.last(Formed)
    assert isinstance(before, Formed)
    fresh = Lab()
    fresh.machine.restore(fresh.now, 1000, before.members, {})
    fresh.ask(0, 3)
    fresh.wait(0.3)
    assert fresh.answers() == 0
    fresh.ask(1, 3)
    out = fresh.ask(2, 3)
    assert isinstance(out[-1], Answered)
    assert out[-1].quorum_id >= 1000
    assert len(out[-1].members) == 3


def test_a_lost_answer_is_given_again() -> None:
    lab = Lab()
    lab.steps(3)
    out = lab.ask(1, 2)
    assert isinstance(out[-1], Answered)
    assert out[-1].quorum_id == 1
    assert out[-1].tokens == (lab.token,)


def test_a_caller_that_hangs_up_does_not_count() -> None:
    lab = Lab(2)
    lab.steps(2, (0, 1))
    lab.ask(0, 2)
    lab.machine.hang_up(lab.now, lab.token)
    lab.ask(1, 2)
    lab.wait(0.3)
    answers = lab.answers()
    lab.ask(0, 2)
    assert lab.answers() == answers + 1


def test_a_new_replica_is_announced_once() -> None:
    lab = Lab()
    lab.steps(3)
    assert [o.group for o in lab.out if isinstance(o, Seen)] == [0, 1, 2]


def test_a_jump_of_our_own_clock_accuses_nobody() -> None:
    lab = Lab()
    lab.steps(3)
    lab.now += 5.0
    lab.machine.forgive(lab.now)
    assert lab.machine.tick(lab.now) == []


def test_fewer_than_the_minimum_wait() -> None:
    lab = Lab(3, min_replicas=2)
    lab.steps(3)
    lab.machine.end(lab.now, 1, "x", fence=True)
    lab.machine.end(lab.now, 2, "x", fence=True)
    answers = lab.answers()
    lab.ask(0, 3)
    lab.wait(2.0)
    assert lab.answers() == answers
    lab.alive = {"train_0", "train_2:b"}
    lab.ask(2, 0, life=":b")
    lab.wait(61.0)
    assert lab.answers() == answers + 1


def test_a_newcomer_does_not_begin_without_members_that_are_all_busy() -> None:
    lab = Lab()
    lab.steps(5)
    lab.alive.add("train_2:new")
    lab.ask(2, 0, life=":new")
    lab.wait(60.0)
    assert not any(isinstance(o, LeftOut) for o in lab.out)
    lab.wait(250.0)
    assert any(isinstance(o, LeftOut) for o in lab.out)


def test_a_spare_stands_in_within_the_same_quorum() -> None:
    lab = Lab(3)
    groups = [ReplicaGroup(g, g, f"store:{g}") for g in range(3)]
    lab.machine.regroup(lab.now, (*groups, ReplicaGroup(3, 3, "store:3", True, True)))
    lab.alive.add("train_3")
    lab.ask(3, 0)
    lab.steps(3)
    lab.take(lab.machine.end(lab.now, 2, "signal 9", fence=True))
    lab.ask(0, 3, failures=1)
    out = lab.ask(1, 3, failures=1)
    assert isinstance(out[-1], Answered)
    assert [m.replica for m in out[-1].members] == ["train_0", "train_1", "train_3"]
    assert out[-1].quorum_id == 2


def test_no_spare_stands_in_for_one_that_has_finished() -> None:
    lab = Lab(2)
    groups = [ReplicaGroup(g, g, f"store:{g}") for g in range(2)]
    lab.machine.regroup(lab.now, (*groups, ReplicaGroup(2, 2, "store:2", True, True)))
    lab.ask(2, 0)
    lab.steps(3, (0, 1))
    lab.take(lab.machine.end(lab.now, 1, "exit code 0", fence=False))
    out = lab.ask(0, 3)
    assert isinstance(out[-1], Answered)
    assert [m.replica for m in out[-1].members] == ["train_0"]


def start_again(groups, number, store):
    """Return `groups` with one of them started again, at a store of its own."""
    return tuple(
        ReplicaGroup(g.group, 10 + number, store) if g.group == number else g for g in groups
    )


def test_who_died_while_there_was_no_lighthouse_is_known_by_its_successor():
    """Else newcomers would wait for members that never ask again."""
    lab = Lab()
    lab.steps(3)
    before = tuple(lab.machine.groups.values())
    homes = lab.machine.find_homes()
    assert homes == {f"train_{g}": (g, g) for g in range(3)}
    heir = Quorums(lab.machine.config)
    heir.restore(lab.now, lab.machine.quorum_id, lab.machine._last, homes)
    heir.next_id = 100
    assert heir.regroup(lab.now, before) == []  # Nothing has happened to them.
    groups = before
    for number in range(3):
        groups = start_again(groups, number, f"again:{number}")
    heir.regroup(lab.now, groups)
    outputs: list[Output] = []
    for number in range(3):
        member = make_member(f"train_{number}b", f"again:{number}", 2)
        outputs += heir.ask(lab.now + 1.0, number, member)
    (formed,) = [o for o in outputs if isinstance(o, Formed)]
    assert {member.replica for member in formed.members} == {f"train_{g}b" for g in range(3)}


def test_one_of_them_that_died_is_replaced_without_a_wait():
    lab = Lab()
    lab.steps(3)
    heir = Quorums(lab.machine.config)
    heir.restore(lab.now, lab.machine.quorum_id, lab.machine._last, lab.machine.find_homes())
    heir.next_id = 100
    heir.regroup(lab.now, start_again(tuple(lab.machine.groups.values()), 1, "again:1"))
    outputs = [
        output
        for token, number in enumerate((0, 2))
        for output in heir.ask(
            lab.now + 0.1, token, make_member(f"train_{number}", f"store:{number}", 3)
        )
    ]
    (answered,) = [o for o in outputs if isinstance(o, Answered)]
    assert [member.replica for member in answered.members] == ["train_0", "train_2"]
