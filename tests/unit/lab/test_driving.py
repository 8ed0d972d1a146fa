"""A user's job under a trace: what its status tells, and what it could have made."""

import os
import platform
from pathlib import Path

import pytest
from tests.unit.lab.test_replay_play import ACTS

from perdure.drill.here import sweep
from perdure.model.errors import ConfigError, SafetyError
from perdure.model.events import (
    GenerationStepping,
    JobSubmitted,
    JournalEntry,
    RanksStarted,
    WorldReformed,
)
from perdure.model.job import JobSpec
from perdure.model.report import RankRow, Snapshot
from perdure.service.jobfiles import load_snapshot, write_document
from perdure.service.jobfolders import paths_of
from perdure_lab.live.driving import (
    DriveWish,
    _scale,
    _tell,
    assign_nodes,
    check_drive,
    measure_restarts,
    place_steps,
    read_worlds,
    tell_enough,
)
from perdure_lab.live.fleets.fleet import Node
from perdure_lab.live.ledger import Run
from perdure_lab.live.live import Played, plan_schedule
from perdure_lab.live.systems import StatusTrail, choose_grid
from perdure_lab.report import MadeStep
from perdure_lab.screens import render_schedule
from perdure_lab.traces import read_trace


def make_row(rank: int, step: int, state: str = "running") -> RankRow:
    return RankRow(rank=rank, node=rank, pid=1, state=state, phase="step", step=step,
                   steps_per_s=1.0, collective="", cpu_s=0.0, rss_bytes=0)  # fmt: skip


Told = list[tuple[float, int, tuple[int, ...]]]


class Status:
    """A job's status, as a controller writes it; job time is CLOCK_MONOTONIC here."""

    def __init__(self, home: Path) -> None:
        self._paths = paths_of(str(home), "mine")
        Path(self._paths.root).mkdir(parents=True)
        self.trail = StatusTrail(lambda: load_snapshot(self._paths), lambda: 0.0)

    def tell(self, at_s: float, step: int, *ranks: RankRow) -> Told:
        write_document(
            self._paths.snapshot,
            Snapshot(version=1, job="mine", state="running", at_s=at_s, started_s=0.0, generation=0,
                     restarts=0, step=step, steps_per_s=1.0, world_size=2, depth="elastic",
                     reason="", ranks=ranks),
        )  # fmt: skip
        return [(row.at_s, row.step, row.places) for row in self.trail.poll()]


@pytest.fixture
def status(tmp_path: Path) -> Status:
    return Status(tmp_path)


def test_steps_between_two_looks_are_spread_over_the_time_between(status: Status) -> None:
    assert status.tell(10.0, -1) == []
    assert status.tell(10.5, 4, make_row(0, 4), make_row(1, 5)) == []
    found = status.tell(11.0, 6, make_row(0, 6), make_row(1, 7))
    assert found == [(10.75, 5, (0, 1)), (11.0, 6, (0, 1))]
    assert status.tell(11.5, 6, make_row(0, 6), make_row(1, 7)) == found


def test_who_stands_still_or_has_ended_has_not_made_a_step(status: Status) -> None:
    status.tell(1.0, 4, make_row(0, 4), make_row(1, 4))
    found = status.tell(2.0, 5, make_row(0, 5), make_row(1, 4), make_row(2, 9, "exited"))
    assert found == [(2.0, 5, (0,))]


def test_what_is_made_again_is_told_again(status: Status) -> None:
    status.tell(1.0, 4, make_row(0, 4))
    status.tell(2.0, 6, make_row(0, 6))
    status.tell(3.0, 3, make_row(0, 3))
    steps = [step for _, step, _ in status.tell(4.0, 5, make_row(0, 5))]
    assert steps == [5, 6, 4, 5]


def test_a_script_that_counts_on_by_millions_has_not_made_so_many(status: Status) -> None:
    status.tell(1.0, 4, make_row(0, 4))
    assert status.tell(2.0, 10**15, make_row(0, 10**15)) == []
    found = status.tell(3.0, 10**15 + 1, make_row(0, 10**15 + 1))
    assert [step for _, step, _ in found] == [10**15 + 1]


def test_throughput_that_was_not_seen_is_in_proportion_and_spares_add_none() -> None:
    spec = JobSpec(script="x", nodes=3, spares=1)
    assert _scale({3: 9.0}, spec) == {1: 3.0, 2: 6.0, 3: 9.0, 4: 9.0}
    assert _scale({3: 9.0, 2: 8.0}, spec) == {1: 4.0, 2: 8.0, 3: 9.0, 4: 9.0}


