"""The decision behind the lighthouse: requests in, answers, exclusions and fences out."""

import pytest
from tests.lighthouse import make_member

from perdure.control.lighthouse.outputs import (
    Answered,
    Fenced,
    Formed,
    Late,
    LeftOut,
    Output,
    Seen,
)
from perdure.control.lighthouse.patience import QuorumConfig
from perdure.control.lighthouse.quorum import Quorums
from perdure.model.orders import ReplicaGroup


class Lab:
    """Three groups and a clock; heartbeats come every 0.1 s from those that are alive."""

    def __init__(self, count: int = 3, spare: int = 0, **config: float) -> None:
        # Some of what follows is about patience that the job file gives; the default is below.
        given = {"hung_s": 1.0, **config}
        self.machine = Quorums(QuorumConfig(**given))  # type: ignore[arg-type]
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

    def beat(self, group: int, *, stopped: bool = False, busy_s: float = 0.0) -> None:
        """What the agent says of a group: in state T, or in a busy phase for so long."""
        until_s = self.now + busy_s if busy_s else 0.0
        self.take(self.machine.note_process(self.now, group, stopped=stopped, busy_until_s=until_s))

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


@pytest.mark.parametrize(
    ("known", "after_s"),
    [("stopped", 0.5), ("broken", 0.5), ("nothing", 5.0), ("lives", 60.0)],
)
def test_silence_leaves_out_and_fences(known: str, after_s: float) -> None:
    """Rows T4 and T9: half a second of silence proves nothing by itself, on a busy machine."""
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    if known == "broken":  # Collectives with it broke.
        lab.ask(0, 5, failures=1)
    lab.alive.discard("train_1")
    waited_s = 0.0
    while not any(isinstance(o, LeftOut) for o in lab.out):
        if known in ("stopped", "lives"):
            lab.beat(1, stopped=known == "stopped")
        lab.wait(0.1)
        waited_s += 0.1
        assert waited_s < 100
    assert waited_s == pytest.approx(after_s, abs=0.4)
    left = lab.last(LeftOut)
    assert isinstance(left, LeftOut)
    assert left.group == 1
    assert ("(state T)" if known == "stopped" else "no heartbeat") in left.reason
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
    lab.beat(1, stopped=True)
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
    lab.machine.forgive(lab.now, 5.0)
    assert lab.machine.tick(lab.now) == []


def test_who_is_waited_for_while_all_stand_still_is_not_late() -> None:
    """A suspended machine: one group asks already, or waits, and the other was left out for it."""
    lab = Lab(2)
    lab.steps(30)
    lab.ask(0, 30)
    lab.now += 60.0
    lab.machine.forgive(lab.now, 59.9)
    assert lab.machine.tick(lab.now) == []
    lab.ask(1, 30)
    assert [o for o in lab.out if isinstance(o, LeftOut | Late)] == []
    lab.wait(0.1)
    begun_s = lab.now
    lab.now += 60.0
    lab.machine.forgive(lab.now, 59.9)
    told = lab.machine.wait(lab.now, 0, lab.machine.quorum_id, begun_s)
    assert [o for o in told if isinstance(o, LeftOut | Late | Fenced)] == []
    assert lab.machine.silences.expected_s < 10.0, "and nothing was learned from it"


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
    homes = lab.machine.map_members()
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
    heir.restore(lab.now, lab.machine.quorum_id, lab.machine._last, lab.machine.map_members())
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


# --- groups that pause (row T9) -----------------------------------------------------------------


