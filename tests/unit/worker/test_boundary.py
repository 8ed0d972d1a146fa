import threading
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.worker import boundary
from perdure.worker.boundary import NEVER, BoundaryGate


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


def test_without_a_decision_the_wait_is_bounded(gate, monkeypatch):
    monkeypatch.setattr(boundary, "ASK_FIRST_S", 0.001)
    monkeypatch.setattr(boundary, "WAIT_S_MAX", 0.0)
    gate.handle(order("prepare"))
    with pytest.raises(boundary.ProtocolError, match="no decision on checkpoint b1 at step 5"):
        gate.arrive(5)


def test_who_missed_the_decision_of_what_is_resumed_waits_for_none(gate, monkeypatch):
    """Whoever had decided and resumed it is dead, and nobody says the decision again."""
    monkeypatch.setattr(boundary, "WAIT_S_MAX", 0.0)
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
