import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.events import BoundaryReached
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.worker import boundary
from perdure.worker.boundary import NEVER, BoundaryGate
from perdure.worker.cells import NoCells, OwnCells


def order(move, step=5, id="b1", kind="checkpoint"):
    return SendBoundary(
        id=id, move=move, kind=kind, step=step, ranks=(0,), generation=0, reason="test"
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


def test_a_short_orphan_s_ends_no_rank_that_can_drop_what_is_open(monkeypatch):
    monkeypatch.setattr(boundary, "ASK_FIRST_S", 0.001)
    monkeypatch.setattr(boundary, "ASK_EVERY_S", 0.001)
    monkeypatch.setattr(boundary, "DROP_S", 0.05)
    gate = BoundaryGate(
        rank=0, emit=lambda e: None, ask=lambda i: None, cells=OwnCells(), orphan_s=0.001
    )
    gate.handle(order("prepare"))
    assert gate.arrive(5) == []


class World:
    """Four ranks before step 5, which have promised one thing."""

    def __init__(self, kind, monkeypatch, drop_s):
        monkeypatch.setattr(boundary, "ASK_FIRST_S", 0.001)
        monkeypatch.setattr(boundary, "ASK_EVERY_S", 0.001)
        monkeypatch.setattr(boundary, "DROP_S", drop_s)
        self.kind, self.said, cells = kind, [], OwnCells()
        self.gates = [
            BoundaryGate(rank=rank, emit=self.said.append, ask=lambda i: None, cells=cells)
            for rank in range(4)
        ]
        for gate in self.gates:
            gate.handle(order("prepare", kind=kind))

    def commit(self, *ranks):
        for rank in ranks:
            self.gates[rank].handle(order("commit", kind=self.kind))

    def arrive(self):
        """Return, by rank, whether it does what was promised."""
        with ThreadPoolExecutor(4) as pool:
            due = list(pool.map(lambda gate: gate.arrive(5), self.gates, timeout=PATIENCE_S))
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


def test_a_rank_that_comes_late_with_a_commit_drops_with_the_others(monkeypatch):
    world = World("set", monkeypatch, drop_s=0.0)
    late = world.gates.pop()
    assert world.arrive() == [False] * 3
    late.handle(order("commit", kind="set"))
    assert late.arrive(5) == []
    assert world.said[-1].dropped


def test_a_commit_that_no_cell_took_at_first_is_written_before_it_is_carried_out(monkeypatch):
    world = World("set", monkeypatch, drop_s=0.0)
    deaf, cells = world.gates.pop(), world.gates[0]._cells
    deaf._cells = NoCells()  # Its way to the store is broken for a moment.
    deaf.handle(order("commit", kind="set"))
    assert world.arrive() == [False] * 3
    deaf._cells = cells
    assert deaf.arrive(5) == []
    assert world.said[-1].dropped


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
    with ThreadPoolExecutor(4) as pool:
        assert (
            list(pool.map(lambda gate: gate.hold(5), world.gates, timeout=PATIENCE_S)) == [[]] * 4
        )


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