@pytest.mark.parametrize("pause_s", [3.0, 10.0, 55.0])
@pytest.mark.parametrize("where", ["between steps", "in a collective"])
def test_a_group_that_pauses_loses_nobody_anything(pause_s: float, where: str) -> None:
    """A validation or a save of one group: the others wait for it, from the first time on."""
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    for step in range(5, 45):
        pauses = step % 10 == 0
        if where == "between steps" or not pauses:
            lab.ask(0, step)
            lab.ask(2, step)
            lab.wait(pause_s if pauses else 0.1)
            lab.ask(1, step)
            continue
        for group in range(3):
            lab.ask(group, step)
        since_s = lab.now
        lab.wait(0.5)
        for group in (0, 2):
            lab.take(lab.machine.wait(lab.now, group, 1, since_s, timeout_s=60.0))
        lab.wait(pause_s - 0.5)
        lab.take(lab.machine.wait(lab.now, 0, 1, since_s, over=True))
    assert not any(isinstance(o, LeftOut | Fenced) for o in lab.out)
    assert sum(isinstance(o, Formed) for o in lab.out) == 1, "one quorum from the first step on"


def test_it_is_told_of_at_once_and_only_while_it_is_new() -> None:
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    for step in range(5, 45):
        lab.ask(0, step)
        lab.ask(2, step)
        lab.wait(3.0 if step % 10 == 0 else 0.1)
        lab.ask(1, step)
    first, over = [o for o in lab.out if isinstance(o, Late)]
    assert (first.group, first.over, over.over) == (1, False, True)
    assert first.waited_s == pytest.approx(1.1, abs=0.2)
    assert over.waited_s == pytest.approx(3.0, abs=0.2)
    assert "waited for it" in first.reason


def test_one_that_dies_during_the_pause_of_another_is_left_at_once() -> None:
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    lab.ask(0, 5)
    lab.wait(2.0)  # Group 1 validates, and group 2 dies.
    out = lab.take(lab.machine.end(lab.now, 2, "rank 2: signal 9 (SIGKILL)", fence=True))
    assert [o.group for o in out if isinstance(o, LeftOut)] == [2]
    lab.wait(3.0)
    assert not any(isinstance(o, LeftOut) and o.group == 1 for o in lab.out)
    answer = lab.ask(1, 5)[-1]
    assert isinstance(answer, Answered)
    assert [m.replica for m in answer.members] == ["train_0", "train_1"]


@pytest.mark.parametrize("where", ["between steps", "in a collective"])
def test_a_group_that_hangs_is_told_of_at_once_and_left_out_when_torchft_would(where: str) -> None:
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    for group in (0, 2):
        if where == "between steps":
            lab.ask(group, 5)
        else:
            lab.take(lab.machine.wait(lab.now, group, 1, lab.now, timeout_s=20.0))
    lab.wait(1.5)
    assert isinstance(lab.out[-1], Late)
    patience_s = 60.0 if where == "between steps" else 20.0
    lab.wait(patience_s - 2.0)
    assert not any(isinstance(o, LeftOut) for o in lab.out)
    lab.wait(1.0)
    left = lab.last(LeftOut)
    assert isinstance(left, LeftOut)
    assert left.group == 1


def test_a_declared_busy_phase_outlasts_any_patience() -> None:
    lab = Lab()  # Even the short one that a job file gives.
    lab.steps(5)
    lab.ask(0, 5)
    lab.ask(2, 5)
    for _ in range(1000):
        lab.beat(1, busy_s=600.0)
        lab.wait(0.2)
    lab.beat(1)  # It is over before it might have been: from now on the usual time is allowed.
    lab.wait(0.8)
    assert not any(isinstance(o, LeftOut | Late) for o in lab.out)
    lab.wait(0.5)
    assert isinstance(lab.last(LeftOut), LeftOut)


def test_after_its_longest_time_a_busy_phase_counts_as_nothing() -> None:
    lab = Lab()
    lab.steps(5)
    lab.ask(0, 5)
    lab.ask(2, 5)
    until_s = lab.now + 20.0
    lab.take(lab.machine.note_process(lab.now, 1, stopped=False, busy_until_s=until_s))
    lab.wait(20.5)  # The agent has died meanwhile: what was declared holds.
    assert not any(isinstance(o, LeftOut) for o in lab.out)
    lab.wait(1.0)
    assert isinstance(lab.last(LeftOut), LeftOut)


