"""Communicators, as ranks show them: those of earlier epochs are forgotten."""

from perdure.detect.slowness.collectives import CollectiveWatch
from perdure.detect.slowness.shifts import Passed
from perdure.model.signals.progress import CommProgress, RankAccount, RankProgress


def show(watch: CollectiveWatch, rank: int, *names: str) -> None:
    comms = tuple(CommProgress(name, 2, 1, 1, ranks=(0, 1)) for name in names)
    progress = RankProgress(rank, 1000 + rank, "step", 0.0, 0.0, RankAccount(), comms=comms)
    watch.take(0.0, progress)


def test_what_no_rank_shows_any_more_is_forgotten() -> None:
    """An elastic world has a communicator of its own in each epoch."""
    watch = CollectiveWatch(Passed(), world_size=2)
    for epoch in range(100):
        show(watch, 0, "fixed", f"epoch {epoch}")
        watch.look(1.0 * epoch, 0.0)
        kept = {"fixed", f"epoch {max(epoch - 1, 0)}", f"epoch {epoch}"}
        assert {comm.name for comm in watch.comms()} == kept  # Rank 1 is in the one before.
        show(watch, 1, "fixed", f"epoch {epoch}")
        watch.look(1.0 * epoch, 0.0)
        assert {comm.name for comm in watch.comms()} == {"fixed", f"epoch {epoch}"}


def test_a_rank_that_has_left_keeps_no_communicator() -> None:
    watch = CollectiveWatch(Passed(), world_size=2)
    show(watch, 0, "both")
    show(watch, 1, "its own")
    watch.forget(1)
    watch.look(0.0, 0.0)
    assert [comm.name for comm in watch.comms()] == ["both"]
