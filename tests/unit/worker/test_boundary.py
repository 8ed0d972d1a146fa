import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.events import BoundaryReached
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.worker.steering import boundary
from perdure.worker.steering.boundary import NEVER, BoundaryGate
from perdure.worker.steering.cells import Away, Cells


def order(move, step=5, id="b1", kind="checkpoint", ranks=(0, 1, 2, 3)):
    return SendBoundary(
        id=id, move=move, kind=kind, step=step, ranks=ranks, generation=0, reason="test"
    )


@pytest.fixture
def gate():
    made: Any = BoundaryGate(rank=0, emit=lambda e: made.said.append(e), ask=lambda i: made.ask(i))
    made.said, made.asked, made.ask = [], [], lambda i: made.asked.append(i)
    return made


def test_a_rank_promises_only_while_it_is_before_the_step(gate):
    gate.advance(4)
    gate.handle(order("prepare"))
    gate.advance(5)
    gate.handle(order("prepare", id="b2"))
    assert [(a.id, a.ok, a.step) for a in gate.said] == [("b1", True, 4), ("b2", False, 5)]
    assert "already at step 5" in gate.said[1].reason


def test_a_veto_leaves_no_gate_behind(gate):
    gate.advance(9)
    gate.handle(order("prepare"))
    assert gate.next_step == NEVER
    assert not gate.advance(10)


def test_a_committed_boundary_is_due_at_its_step_only(gate):
    gate.handle(order("prepare"))
    gate.handle(order("commit"))
    assert not gate.advance(4)
    assert gate.advance(5)
    assert [one.id for one in gate.arrive(5)] == ["b1"]
    assert gate.next_step == NEVER


def test_an_aborted_boundary_is_forgotten(gate):
    gate.handle(order("prepare"))
    gate.handle(order("abort"))
    assert not gate.advance(5)
    gate.handle(order("commit"))  # Too late, and harmless.
    assert not gate.advance(6)


def test_asked_again_the_answer_is_the_same(gate):
    gate.handle(order("prepare"))
    gate.advance(7)
    gate.handle(order("prepare"))
    assert gate.said[0] == gate.said[1]


def test_a_prepared_rank_waits_and_asks_until_it_hears(gate, monkeypatch):
    monkeypatch.setattr(boundary, "ASK_FIRST_S", 0.001)
    asked = threading.Event()
    gate.ask = lambda boundary_id: asked.set()
    gate.handle(order("prepare", kind="stop"))
    assert gate.advance(5)

    def decide():
        asked.wait(PATIENCE_S)
        gate.handle(order("commit"))

    decider = threading.Thread(target=decide)
    decider.start()
    due = gate.arrive(5)
    decider.join()
    assert [one.kind for one in due] == ["stop"]


def test_ranks_without_a_store_wait_as_long_as_an_orphan_may(monkeypatch):
    monkeypatch.setattr(boundary, "ASK_FIRST_S", 0.001)
    monkeypatch.setattr(boundary, "DROP_S", 0.0)
    gate = BoundaryGate(rank=0, emit=lambda e: None, ask=lambda i: None, orphan_s=0.0)
    gate.handle(order("prepare"))
    with pytest.raises(boundary.ProtocolError, match="no decision on checkpoint b1 at step 5"):
        gate.arrive(5)


def test_a_short_orphan_s_ends_no_rank_that_can_drop_what_is_open():
    now = [0.0]
    gate = BoundaryGate(
        rank=0, emit=lambda e: None, ask=lambda i: None, cells=Cells(), orphan_s=0.001,
        now=lambda: now[0],
    )  # fmt: skip
    gate.handle(order("prepare", ranks=(0,)))
    for now[0] in (0.0, boundary.DROP_S):
        assert gate.poll(5) is None
        gate.look()
    assert gate.poll(5) == []


