"""A collective of three real gloo ranks, one of them stopped, is broken from beside it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.files.private import locate_job
from perdure.model.bus.wire import WorkerEvent
from perdure.model.codec import encode
from perdure.model.events import CollectivesInterrupted
from perdure.model.orders import InterruptCollectives, TakeStacks
from tests.waiting import is_readable, wait_until

pytest.importorskip("torch")

from tests.interrupted import STOPPED, Ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return three ranks for both tests; the first test breaks none of them."""
    ranks = Ranks(tmp_path_factory.mktemp("i"))
    try:
        for rank in range(3):
            assert ranks.hear(rank) == {"ready": rank}
        yield ranks
    finally:
        ranks.close()


def test_order_of_another_generation_breaks_nothing(ranks: Ranks) -> None:
    wait_until(lambda: ranks.count_done(0) > 0, "collective")  # Before it there is no trace.
    old = InterruptCollectives(generation=3, ranks=(0,), reason="late")
    next_ = TakeStacks(generation=4, ranks=(0,), reason="it is carried out after the other one")
    ranks.lines[0].connection.sendall(encode(old) + b"\n" + encode(next_) + b"\n")
    traces = Path(locate_job(str(ranks.directory), "j").traces(4), "gloo")
    wait_until((traces / "rank_0").exists, "answer to the next order")
    done = ranks.count_done(0)
    said = ranks.processes[0].stdout
    wait_until(
        lambda: ranks.count_done(0) > done + 5 or is_readable(said, 0),
        "further collectives",
    )
    assert not is_readable(said, 0)


def test_survivors_of_a_stopped_rank_raise(ranks: Ranks) -> None:
    """The gate `interrupt-in-rank` says how soon. Without the order they wait for half an hour."""
    os.kill(ranks.processes[2].pid, signal.SIGSTOP)
    ranks.wait_held_up()
    for rank in (0, 1):
        ranks.lines[rank].connection.sendall(encode(STOPPED) + b"\n")
    for rank in (0, 1):
        words = ranks.hear(rank)
        assert words["type"] == "RuntimeError", words
        assert words["echo"] == "still here"  # The script's own connections are whole,
        assert words["store"] == "alive"  # and so is the store's.
        event = ranks.lines[rank].read(WorkerEvent).event
        assert isinstance(event, CollectivesInterrupted)
        assert (event.generation, event.rank) == (4, rank)
        # Two of the world's and one of the pair's, less what the other rank broke before.
        assert event.sockets <= 3
        assert event.sockets or "any more" in event.error
