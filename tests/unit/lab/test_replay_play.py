"""A schedule carried out against a system that only notes what it was told."""

import time
from collections.abc import Sequence

from perdure_lab.live.live import Act, Schedule, play
from perdure_lab.report import MadeStep


class Trail:
    def poll(self) -> list[MadeStep]:
        return [MadeStep(time.monotonic(), 0, 4, (0, 1))]


class Noted:
    """Notes who was told what, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[int, ...], float]] = []
        self.trail, self.ended, self.begun_s = Trail(), 0, time.monotonic()
        self.over_after = -1

    def _note(self, what: str, places: Sequence[int]) -> None:
        self.told.append((what, tuple(places), time.monotonic() - self.begun_s))

    def start(self, places: Sequence[int]) -> None:
        self._note("start", places)

    def warn(self, places: Sequence[int], notice_s: float) -> None:
        self._note("warn", places)

    def kill(self, places: Sequence[int]) -> None:
        self._note("kill", places)

    def add(self, places: Sequence[int]) -> None:
        self._note("add", places)

    def check(self) -> None:
        pass

    def over(self) -> bool:
        return len(self.told) == self.over_after

    def end(self) -> None:
        self.ended += 1

    def read_told(self) -> tuple[list[object], float]:
        return [], 0.0


ACTS = (
    Act(0.1, "notice", (1,), 0.2), Act(0.3, "leave", (1,)), Act(0.5, "come", (1,)),
)  # fmt: skip


def test_acts_come_in_order_and_not_before_their_time() -> None:
    system = Noted()
    played = play(system, Schedule((0, 1), ACTS), 0.7, {2: 10.0}, lambda *_: None)  # type: ignore[arg-type]
    assert [(what, places) for what, places, _ in system.told] == [
        ("warn", (1,)), ("kill", (1,)), ("add", (1,)),
    ]  # fmt: skip
    assert all(at_s >= act.at_s for (_, _, at_s), act in zip(system.told, ACTS, strict=True))
    assert [places for _, places in played.run.present] == [{0, 1}, {0}, {0, 1}]
    assert played.complete
    assert system.ended == 1


def test_an_interrupted_replay_has_what_was_played_so_far() -> None:
    system, calls = Noted(), []

    def interrupt(now_s: float, nodes: int, members: int) -> None:
        calls.append(now_s)
        if len(calls) == 3:
            raise KeyboardInterrupt

    played = play(system, Schedule((0, 1), ACTS), 3600.0, {2: 10.0}, interrupt)  # type: ignore[arg-type]
    assert not played.complete
    assert played.run.end_s < 3600.0
    assert system.ended == 1


def test_a_system_that_ends_by_itself_has_what_was_played_so_far() -> None:
    system = Noted()
    system.over_after = 2
    played = play(system, Schedule((0, 1), ACTS), 3600.0, {2: 10.0}, lambda *_: None)  # type: ignore[arg-type]
    assert not played.complete
    assert [what for what, *_ in system.told] == ["warn", "kill"]
    assert played.run.end_s < 3600.0
    assert system.ended == 1