class World:
    """Four ranks before step 5, which have promised one thing."""

    def __init__(self, kind, monkeypatch, drop_s):
        monkeypatch.setattr(boundary, "ASK_FIRST_S", 0.001)
        monkeypatch.setattr(boundary, "ASK_EVERY_S", 0.001)
        monkeypatch.setattr(boundary, "DROP_S", drop_s)
        monkeypatch.setattr(boundary, "LOOK_S", 0.001)
        self.kind, self.said, cells = kind, [], Cells()
        self.gates = [
            BoundaryGate(rank=rank, emit=self.said.append, ask=lambda i: None, cells=cells)
            for rank in range(4)
        ]
        for gate in self.gates:
            gate.handle(order("prepare", kind=kind))

    def commit(self, *ranks):
        for rank in ranks:
            self.gates[rank].handle(order("commit", kind=self.kind))

    def let_all(self, act):
        """Return what `act` returns for each rank; their threads use the cells meanwhile."""
        for gate in self.gates:
            gate.reopen()
        try:
            with ThreadPoolExecutor(4) as pool:
                return list(pool.map(act, self.gates, timeout=PATIENCE_S))
        finally:
            for gate in self.gates:
                gate.stop()

    def arrive(self):
        """Return, by rank, whether it does what was promised."""
        due = self.let_all(lambda gate: gate.arrive(5))
        return [[one.id for one in one_rank] == ["b1"] for one_rank in due]


