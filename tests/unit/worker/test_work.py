"""`run.work`: what a step's stages say of it in the ring, and what it refuses."""

import math
import threading
import time

import pytest
from tests.rings import read_stages
from tests.waiting import PATIENCE_S

from perdure.worker import attach, work
from perdure.worker.progress import Progress
from perdure.worker.recording.stages import StepStamps
from perdure.worker.ring import RingWriter
from perdure.worker.run import Run
from perdure.worker.steering.config import Config
from perdure.worker.trainers.driven import count_items
from perdure.worker.work import declare_work


class Recorder:
    """One that was never blocked."""

    def blocked_ns(self):
        return 0


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Return a function that ends a step and returns what was declared for it."""
    path = str(tmp_path / "g0-r0.ring")
    writer = RingWriter.create(path, rank=0, generation=0)
    attachment = attach.Attachment(writer)
    attachment.stages = stamps = StepStamps(writer, Recorder())
    monkeypatch.setattr(attach, "_attachment", attachment)
    monkeypatch.setattr(work, "_complained", False)
    stamps.begin_declared(time.monotonic_ns())

    def end_step():
        stamps.end_declared(1, time.monotonic_ns(), 0)
        return read_stages(path, 0.0)[-1].work

    yield end_step
    writer.close()


def test_amounts_of_one_step_add_up_and_the_next_begins_with_nothing(rank):
    Run(Config(), None).work(1000)
    declare_work(24.5)
    assert rank() == 1024.5
    assert rank() == 0.0


def test_numbers_of_other_libraries_are_numbers(rank):
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    declare_work(torch.tensor(3))
    declare_work(numpy.int64(4))
    assert rank() == 7.0


class Hostile:
    def __float__(self):
        raise SystemError("no")

    def __repr__(self):
        raise SystemError("no")


@pytest.mark.parametrize(
    "wrong",
    [math.nan, math.inf, -1, 10**400, True, "12", b"12", None, [1, 2], Hostile(), "\x1b[2J" * 99],
)
def test_what_is_no_amount_is_one_clear_line_and_ends_nothing(rank, wrong, capfd):
    declare_work(100)
    declare_work(wrong)
    declare_work(wrong)
    assert rank() == 0.0  # Of this step it is not known.
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("perdure: work: an amount of work is a number from 0 up")
    assert len(said) < 300
    assert "\x1b" not in said
    declare_work(5)
    assert rank() == 5.0


def test_nobody_waits_for_a_device(rank, capfd):
    class OnDevice:
        device = "cuda:0"

        def __float__(self):
            raise AssertionError("it would have been waited for")

    declare_work(OnDevice())
    assert rank() == 0.0
    assert "on the host" in capfd.readouterr().err


def test_another_thread_declares_nothing(rank):
    thread = threading.Thread(target=declare_work, args=(7,))
    thread.start()
    thread.join(PATIENCE_S)
    assert rank() == 0.0


def test_units_that_perdure_counts_stand_where_nothing_is_declared(rank):
    progress = Progress(attach._attachment)
    progress.mark_work()
    progress.mark_work()
    assert rank() == 2.0
    progress.mark_work()
    declare_work(512)
    assert rank() == 512.0


def test_without_perdure_it_does_nothing(monkeypatch, capfd):
    monkeypatch.setattr(attach, "_attachment", None)
    monkeypatch.delenv("PERDURE_RING", raising=False)
    declare_work("nothing")
    assert capfd.readouterr().err == ""


def test_a_batch_shows_its_tokens_or_samples_by_its_shapes():
    torch = pytest.importorskip("torch")
    ids = torch.zeros(4, 32, dtype=torch.long)
    looped = []
    looped.append(looped)
    counts = {
        128.0: {"labels": ids[:, :1], "input_ids": ids},
        4.0: (ids, torch.zeros(7)),
        7.0: [None, {"x": torch.zeros(7, 3)}],
    }
    for count, batch in counts.items():
        assert count_items(batch) == count
    for batch in (None, 3, "text", torch.tensor(1.0), looped, {"input_ids": None}, object()):
        assert count_items(batch) == 0.0
