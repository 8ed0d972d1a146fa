"""The picture of a torchft job: states of its groups, from the journal."""

from typing import Any

from perdure.dash.watch import holds
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    Decision,
    JobPaused,
    JobResumed,
    JobSubmitted,
    JournalEntry,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.report import Snapshot
from perdure.model.signals.progress import NodeBeat, RankAccount, RankProgress
from perdure.telemetry.live.snapshot import SnapshotFold

SPEC = JobSpec(script="x.py", nodes=3, spares=1, torchft=TorchftConfig(replicas=3))


class Lab:
    def __init__(self, spec: JobSpec = SPEC) -> None:
        self.fold, self.seq = SnapshotFold(spec), 0
        for group in range(4):
            self.start(group, group)

    def add(self, event: AnyEvent) -> None:
        self.seq += 1
        self.fold.add(JournalEntry(seq=self.seq, at_s=100.0 + self.seq, body=event))

    def start(self, group: int, generation: int) -> None:
        self.add(
            RanksStarted(node=group, generation=generation, pids={group: 10}, at_s=1.0, warm=True)
        )

    def see(self, group: int, life: str = "a", **more: Any) -> None:
        self.add(ReplicaSeen(replica=f"t_{group}:{life}", group=group, at_s=1.0, **more))

    def form(self, *names: str, step: int = 5, recovering: tuple[str, ...] = ()) -> None:
        self.add(QuorumFormed(quorum_id=7, step=step, members=names, recovering=recovering))

    def picture(self) -> Snapshot:
        return self.fold.snapshot(200.0)

    def states(self) -> list[str]:
        return [row.state for row in self.picture().replicas]


def running() -> Lab:
    lab = Lab()
    for group in range(4):
        lab.see(group)
    lab.form("t_0:a", "t_1:a", "t_2:a")
    return lab


def test_groups_start_train_and_stand_by() -> None:
    lab = Lab()
    assert lab.states() == ["starting"] * 4
    assert lab.picture().state == "forming"
    lab = running()
    assert lab.states() == ["training", "training", "training", "spare"]
    picture = lab.picture()
    assert (picture.state, picture.step, picture.depth) == ("running", 5, "torchft")
    assert (picture.fixed or "").startswith("torchft: its world")
    assert [row.quorum_id for row in picture.replicas] == [7, 7, 7, -1]
    assert len(picture.ranks) == 4


def test_a_death_and_the_spare_in_its_place() -> None:
    lab = running()
    record = ExitRecord(rank=1, generation=1, pid=10, at_s=2.0, signal=9)
    lab.add(RankExited(node=1, record=record, account=RankAccount(), detected_s=2.0))
    assert lab.states()[1] == "failed"
    lab.form("t_0:a", "t_2:a", "t_3:a", step=9, recovering=("t_3:a",))
    assert lab.states() == ["training", "failed", "training", "healing"]
    assert lab.picture().state == "running"
    lab.start(1, 4)
    assert lab.states()[1] == "starting"
    lab.see(1, "b")
    assert lab.states()[1] == "spare"
    assert (lab.picture().incidents, lab.picture().restarts) == (1, 1)


def test_a_paused_job_is_paused_though_its_newest_life_has_no_step_yet() -> None:
    lab = running()
    lab.add(JobPaused(id="p", step=9, at_s=2.0))
    assert lab.picture().state == "paused"
    lab.see(2, gone=True, reason="no heartbeat")
    assert lab.picture().state == "recovering"
    lab.form("t_0:a", "t_1:a", "t_2:a", step=9)
    lab.add(JobResumed(id="p", step=9, at_s=3.0))
    assert lab.picture().state == "running"


def test_a_restart_is_a_group_begun_again_and_being_left_out_is_none() -> None:
    lab = running()
    for life in ("b", "c"):
        record = ExitRecord(
            rank=1, generation=lab.fold.certain.replicas.groups[1].generation, pid=10, at_s=2.0,
            signal=9,
        )  # fmt: skip
        lab.add(RankExited(node=1, record=record, account=RankAccount(), detected_s=2.0))
        lab.start(1, record.generation + 4)
        lab.start(1, record.generation + 4)  # Told once more, by an agent that was replaced.
        lab.see(1, life)
    lab.see(2, gone=True, reason="no heartbeat")
    lab.form("t_0:a", "t_1:c", "t_2:a", step=8)
    assert (lab.picture().incidents, lab.picture().restarts) == (3, 2)


def test_one_left_out_that_comes_back() -> None:
    lab = running()
    lab.see(2, gone=True, reason="no heartbeat")
    assert lab.states()[2] == "evicted"
    lab.form("t_0:a", "t_1:a")
    assert lab.picture().state == "recovering"
    lab.form("t_0:a", "t_1:a", "t_2:a", step=8)
    assert lab.states()[2] == "training"


def test_t9_nobody_is_said_to_be_evicted_by_a_lighthouse_that_is_not_perdure_s() -> None:
    stock = TorchftConfig(replicas=3, lighthouse="stock")
    lab = Lab(JobSpec(script="x.py", nodes=4, torchft=stock))
    why = "its process is stopped (state T)"
    lab.add(ReplicaSeen(replica="", group=2, at_s=1.0, gone=True, stopped=True, reason=why))
    picture = lab.picture()
    assert picture.replicas[2].state == "silent"
    assert picture.ranks[2].state == "suspected"
    assert picture.incidents == 1
    lab.add(ReplicaSeen(replica="", group=2, at_s=2.0))
    assert lab.states()[2] == "starting"


