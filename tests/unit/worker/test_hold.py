"""After an agreed drain a rank makes no step until it is resumed, however that comes."""

from perdure.model.actions import ResumeRanks
from perdure.worker.boundary import BoundaryGate


def test_a_resume_that_came_first_is_enough() -> None:
    gate = BoundaryGate(rank=0, emit=lambda event: None, ask=lambda id_: None)
    gate.handle(ResumeRanks(generation=0, ranks=(0,), id="b1.1", reason="r"))
    gate.hold("b1.1")


def test_a_rank_holds_until_its_own_agreement_is_resumed_and_asks_meanwhile() -> None:
    asked: list[str] = []

    def ask(id_: str) -> None:
        asked.append(id_)
        gate.handle(ResumeRanks(generation=0, ranks=(0,), id=id_, reason="r"))

    gate = BoundaryGate(rank=0, emit=lambda event: None, ask=ask)
    gate.handle(ResumeRanks(generation=0, ranks=(0,), id="b1.1", reason="of an older one"))
    gate.hold("b2.1")
    assert asked == ["b2.1"]
