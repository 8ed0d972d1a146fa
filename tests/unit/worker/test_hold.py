"""After an agreed drain or pause a rank makes no step until it is resumed, however that comes."""

import threading
from typing import Any, Literal

from perdure.model.events import BoundaryAnswered, BoundaryReached
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.model.steering import Change
from perdure.worker.steering.boundary import NEVER, Agreed, BoundaryGate

Kind = Literal["checkpoint", "stop", "set", "pause", "drain"]


def make_gate(**more: Any) -> tuple[BoundaryGate, list[Any], list[str]]:
    said: list[Any] = []
    asked: list[str] = []
    return BoundaryGate(rank=0, emit=said.append, ask=asked.append, **more), said, asked


def order(
    move: Literal["prepare", "commit", "abort"],
    step: int = 5,
    id_: str = "b1.1",
    kind: Kind = "pause",
    change: Change | None = None,
) -> SendBoundary:
    return SendBoundary(
        id=id_, move=move, kind=kind, step=step, ranks=(0,), generation=0, reason="r", change=change
    )


def resume(id_: str = "b1.1") -> ResumeRanks:
    return ResumeRanks(generation=0, ranks=(0,), id=id_, reason="r")


def stand(gate: BoundaryGate, step: int = 5, kind: Kind = "pause") -> None:
    gate.handle(order("prepare", step, kind=kind))
    gate.handle(order("commit", step, kind=kind))
    gate.advance(step)
    assert [one.kind for one in gate.arrive(step)] == [kind]


def test_a_resume_that_came_first_is_enough() -> None:
    for kind in ("drain", "pause"):
        gate, said, _ = make_gate()
        gate.handle(order("prepare", kind=kind))
        gate.handle(resume())
        gate.handle(order("commit", kind=kind))
        assert not gate.advance(5)
        assert gate.holds == {}
        assert [e.id for e in said if isinstance(e, BoundaryReached)] == ["b1.1.resumed"]


def test_a_planned_pause_can_be_resumed_before_its_step() -> None:
    gate, _, _ = make_gate()
    gate.plan(Agreed("b1.1", "pause", 9))
    assert gate.next_step == 9
    gate.handle(resume())
    assert gate.next_step == NEVER


def test_a_rank_holds_until_its_own_agreement_is_resumed_and_asks_meanwhile() -> None:
    asked: list[str] = []

    def ask(id_: str) -> None:
        asked.append(id_)
        gate.handle(resume(id_))

    gate = BoundaryGate(rank=0, emit=lambda event: None, ask=ask)
    gate.handle(resume("b0.1"))
    stand(gate, kind="drain")
    assert {id_: one.kind for id_, one in gate.holds.items()} == {"b1.1": "drain"}
    assert gate.hold(5) == []
    assert asked == ["b1.1"]
    assert gate.holds == {}


def test_in_a_pause_more_is_agreed_for_the_same_step() -> None:
    gate, said, _ = make_gate()
    stand(gate)
    for kind, id_ in (("set", "b2.1"), ("checkpoint", "b3.1")):
        gate.handle(order("prepare", id_=id_, kind=kind))  # type: ignore[arg-type]
        threading.Thread(target=gate.handle, args=[order("commit", id_=id_, kind=kind)]).start()  # type: ignore[arg-type]
        assert [one.kind for one in gate.hold(5)] == [kind]
        assert {id_: one.kind for id_, one in gate.holds.items()} == {"b1.1": "pause"}
    gate.handle(order("prepare", 4, id_="b4.1", kind="stop"))
    assert said[-1].reason == "already at step 5"


def test_on_the_way_into_a_pause_its_step_is_not_over_either() -> None:
    gate, said, _ = make_gate()
    gate.handle(order("prepare"))
    gate.handle(order("commit"))
    gate.advance(5)
    gate.handle(order("prepare", id_="b2.1", kind="set"))
    assert said[-1].ok


def test_a_change_that_cannot_be_made_is_refused_for_good_and_leaves_no_gate() -> None:
    gate, said, _ = make_gate(
        check=lambda change: "lr: too high" if change.values["lr"] > 1 else ""
    )
    gate.handle(order("prepare", kind="set", change=Change(epoch=1, step=5, values={"lr": 2.0})))
    assert (said[0].ok, said[0].refused, said[0].reason) == (False, True, "lr: too high")
    assert gate.next_step == NEVER
    change = Change(epoch=2, step=5, values={"lr": 0.5})
    gate.handle(order("prepare", id_="b2.1", kind="set", change=change))
    gate.handle(order("commit", id_="b2.1", kind="set", change=change))
    planned = said[-1]
    assert isinstance(planned, BoundaryAnswered)
    assert planned.planned
    gate.advance(5)
    assert [one.change for one in gate.arrive(5)] == [change]
