"""When a machine that has joined is left: never for a short outage."""

import asyncio

from tests.fakes import FakeBus, FakeServer

from perdure.model.job import PreemptionConfig
from perdure.service.agent.notices import (
    NoticeWatch,
    OrphanedError,
    StartedAnewError,
    wait_to_leave,
)

WATCH = NoticeWatch(PreemptionConfig(), (), node=1, report=lambda event: None, now=lambda: 0.0)


def play(
    levels: list[bool], *, orphan_s: float, refuses: bool = False
) -> tuple[OrphanedError | None, int]:
    """Return how it ended and after how many looks, the bus being down as `levels` say."""
    server, looks = FakeServer(refuses=refuses), iter(levels)
    seen = 0

    async def pause(_: float) -> None:
        nonlocal seen
        server.down, seen = next(looks), seen + 1

    async def run() -> OrphanedError | None:
        return await wait_to_leave(FakeBus(server), WATCH, lambda: True, orphan_s, pause)

    return asyncio.run(run()), seen


def test_a_machine_whose_job_is_gone_leaves_after_the_time() -> None:
    error, looks = play([False] * 7 + [True] * 50, orphan_s=2.0)
    assert error is not None
    assert "2 s" in error.message
    assert looks == 27


def test_an_outage_that_ends_begins_the_time_anew() -> None:
    error, looks = play([True] * 15 + [False] + [True] * 50, orphan_s=2.0)
    assert error is not None
    assert looks == 36


def test_a_job_that_was_started_anew_is_left_at_once() -> None:
    error, looks = play([False] * 7 + [True] * 50, orphan_s=2.0, refuses=True)
    assert isinstance(error, StartedAnewError)
    assert looks == 8
