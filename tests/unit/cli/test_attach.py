"""`perdure attach` elsewhere: every line once, whatever the place says, and when."""

from collections.abc import Sequence
from typing import Any

import pytest

from perdure.cli.platforms.remote import follow_to_end
from perdure.launch.catalog import load_profile
from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import BoxState, LaunchRecord


class Place:
    """A place whose job has these states, one a look, and whose output these ends."""

    def __init__(self, states: Sequence[BoxState], ends: Sequence[int | None] = (0,) * 99) -> None:
        self.states, self.ends = list(states), list(ends)
        self.shown = 0

    def query_state(self, record: Any, place: Any) -> BoxState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def run(self, record: Any, words: Any, place: Any) -> int:
        self.shown += 1
        code = self.ends.pop(0)
        if code is None:
            raise PlatformError("it broke")
        return code


WAITS, RUNS, ENDED = (BoxState(state=s, attempt=1) for s in ("waiting", "running", "ended"))


def show(place: Place) -> tuple[int, str]:
    """Return how often the output was asked for, and the state at the end."""
    played: Any = place
    profile = load_profile("generic-ssh", "/nonexistent").profile
    record = LaunchRecord(job="gpt", profile=profile, place="/b", home="/b/s", python="python3")
    state = follow_to_end(played, record, ["logs"], played, lambda _: None)
    return place.shown, state.state


def test_output_that_has_ended_is_not_shown_again_while_the_end_is_written_down() -> None:
    assert show(Place([RUNS, RUNS, RUNS, RUNS, ENDED])) == (1, "ended")


def test_what_is_over_already_is_shown_once() -> None:
    assert show(Place([ENDED])) == (1, "ended")


def test_output_that_broke_off_is_asked_for_again() -> None:
    assert show(Place([RUNS, RUNS, RUNS, ENDED], [None, 3, 0])) == (3, "ended")


def test_another_life_of_the_job_is_shown_too() -> None:
    again = BoxState(state="running", attempt=2)
    assert show(Place([RUNS, RUNS, again, again, ENDED])) == (2, "ended")
    assert show(Place([RUNS, WAITS, RUNS, ENDED])) == (2, "ended")


def test_a_place_that_never_says_the_end_is_asked_again_after_a_while() -> None:
    place = Place([RUNS] * 70 + [ENDED])
    assert show(place) == (2, "ended")


def test_each_reason_why_a_job_waits_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    next_, others, never = (
        BoxState(state="waiting", reason=why)
        for why in ("Resources: it is next", "Priority: others", "JobHeldUser: held")
    )
    assert show(Place([next_, others, next_, others, next_, never, RUNS, ENDED])) == (1, "ended")
    told = [line.partition("waiting: ")[2] for line in capsys.readouterr().err.splitlines()]
    assert list(filter(None, told)) == [next_.reason, others.reason, never.reason]
