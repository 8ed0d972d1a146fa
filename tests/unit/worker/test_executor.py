"""What is agreed is done and told once, whatever interrupts the rank that does it, and where."""

import signal
from pathlib import Path
from typing import Any

import pytest

from perdure.model.errors import PlatformError
from perdure.model.events import BoundaryReached
from perdure.model.steering import Change
from perdure.worker.attach import Attachment
from perdure.worker.ring import RingWriter, is_alone
from perdure.worker.steering import executor
from perdure.worker.steering.boundary import Agreed
from perdure.worker.steering.config import Config
from perdure.worker.steering.executor import FORWARDED, Depth, Executor, SignalForwarding


class Interruption(Exception):
    """The world breaks, or a signal's handler raises."""


class Rank(Depth):
    """A depth that notes what it is asked for, and is interrupted where `at` says."""

    def __init__(self) -> None:
        self.config = Config().declare("lr", float, default=0.1)
        self.did: list[tuple[Any, ...]] = []
        self.told: list[Any] = []
        self.at = ""
        self.fault: Exception = Interruption()
        self.executor = Executor(self, rank=0, generation=0, emit=self.emit, now=lambda: 1.0)

    @property
    def speaks(self) -> bool:
        return True

    def emit(self, event: Any) -> None:
        self.told.append(event)
        self.meet(f"told {getattr(event, 'id', '')}")

    def meet(self, place: str) -> None:
        if place == self.at:
            self.at = ""
            raise self.fault

    def account(self, kind: Any, phase: Any = "step") -> None:
        self.meet(f"account {kind} {phase}")

    def apply(self, change: Change) -> bool:
        self.did.append(("apply", change.epoch))
        self.meet("apply")
        return super().apply(change)

    def come_together(self, step: int, leaves: tuple[int, ...]) -> None:
        self.meet("come together")

    def save(self, step: int, reason: str) -> None:
        self.did.append(("save", step, reason))
        self.meet("save")

    def part(self) -> None:
        self.meet("part")

    def reached(self) -> list[tuple[str, int, str]]:
        return [(e.id, e.step, e.error) for e in self.told if isinstance(e, BoundaryReached)]


def agreed(step: int = 5) -> tuple[Agreed, ...]:
    change = Change(epoch=1, step=step, values={"lr": 0.5})
    return Agreed("e1", "set", step, change), Agreed("c1", "checkpoint", step)


def stop_at(rank: Rank, step: int) -> None:
    if rank.executor.is_due(step):
        rank.executor.stop_at(step)


PLACES = (
    "account overhead boundary", "apply", "told e1", "come together", "account boundary checkpoint",
    "save", "account checkpoint boundary", "told c1", "part", "account boundary step",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_who_is_interrupted_between_two_lines_ends_what_it_has_begun(place: str) -> None:
    rank = Rank()
    for one in agreed():
        rank.executor.gate.plan(one)
    rank.at = place
    with pytest.raises(Interruption):
        stop_at(rank, 5)
    stop_at(rank, 5)
    assert rank.config.lr == 0.5
    assert {id_ for id_, *_ in rank.reached()} == {"e1", "c1"}
    assert {row[1:] for row in rank.reached()} == {(5, "")}
    assert ("save", 5, "checkpoint") in rank.did
    told = len(rank.told)
    stop_at(rank, 5)
    assert len(rank.told) == told


@pytest.mark.parametrize("back", [3, 6])
def test_who_comes_back_at_another_step_saves_nothing_alone(back: int) -> None:
    """A part of a checkpoint that nobody else saves would be waited for."""
    rank = Rank()
    for one in agreed():
        rank.executor.gate.plan(one)
    rank.at = "come together"
    with pytest.raises(Interruption):
        stop_at(rank, 5)
    stop_at(rank, back)
    assert rank.did == [("apply", 1)]
    assert rank.reached() == [("e1", 5, ""), ("c1", back, f"the rank has come back at step {back}")]


def test_a_drain_that_nothing_came_of_holds_nobody() -> None:
    rank = Rank()
    rank.executor.gate.plan(Agreed("d1", "drain", 5))
    rank.at, rank.fault = "save", PlatformError("no room")
    stop_at(rank, 5)
    assert rank.reached() == [("d1", 5, "no room")]
    assert not rank.executor.gate.holds


@pytest.mark.parametrize("own", [False, True])
def test_the_ring_says_whether_perdure_alone_handles_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    ring = RingWriter.create(str(tmp_path / "ring"), rank=0, generation=0)
    monkeypatch.setattr(executor, "attach_ring", lambda: Attachment(ring))
    before = {number: signal.getsignal(number) for number in FORWARDED}
    try:
        signal.signal(signal.SIGTERM, (lambda *_: None) if own else signal.SIG_DFL)
        SignalForwarding(lambda number: None).install()
        assert is_alone(str(tmp_path / "ring"), signal.SIGTERM) is not own
        assert is_alone(str(tmp_path / "ring"), signal.SIGUSR1)
        assert not is_alone(str(tmp_path / "ring"), signal.SIGUSR2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ring.close()