KINDS = ["checkpoint", "stop", "set", "pause", "drain"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heard", range(4))
def test_a_commit_that_reaches_one_rank_of_four_holds_for_all(monkeypatch, kind, heard):
    world = World(kind, monkeypatch, drop_s=PATIENCE_S)
    world.commit(heard)
    assert world.arrive() == [True] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_rank_has_heard_is_dropped_by_all(monkeypatch, kind):
    world = World(kind, monkeypatch, drop_s=0.0)
    assert world.arrive() == [False] * 4
    reached = [e for e in world.said if isinstance(e, BoundaryReached)]
    assert sorted(e.rank for e in reached) == [0, 1, 2, 3]
    assert all(e.dropped and "dropped it at step 5" in e.error for e in reached)
    world.commit(0, 1, 2, 3)  # Too late for all of them.
    assert not any(gate.advance(6) for gate in world.gates)
    world.said.clear()
    world.gates[0].handle(order("prepare", kind=kind))
    assert not world.said[0].ok, "what was dropped is promised no more"


@pytest.mark.parametrize("lost", range(4))
def test_a_rank_that_was_never_asked_votes_too(monkeypatch, lost):
    world = World("set", monkeypatch, drop_s=0.0)
    deaf = world.gates[lost] = BoundaryGate(
        rank=lost, emit=world.said.append, ask=lambda i: None, cells=world.gates[lost]._cells
    )
    deaf.advance(7)
    assert world.arrive() == [False] * 4
    world.said.clear()
    deaf.handle(order("prepare", kind="set", step=9))
    assert not world.said[0].ok, "what the others have dropped is promised no more"


class Unreachable:
    """Stands for cells whose host has vanished: whoever asks them would wait for seconds."""

    def __init__(self):
        self.asked = 0

    def open(self):
        self.asked += 1
        raise Away


@pytest.mark.parametrize("kind", KINDS)
def test_what_perdure_decides_needs_no_cells(kind):
    cells = Unreachable()
    gate = BoundaryGate(rank=0, emit=lambda e: None, ask=lambda i: None, cells=cells)
    gate.handle(order("prepare", kind=kind))
    gate.handle(order("commit", kind=kind))
    assert [one.id for one in gate.arrive(5)] == ["b1"]
    gate.drop_hold("b1")
    gate.handle(ResumeRanks(id="b1", ranks=(0,), generation=0, reason="test"))
    gate.handle(order("prepare", kind=kind, id="b2", step=6))
    gate.handle(order("abort", kind=kind, id="b2", step=6))
    assert not gate.advance(6)
    assert not cells.asked


def test_ranks_never_part_however_late_a_commit_is(monkeypatch):
    """A race on purpose: one rank hears the commit while the others drop."""
    outcomes = set()
    for number in range(100):
        world = World("set", monkeypatch, drop_s=0.002)
        late = threading.Timer(number * 0.0001, world.commit, (number % 4,))
        late.start()
        did = world.arrive()
        late.join()
        assert len(set(did)) == 1, did
        outcomes.add(did[0])
    assert outcomes


def test_a_resume_that_reaches_one_rank_of_four_holds_for_all(monkeypatch):
    world = World("pause", monkeypatch, drop_s=PATIENCE_S)
    world.commit(0, 1, 2, 3)
    assert world.arrive() == [True] * 4
    world.gates[2].handle(ResumeRanks(id="b1", ranks=(0,), generation=0, reason="test"))
    assert world.let_all(lambda gate: gate.hold(5)) == [[]] * 4


def test_who_missed_the_decision_of_what_is_resumed_waits_for_none(gate):
    """Whoever had decided and resumed it is dead, and nobody says the decision again."""
    gate.handle(order("prepare", kind="drain"))
    gate.handle(ResumeRanks(id="b1", ranks=(0,), generation=0, reason="test"))
    assert gate.said[-1].id == "b1.resumed"
    assert not gate.advance(5)
    gate.handle(order("commit", kind="drain"))
    assert not gate.advance(6)


def test_two_boundaries_at_different_steps(gate):
    gate.handle(order("prepare", id="late", step=8))
    gate.handle(order("prepare", id="early", step=6))
    gate.handle(order("commit", id="late", step=8))
    gate.handle(order("commit", id="early", step=6))
    assert gate.advance(6)
    assert [one.id for one in gate.arrive(6)] == ["early"]
    assert not gate.advance(7)
    assert gate.advance(8)
    assert [one.id for one in gate.arrive(8)] == ["late"]


def test_the_end_of_the_loop_breaks_promises_aloud(gate):
    gate.handle(order("prepare", step=8))
    assert [one.step for one in gate.close("ended at step 6")] == [8]
    gate.handle(order("prepare", id="b2", step=9))
    assert gate.said[-1].ok is False
    assert gate.said[-1].reason == "ended at step 6"


def test_steps_and_prepare_never_disagree(gate):
    """A race on purpose: whoever was told yes must find the gate closed in front of it."""
    passed = []

    def train():
        for step in range(1, 400):
            if gate.advance(step):
                passed.extend(one.step for one in gate.arrive(step))

    trainer = threading.Thread(target=train)
    trainer.start()
    promised = []
    for number in range(200):
        id, step = f"b{number}", gate.committed + 2
        gate.handle(order("prepare", step=step, id=id))
        if gate.said[-1].ok:
            promised.append(step)
            gate.handle(order("commit", step=step, id=id))
    trainer.join(PATIENCE_S)
    assert not trainer.is_alive()
    assert sorted(passed) == [step for step in sorted(promised) if step < 400]


def make_two(cells):
    now, told = [0.0], []
    gates = [
        BoundaryGate(
            rank=rank, emit=told.append, ask=lambda i: None, cells=one, now=lambda: now[0]
        )
        for rank, one in enumerate(cells)
    ]  # fmt: skip
    for gate in gates:
        gate.handle(order("prepare", kind="set", ranks=(0, 1)))
    return gates, now


class Moving:
    """Cells of a world that meets at another store from now and then on."""

    def __init__(self, *stores):
        self.stores = stores
        self.at = 0

    def open(self):
        return f"store {self.at}"

    def __getattr__(self, name):
        return getattr(self.stores[self.at], name)


def test_a_rank_that_has_voted_at_another_store_acts_upon_no_late_commit():
    """Rank 0 may have dropped it there, as it has here, and nobody at the new store knows."""
    stores = Cells(), Cells()
    ways = Moving(*stores), Moving(*stores)
    (first, second), now = make_two(ways)
    assert first.poll(5) is None
    assert second.poll(5) is None
    now[0] = boundary.DROP_S
    second.look()
    first.look()
    assert first.poll(5) == [], "both have voted"
    ways[1].at = 1
    second.handle(order("commit", kind="set", ranks=(0, 1)))
    second.look()
    assert second.poll(5) is None
    ways[0].at = 1
    first.look()
    first.look()
    second.look()
    assert second.poll(5) == []


def test_a_rank_that_was_asked_late_leaves_a_commit_to_the_cells():
    """The others may have voted for a drop without it."""
    (late, other), _ = make_two([Cells()] * 2)
    late._open.clear(), late._answers.clear()
    late.handle(order("prepare", kind="set", ranks=(0, 1)), late=True)
    late.handle(order("commit", kind="set", ranks=(0, 1)))
    assert late.poll(5) is None
    other.handle(order("commit", kind="set", ranks=(0, 1)))
    other.look()
    late.look()
    assert [one.id for one in late.poll(5)] == ["b1"]


def test_a_rank_that_ends_has_told_what_it_has_heard():
    cells = Cells()
    gate = BoundaryGate(rank=0, emit=lambda e: None, ask=lambda i: None, cells=cells)
    gate.reopen()
    gate.handle(order("prepare", kind="stop"))
    gate.handle(order("commit", kind="stop"))
    gate.stop()
    assert cells.read("b1") == "commit"