@pytest.mark.parametrize("until_s", [float("nan"), float("inf"), 1e300, -1.0])
def test_a_lie_about_the_end_of_a_busy_phase_harms_nobody(until_s: float) -> None:
    lab = Lab()
    lab.steps(5)
    lab.take(lab.machine.note_process(lab.now, 1, stopped=False, busy_until_s=until_s))
    lab.ask(0, 5)
    lab.wait(0.3)
    assert lab.machine.next_deadline() is not None
    lab.take(lab.machine.end(lab.now, 1, "rank 1 died", fence=True))
    answer = lab.ask(2, 5)[-1]
    assert isinstance(answer, Answered)
    assert len(answer.members) == 2


def test_a_patience_from_the_job_file_learns_the_pauses_too() -> None:
    """Left out once, for the first pause was longer than ever; from then on it is waited for."""
    lab = Lab(hung_s=1.0)
    lab.steps(5)
    for step in range(5, 65):
        groups = [0, 2] if step % 20 == 0 else [0, 1, 2]
        for group in groups:
            lab.ask(group, step)
        if step % 20 == 0:
            lab.wait(3.0)
            lab.ask(1, step)
        lab.wait(0.1)
    assert sum(isinstance(o, LeftOut) for o in lab.out) == 1


def test_word_of_a_wait_that_came_too_late_breaks_nothing() -> None:
    """Group 0 had told of its wait; the collective ended, and group 1 is the first to ask."""
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    lab.take(lab.machine.wait(lab.now, 0, 1, lab.now - 0.6))
    lab.ask(1, 6)
    lab.ask(2, 6)
    lab.wait(0.3)
    lab.ask(0, 6)
    assert not any(isinstance(o, Fenced | LeftOut) for o in lab.out)


def test_what_is_due_lies_ahead() -> None:
    """A deadline that has passed and changes nothing would have the lighthouse turn for nothing."""
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    lab.ask(0, 5)
    lab.beat(1, busy_s=30.0)
    lab.beat(2, busy_s=300.0)
    for _ in range(500):
        lab.wait(0.2)
        due_s = lab.machine.next_deadline()
        assert due_s is not None
        assert due_s > lab.now


@pytest.mark.parametrize("since_s", [float("nan"), float("-inf"), -1e18, float("inf"), 0.0])
@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e-9, 60.0])
def test_a_lie_about_a_wait_leaves_nobody_out(since_s: float, timeout_s: float) -> None:
    lab = Lab(hung_s=0.0)
    lab.steps(5)
    lab.take(lab.machine.wait(lab.now, 0, 1, since_s, timeout_s=timeout_s))
    lab.wait(0.5)
    due_s = lab.machine.next_deadline()
    assert due_s is not None
    assert due_s > lab.now
    assert not any(isinstance(o, LeftOut | Fenced) for o in lab.out)
    lab.take(lab.machine.wait(lab.now, 0, 1, since_s, over=True))
    lab.steps(2, first=5)
    assert not any(isinstance(o, LeftOut | Fenced) for o in lab.out)


def test_what_a_group_waits_for_while_it_is_held_is_nobodys_lateness() -> None:
    """An operator holds group 0 for an hour; group 1 did not let it wait."""
    lab = Lab(hung_s=1.0)
    lab.steps(5)
    lab.regroup(3)
    groups = tuple(ReplicaGroup(g, g, f"store:{g}", g == 0) for g in range(3))
    lab.take(lab.machine.regroup(lab.now, groups))
    lab.ask(0, 5)
    lab.wait(3600.0)
    lab.ask(1, 5)
    assert lab.machine.silences.expected_s < 1.0


def test_heartbeats_of_strangers_are_not_kept() -> None:
    lab = Lab()
    lab.steps(2)
    known = set(lab.machine.replicas)
    for number in range(1000):
        assert lab.machine.hear(lab.now, f"stranger_{number}:x") == []
    assert set(lab.machine.replicas) == known
    lab.steps(2, first=2)