def test_one_that_falls_silent_while_it_ends_was_not_lost() -> None:
    lab = running()
    lab.see(2, gone=True, reason="no heartbeat")
    assert (lab.states()[2], lab.picture().incidents) == ("evicted", 1)
    record = ExitRecord(rank=2, generation=2, pid=10, at_s=2.0)
    lab.add(RankExited(node=2, record=record, account=RankAccount(), detected_s=2.0))
    assert (lab.states()[2], lab.picture().incidents) == ("finished", 0)


def beat(lab: Lab, group: int, step: int, generation: int) -> None:
    account = RankAccount(step=step, first_step_s=1.0)
    progress = RankProgress(
        rank=group, pid=9, phase="step", phase_since_s=1.0, heartbeat_s=1.0, account=account
    )
    ranks = (progress,)
    lab.fold.take_beat(150.0, NodeBeat(group, "a", 1, 150.0, generation=generation, ranks=ranks))


def test_steps_of_all_groups_come_with_heartbeats_of_their_own_generations() -> None:
    lab = running()
    for group in range(3):
        beat(lab, group, 20 + group, generation=2 - group)
    assert [row.step for row in lab.picture().replicas][:3] == [20, 21, 22]


def test_a_group_that_heals_leaps_to_its_peers_step_which_is_no_speed() -> None:
    lab = running()
    for number, step in enumerate((0, 850, 855, 860)):
        at_s = 150.0 + number
        account = RankAccount(
            step=step, first_step_s=150.0, last_step_s=at_s, heal_s=0.1 * (step > 0)
        )
        progress = RankProgress(
            rank=1, pid=9, phase="step", phase_since_s=1.0, heartbeat_s=at_s, account=account
        )
        beats = NodeBeat(1, "a", 1, at_s, generation=1, ranks=(progress,))
        lab.fold.take_beat(at_s, beats)
    assert lab.picture().ranks[1].steps_per_s == 5.0


def test_groups_that_were_asked_to_end_have_not_failed() -> None:
    lab = running()
    lab.add(CommandReceived(id="c", kind="stop", args={}, who="me"))
    for group in range(3):
        record = ExitRecord(group, group, 10, 2.0, signal=15, asked=True)
        account = RankAccount(step=95, first_step_s=1.0, last_step_s=2.0)
        lab.add(RankExited(node=group, record=record, account=account, detected_s=2.0))
    picture = lab.picture()
    assert picture.step == 95
    assert [row.state for row in picture.replicas][:3] == ["left"] * 3
    assert [row.state for row in picture.ranks][:3] == ["exited"] * 3
    assert picture.incidents == 0


def test_what_is_wrong_with_one_group_is_wrong_now_until_its_next_life() -> None:
    lab = running()
    record = ExitRecord(rank=1, generation=1, pid=10, at_s=2.0, signal=9)
    lab.add(RankExited(node=1, record=record, account=RankAccount(), detected_s=2.0))
    picture = lab.picture()
    assert [holds(verdict, picture) for verdict in picture.verdicts] == [True]
    lab.start(1, 4)
    picture = lab.picture()
    assert [holds(verdict, picture) for verdict in picture.verdicts] == [False]


def test_without_word_from_the_lighthouse_steps_say_who_trains() -> None:
    torchft = TorchftConfig(replicas=3, lighthouse="stock")
    lab = Lab(JobSpec(script="x.py", nodes=3, spares=1, torchft=torchft))
    assert lab.picture().state == "forming"
    for group in range(3):
        beat(lab, group, 20, generation=group)
    assert lab.states() == ["training", "training", "training", "starting"]
    assert (lab.picture().state, lab.picture().step) == ("running", 20)
    record = ExitRecord(rank=1, generation=1, pid=10, at_s=2.0, signal=9)
    lab.add(RankExited(node=1, record=record, account=RankAccount(), detected_s=2.0))
    assert lab.states()[1] == "failed"
    assert lab.picture().state == "recovering"


def test_what_was_said_of_a_group_that_came_is_over_once_all_that_are_there_train() -> None:
    spec = JobSpec(script="", torchft=TorchftConfig(replicas=1, elsewhere=True))
    fold, seq = SnapshotFold(spec), 0

    def add(*bodies: AnyEvent | Decision) -> str:
        nonlocal seq
        for body in bodies:
            seq += 1
            fold.add(JournalEntry(seq=seq, at_s=100.0 + seq, body=body))
        return fold.snapshot(200.0).reason

    def come(group: int, life: int) -> tuple[AnyEvent | Decision, ...]:
        name = f"t_{group}:{life}"
        said = f"{name} is group {group}, started elsewhere"
        seen = ReplicaSeen(replica=name, group=group, at_s=1.0, life=life)
        return seen, Decision(action="HoldReplicas", summary="none", reason=said)

    def form(*names: str) -> QuorumFormed:
        return QuorumFormed(quorum_id=7, step=5, members=names)

    assert add(JobSubmitted(spec=spec, at_s=0.0)) == ""
    assert add(*come(0, 0)) == "t_0:0 is group 0, started elsewhere"
    assert add(form("t_0:0")) == ""
    said = add(*come(1, 1), form("t_0:0"))
    assert said == "t_1:1 is group 1, started elsewhere", "it does not train yet"
    assert add(form("t_0:0", "t_1:1")) == ""
    gone = ReplicaSeen(replica="t_1:1", group=1, at_s=2.0, life=1, gone=True, reason="it has ended")
    assert add(gone, form("t_0:0")) == ""
    assert add(*come(1, 2), form("t_0:0")) == "t_1:2 is group 1, started elsewhere"
    assert add(form("t_0:0", "t_1:2")) == ""