NODES = [Node(0, "box1", "it has the controller"), Node(1, "box2"), Node(2, "box3")]


@pytest.mark.parametrize(
    ("nodes", "text", "error", "said"),
    [
        (1, "0,add,a\n9,remove,a\n", ConfigError, "one node"),
        (2, "0,add,a\n5,remove,a\n9,add,a\n99,remove,a\n", SafetyError, "no node at"),
        (2, "0,add,a\n0,add,b\n0,add,c\n9,remove,a\n", SafetyError, "at most 2"),
    ],
)
def test_what_cannot_be_driven_is_refused(
    tmp_path: Path, nodes: int, text: str, error: type[Exception], said: str
) -> None:
    trace = read_trace(text, "trace.csv", duration_s=100.0)
    wish = DriveWish(trace, str(tmp_path), 1.0, 0.0, None, 1.0)
    with pytest.raises(error, match=said):
        check_drive(wish, JobSpec(script="x", nodes=2), NODES[3 - nodes :])


def test_a_trace_that_takes_a_node_that_stays_is_refused_and_says_which_may_be_driven(
    tmp_path: Path,
) -> None:
    every = "0,add,a\n0,add,b\n9,add,c\n20,remove,a\n30,remove,b\n"
    wish = DriveWish(read_trace(every, "t.csv", duration_s=100.0), "", 1.0, 0.0, None, 1.0)
    with pytest.raises(
        SafetyError, match=r"node 0 \(box1\).*controller.*be driven: 1, 2"
    ) as refused:
        check_drive(wish, JobSpec(script="x", nodes=3), NODES)
    assert "--keep" in refused.value.hint


def test_the_node_that_stays_is_that_of_the_trace_that_does() -> None:
    """Places are numbered as the trace fills them, nodes as the job counts them."""
    text = "0,add,a\n0,add,b\n0,add,c\n20,remove,a\n30,add,a\n40,remove,c\n"
    schedule = plan_schedule(read_trace(text, "t.csv", duration_s=100.0))
    moved = assign_nodes(schedule, NODES)
    assert moved.first == (0, 1, 2)
    assert [(act.kind, act.places) for act in moved.acts] == [
        ("leave", (1,)), ("come", (1,)), ("leave", (2,)),
    ]  # fmt: skip


def test_a_fixed_world_is_told_how_much_of_a_trace_it_trains() -> None:
    trace = read_trace("0,add,a\n25,add,b\n", "t.csv", duration_s=0.1)
    told = tell_enough(trace, JobSpec(script="x", nodes=2))
    assert "only while 2 nodes are there: 75.0% of this trace, and begins with 1" in told
    assert tell_enough(trace, JobSpec(script="x", nodes=1)) == ""


def test_a_fixed_world_pays_for_a_loss_what_its_start_takes_once_all_are_there() -> None:
    """It waits from 10 to 20 for a node, and makes its next step at 27; its steps take 1 s."""
    two, one = frozenset({0, 1}), frozenset({0})
    steps = [MadeStep(float(at), at, 1, (0, 1)) for at in (*range(1, 11), *range(27, 40))]
    run = Run(steps, [(0.0, two), (10.0, one), (20.0, two)], 40.0, {1: 0.5, 2: 1.0})
    assert measure_restarts(run, 2, 99.0) == (pytest.approx(6.0), 1)
    lost = Run(steps[:10], [(0.0, two), (10.0, one)], 40.0, {1: 0.5, 2: 1.0})
    assert measure_restarts(lost, 2, 9.0) == (9.0, 0), "nobody came back: as its own start"
    never = Run(steps[:10], [*run.present], 40.0, {1: 0.5, 2: 1.0})
    assert measure_restarts(never, 2, 9.0) == (pytest.approx(19.0), 1), "so long at least"


def test_the_schedule_says_what_is_done_to_which_node_when() -> None:
    text = render_schedule((0, 1), ACTS, "mine", 60.0)
    assert "begins with the nodes 0, 1" in text
    assert [line.split(None, 2)[2] for line in text.splitlines()[2:]] == [
        "are told, 0.2 s before they go", "are killed", "may start",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "stages", "grid"),
    [(1, 2, (0, 0)), (2, 2, (1, 2)), (4, 2, (2, 2)), (5, 2, (2, 2)), (8, 4, (2, 4))],
)
def test_the_fastest_grid_is_taken(nodes: int, stages: int, grid: tuple[int, int]) -> None:
    assert choose_grid(nodes, stages) == grid


