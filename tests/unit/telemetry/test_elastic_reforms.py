"""A death after which the others went on in place: an incident that ends no generation."""

from msgspec import structs
from tests.decider import feed
from tests.journals import make_series

from perdure.cli.watching.views import describe_time
from perdure.dash.ranktime import Span, render_rank_time
from perdure.dash.sections import Picture, render_section
from perdure.dash.watch import holds
from perdure.model.events import (
    AnyEvent,
    ControllerLost,
    Decision,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    KeeperLost,
    NodeLost,
    ProgressNoted,
    RankExited,
    RanksStarted,
    WorldBroken,
    WorldReformed,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.signals.progress import NodeBeat, RankAccount, RankProgress
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.live.snapshot import SnapshotFold
from perdure.telemetry.monitoring import list_metrics


def account(step: int, last_step_s: float) -> RankAccount:
    return RankAccount(
        step=step, start_step=0, init_s=1.0, group_s=1.1, restored_s=1.2, first_step_s=1.3,
        last_step_s=last_step_s, step_s=last_step_s - 1.3,
    )  # fmt: skip


def test_it_is_over_when_the_last_member_is_in_the_new_world() -> None:
    record = ExitRecord(1, 0, 11, 5.0, signal=9)
    events = [
        WorldReformed(
            generation=0, epoch=1, rank=rank, step=40, began_s=5.0, ordered_s=5.03,
            formed_s=5.05 + rank / 100, redo=2,
        )
        for rank in (0, 2)
    ]  # fmt: skip
    accounts = {rank: account(90, 9.0) for rank in (0, 2)}
    entries: list[tuple[float, AnyEvent | Decision]] = [
        (0.0, JobSubmitted(spec=JobSpec(name="j", script="t.py", nproc=3), at_s=0.0)),
        (0.5, RanksStarted(node=0, generation=0, pids={0: 1, 1: 2, 2: 3}, at_s=0.5, warm=True)),
        (5.01, RankExited(node=0, record=record, account=account(40, 4.9), detected_s=5.01)),
        (5.02, Decision(action="ReformWorld", summary="epoch 1", reason="rank 1 died")),
        *((event.formed_s, event) for event in events),
        (9.0, ProgressNoted(generation=0, at_s=9.0, step=90, accounts=accounts)),
        (9.5, JobEnded(status="done", exit_code=0, reason="all done", at_s=9.5)),
    ]
    fold = LedgerFold()
    for seq, (at_s, body) in enumerate(entries, 1):
        feed(fold, JournalEntry(seq, at_s, body))
    report = fold.report(9.5)
    (recovery,) = report.recoveries
    assert (recovery.rung, recovery.culprit, recovery.lost_steps) == ("shrink", "rank 1", 0)
    assert recovery.lost_microbatches == 4
    phases = [recovery.detect_s, recovery.decide_s, recovery.abort_s, recovery.communicator_s]
    assert [round(s, 3) for s in phases] == [0.01, 0.01, 0.01, 0.04]
    assert round(recovery.total_s, 3) == 0.07
    assert report.steps_committed == 90
    assert abs(sum(line.s for line in report.ledger.values()) - report.slot_s) < 1e-6


def died(rank: int, at_s: float, step: int) -> RankExited:
    record = ExitRecord(rank, 0, 10 + rank, at_s, signal=9)
    return RankExited(node=0, record=record, account=account(step, at_s - 0.1), detected_s=at_s)


def formed(rank: int, epoch: int, at_s: float) -> WorldReformed:
    return WorldReformed(
        generation=0, epoch=epoch, rank=rank, step=40, began_s=at_s - 0.1, ordered_s=at_s - 0.05,
        formed_s=at_s, redo=0,
    )  # fmt: skip


def started(pids: dict[int, int], at_s: float) -> RanksStarted:
    return RanksStarted(node=0, generation=0, pids=pids, at_s=at_s, warm=True)


def replaced() -> list[tuple[float, AnyEvent]]:
    """Rank 1 dies after 5 s; rank 4 takes its slot, is ready after 7 s and trains until 9 s."""
    spec = JobSpec(name="j", script="t.py", nproc=3)
    late = RankAccount(
        step=90, start_step=60, init_s=6.8, first_step_s=7.0, last_step_s=9.0, step_s=2.0
    )
    accounts = {0: account(90, 9.0), 2: account(90, 9.0), 4: late}
    return [
        (0.0, JobSubmitted(spec=spec, at_s=0.0)),
        (0.5, started({0: 1, 1: 2, 2: 3}, 0.5)),
        (5.0, died(1, 5.0, 40)),
        (5.2, formed(0, 1, 5.2)),
        (5.2, formed(2, 1, 5.2)),
        (5.5, started({4: 5}, 5.5)),
        *((7.0, formed(rank, 2, 7.0)) for rank in (0, 2, 4)),
        (9.0, ProgressNoted(generation=0, at_s=9.0, step=90, accounts=accounts)),
    ]


def test_a_slot_is_accounted_for_whoever_has_it() -> None:
    fold = LedgerFold()
    for seq, (at_s, body) in enumerate(replaced(), 1):
        feed(fold, JournalEntry(seq, at_s, body))
    mine = [s for s in fold.segments(9.0) if s.rank in (1, 4)]
    spent: dict[str, float] = {}
    for segment in mine:
        for name, seconds in segment.seconds:
            spent[name] = round(spent.get(name, 0.0) + seconds, 3)
    # Until 5.0 rank 1 (its last step ended at 4.9), until 5.5 nobody, until 7.0 rank 4 begins.
    assert spent == {
        "useful": 3.6 + 2.0, "lost_work": 0.1, "idle": 0.5, "reconfiguration.warmup": 1.5,
    }  # fmt: skip


def test_a_crash_that_others_went_on_after_is_no_trouble_of_now_but_an_incident() -> None:
    screen, ledger = SnapshotFold(JobSpec(name="j", script="t.py", nproc=3)), LedgerFold()
    seen = []
    for seq, (at_s, body) in enumerate(replaced(), 1):
        feed(screen, JournalEntry(seq, at_s, body))
        feed(ledger, JournalEntry(seq, at_s, body))
        picture = screen.snapshot(at_s)
        seen.append(any(holds(verdict, picture) for verdict in picture.verdicts))
    assert True in seen, "while nothing was formed anew"
    assert not seen[-1]
    assert (picture.incidents, picture.reason) == (1, "")
    drawn = render_rank_time(ledger.segments(9.0), 3, 0.0, Span(0.0, 9.0))
    assert "rank 1, 4<" in drawn, "who has had the slot"
    assert "rank 4, generation 0: useful" in drawn


def test_one_count_of_incidents_stands_everywhere_and_a_join_is_none() -> None:
    lost = ControllerLost(
        part="controller", at_s=8.0, pid=7, cause="signal 9 (SIGKILL)", restarted_s=8.3
    )
    screen = SnapshotFold(JobSpec(name="j", script="t.py", nproc=3))
    told = [*replaced(), (8.3, lost)]
    entries = [JournalEntry(seq, at_s, body) for seq, (at_s, body) in enumerate(told, 1)]
    ledger = LedgerFold()
    for entry in entries:
        feed(screen, entry)
        feed(ledger, entry)
    report, snapshot = ledger.report(9.0), screen.snapshot(9.0)
    assert [r.rung for r in report.recoveries] == ["shrink", "join", "none"]
    assert (report.incidents, snapshot.incidents) == (2, 2)
    picture = Picture(report, snapshot, make_series(entries, 9.0))
    shown = "".join(render_section(name, picture, verbs=False) for name in ("bar", "tiles"))
    assert "<dt>incidents</dt><dd>2</dd>" in shown
    assert '<span class="soft">incidents</span><b>2</b>' in shown
    assert "2 incidents, " in describe_time(picture, 100).plain
    counted = {metric.name: metric.samples for metric in list_metrics(snapshot)}
    assert [value for _, value in counted["perdure_incidents_total"]] == [2]
    recovered = [value for _, value in counted["perdure_last_recovery_seconds"]]
    assert recovered == [report.recoveries[0].total_s], "a join is no recovery"


def test_what_a_member_s_start_has_waited_for_is_told_with_its_epoch() -> None:
    said, fold = "waited 1.20 s for the memory of dead ranks on GPU-a", LedgerFold()
    for seq, (at_s, body) in enumerate(replaced(), 1):
        late = isinstance(body, RanksStarted) and 4 in body.pids
        feed(fold, JournalEntry(seq, at_s, structs.replace(body, awaited=said) if late else body))
    crash, join = fold.report(9.0).recoveries
    assert join.reason.endswith(f"; rank 4 {said}")
    assert "waited" not in crash.reason


def test_who_ends_before_it_joins_is_nobodys_incident_and_no_row_for_long() -> None:
    entries = [e for e in replaced() if not (isinstance(e[1], WorldReformed) and e[0] == 7.0)][:-1]
    entries += [(6.0, died(4, 6.0, -1)), (6.5, started({7: 8}, 6.5))]
    ledger, screen = LedgerFold(), SnapshotFold(JobSpec(name="j", script="t.py", nproc=3))
    for seq, (at_s, body) in enumerate(entries, 1):
        feed(ledger, JournalEntry(seq, at_s, body))
        feed(screen, JournalEntry(seq, at_s, body))
    assert [r.culprit for r in ledger.report(9.0).recoveries] == ["rank 1"]
    rows = screen.snapshot(7.0).ranks
    assert [(row.rank, row.pid) for row in rows] == [(0, 1), (7, 8), (2, 3)]


def rungs_of(*bodies: tuple[float, AnyEvent | Decision]) -> list[tuple[str, str]]:
    spec = JobSpec(name="j", script="t.py", nproc=3)
    began: list[tuple[float, AnyEvent | Decision]] = [
        (0.0, JobSubmitted(spec=spec, at_s=0.0)),
        (0.5, started({0: 1, 1: 2, 2: 3}, 0.5)),
    ]
    fold = LedgerFold()
    for seq, (at_s, body) in enumerate([*began, *bodies], 1):
        feed(fold, JournalEntry(seq, at_s, body))
    return [(r.rung, r.culprit) for r in fold.report(20.0).recoveries]


def test_a_join_is_told_and_is_no_failure() -> None:
    rungs = rungs_of(
        (5.0, died(1, 5.0, 40)),
        *((5.1, formed(rank, 1, 5.1)) for rank in (0, 2)),
        (6.0, started({4: 9}, 6.0)),
        *((7.1, formed(rank, 2, 7.1)) for rank in (0, 2, 4)),
    )
    assert rungs == [("shrink", "rank 1"), ("join", "rank 4")]


def test_who_stands_in_within_the_same_epoch_replaces() -> None:
    rungs = rungs_of(
        (1.0, started({4: 9}, 1.0)),
        (5.0, died(1, 5.0, 40)),
        *((5.1, formed(rank, 1, 5.1)) for rank in (0, 2, 4)),
    )
    assert rungs == [("replace", "rank 1")]


def test_a_world_that_broke_without_a_loss_was_tried_again() -> None:
    broken = WorldBroken(generation=0, epoch=0, rank=2, at_s=5.0, error="reset")
    rungs = rungs_of((5.0, broken), *((5.4, formed(rank, 1, 5.4)) for rank in (0, 1, 2)))
    assert rungs == [("retry", "the world")]


def test_an_epoch_that_was_only_left_is_nothing_to_tell() -> None:
    assert rungs_of(*((5.4, formed(rank, 1, 5.4)) for rank in (0, 1))) == []


def test_a_drained_members_step_is_not_the_jobs() -> None:
    screen = SnapshotFold(JobSpec(name="j", script="t.py", nproc=3))
    left = RankExited(
        node=0, record=ExitRecord(2, 0, 13, 5.0), account=account(40, 4.9), detected_s=5.01
    )
    entries: list[tuple[float, AnyEvent | Decision]] = [
        (0.0, JobSubmitted(spec=JobSpec(name="j", script="t.py", nproc=3), at_s=0.0)),
        (0.5, RanksStarted(node=0, generation=0, pids={0: 1, 1: 2, 2: 3}, at_s=0.5, warm=True)),
        *((4.0, formed(rank, 0, 4.0)) for rank in (0, 1, 2)),
        (5.01, left),
    ]
    for seq, (at_s, body) in enumerate(entries, 1):
        feed(screen, JournalEntry(seq, at_s, body))
    rows = tuple(
        RankProgress(
            rank=rank, pid=1 + rank, phase="step", phase_since_s=1.0, heartbeat_s=8.0,
            account=account(90 + rank, 8.0),
        )
        for rank in (0, 1)
    )  # fmt: skip
    screen.take_beat(8.0, NodeBeat(0, "a", 1, 8.0, 0, rows))
    picture = screen.snapshot(8.0)
    assert (picture.step, picture.depth, picture.fixed) == (90, "elastic", "")
    for rank in (0, 1):
        record = ExitRecord(rank, 0, 1 + rank, 9.0)
        end = RankExited(node=0, record=record, account=account(95, 8.9), detected_s=9.0)
        feed(screen, JournalEntry(10 + rank, 9.0, end))
    assert screen.snapshot(9.0).step == 95


def test_a_loss_that_is_told_after_the_others_went_on_is_why_they_did() -> None:
    lost = KeeperLost(node=1, generation=0, at_s=5.2)
    dead = ExitRecord(1, 0, 12, 5.0, signal=9, asked=True, error="keeper lost")
    gone = RankExited(node=1, record=dead, account=account(40, 4.9), detected_s=5.1)
    before: list[tuple[float, AnyEvent | Decision]] = [
        (0.6, RanksStarted(node=1, generation=0, pids={1: 12}, at_s=0.6, warm=True)),
        *((1.0, formed(rank, 0, 1.0)) for rank in (0, 1, 2)),
        (5.0, WorldBroken(generation=0, epoch=0, rank=0, at_s=5.0, error="reset")),
        *((5.1, formed(rank, 1, 5.1)) for rank in (0, 2)),
    ]
    assert rungs_of(*before, (5.15, gone), (5.2, lost)) == [("shrink", "node 1")]
    spare = RanksStarted(node=2, generation=0, pids={3: 14}, at_s=0.7, warm=True)
    nobody = KeeperLost(node=2, generation=0, at_s=5.3)
    assert rungs_of((0.7, spare), *before, (5.3, nobody)) == [("retry", "the world")]


def test_a_node_whose_ranks_had_not_come_in_is_missed_by_nobody() -> None:
    """A node is lost while its rank starts; that a later epoch is formed is no end of that."""

    def rungs(*later: tuple[float, AnyEvent | Decision]) -> list[tuple[str, str]]:
        first = [(1.0, formed(rank, 0, 1.0)) for rank in (0, 1, 2)]
        new = RanksStarted(node=1, generation=0, pids={4: 14}, at_s=2.0, warm=True)
        return rungs_of(*first, (2.0, new), *later)

    lost = NodeLost(node=1, at_s=3.0, reason="node 1 is silent", last_seen_s=2.5)
    again = [(9.0, formed(rank, 1, 9.0)) for rank in (0, 1, 2)]
    assert rungs((3.0, lost), *again) == []
    came = [(2.2, formed(rank, 1, 2.2)) for rank in (0, 1, 2, 4)]
    left = [(9.0, formed(rank, 2, 9.0)) for rank in (0, 1, 2)]
    assert rungs(*came, (3.0, lost), *left) == [("join", "rank 4"), ("shrink", "node 1")]