def reform(epoch: int, rank: int, formed_s: float) -> WorldReformed:
    return WorldReformed(generation=1, epoch=epoch, rank=rank, step=0, began_s=0.0, ordered_s=0.0,
                         formed_s=formed_s)  # fmt: skip


def test_who_made_a_step_is_known_from_the_journal() -> None:
    """Of a world of a fixed size each generation's ranks; of one that is formed again its members.

    A rank of a slot that was given away is where it was started, whatever its number.
    """
    bodies = [
        RanksStarted(generation=0, node=0, pids={0: 9}, at_s=1.0, warm=False),
        RanksStarted(generation=0, node=1, pids={1: 9}, at_s=1.0, warm=False),
        GenerationStepping(generation=0, at_s=12.0),
        RanksStarted(generation=1, node=0, pids={0: 9}, at_s=20.0, warm=False),
        RanksStarted(generation=1, node=2, pids={1: 9}, at_s=20.0, warm=False),
        reform(0, 0, 21.0), reform(0, 1, 21.5),
        GenerationStepping(generation=1, at_s=21.2),
        reform(1, 0, 30.0),
        RanksStarted(generation=1, node=1, pids={5: 9}, at_s=31.0, warm=False),
        reform(2, 0, 40.0), reform(2, 5, 40.5),
    ]  # fmt: skip
    entries = [JournalEntry(seq=n, at_s=0.0, body=body) for n, body in enumerate(bodies)]
    worlds = read_worlds(entries, 10.0)
    assert worlds == [(2.0, (0, 1)), (11.5, (0, 2)), (20.0, (0,)), (30.5, (0, 1))]
    steps = [MadeStep(at_s, n, 1, (7,)) for n, at_s in enumerate((1.0, 2.0, 11.6, 29.0, 31.0))]
    found = [step.places for step in place_steps(steps, worlds)]
    assert found == [(7,), (0, 1), (0, 2), (0,), (0, 1)]


class Ended:
    """A driven job of which nothing but its journal is left, whose time is this machine's."""

    trouble = None

    def __init__(self, spec: JobSpec) -> None:
        self.fleet = self
        self.spec = spec

    def read_told(self) -> tuple[list[JournalEntry], float]:
        return [JournalEntry(seq=0, at_s=0.0, body=JobSubmitted(spec=self.spec, at_s=0.0))], 0.0

    def list_waits(self) -> tuple[()]:
        return ()


def test_a_job_of_which_nothing_is_taken_reaches_all_that_it_could(tmp_path: Path) -> None:
    """Ten steps a second, seen as six, six and three in half a second each: no median of these."""
    spec = JobSpec(name="mine", script="x", nodes=2)
    trace = read_trace("0,add,a\n0,add,b\n", "still.csv", duration_s=30.0)
    steps, number = [MadeStep(0.0, 0, 1, (0, 1))], 0
    for look in range(60):
        made = (6, 6, 3)[look % 3]
        for part in range(1, made + 1):
            number += 1
            steps.append(MadeStep(0.5 * (look + part / made), number, 1, (0, 1)))
    played = Played(Run(steps, [(0.0, frozenset({0, 1}))], 30.0, {}), True, 0.0)
    wish = DriveWish(trace, str(tmp_path), 1.0, 0.0, None, 1.0)
    found = _tell(wish, played, {2: 7.0}, Ended(spec))  # type: ignore[arg-type]
    assert found.throughput == pytest.approx({"1": 5.0, "2": 10.0}, rel=0.01)
    assert found.systems[0].fraction_of_u1 == pytest.approx(1.0, rel=0.01)
    assert found.assumed == (1,)
    assert (found.systems[0].losses, found.systems[0].joins) == (0, 0)


def test_what_drives_of_this_machine_have_left_is_removed_and_no_other(tmp_path: Path) -> None:
    host = platform.node()
    dead, living = (tmp_path / f"drive-{host}-{pid}-x" for pid in (999999999, os.getpid()))
    elsewhere = tmp_path / f"drive-{host}-1-999999999-x"
    for path in (dead, living, elsewhere):
        path.mkdir()
    sweep(tmp_path, f"drive-{host}-")
    assert set(tmp_path.iterdir()) == {living, elsewhere}
