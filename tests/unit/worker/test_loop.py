import math
import signal

import numpy as np
import pytest
from tests.rings import read_records

from perdure.adapters.rings import read_ring
from perdure.model.codec import decode, encode
from perdure.model.events import AnyEvent, BoundaryReached, KeysDeclared, MetricsLogged
from perdure.model.orders import SendBoundary
from perdure.worker.attach import Attachment
from perdure.worker.loop import StepLoop
from perdure.worker.metrics import MetricsBuffer
from perdure.worker.ring import RingWriter
from perdure.worker.steering.config import Config


class FakeSaver:
    unbegun = -1  # The newest step that some rank could not begin to save.

    def __init__(self, start=0):
        self.start, self.saves, self.gate_s, self.closed, self.full = start, [], 0.0, False, False

    def restore(self, extra):
        self.restored = getattr(self, "restored", 0) + 1
        extra["config"] = {"epoch": 2, "values": {"lr": 0.5}}
        return self.start

    def save(self, step, *, reason, extra, wait=False):
        if self.full:
            raise OSError("no space left")
        self.saves.append((step, reason, extra))
        return 0.0

    def begin_step(self):
        pass

    def check(self):
        pass

    def settle(self):
        pass

    def close(self):
        self.closed = True


class FakeControl:
    def __init__(self):
        self.events, self.queries = [], []

    def emit(self, event):
        self.events.append(event)
        return len(self.events)

    def drain(self, timeout_s):
        return True

    def query(self, boundary_id):
        self.queries.append(boundary_id)

    def signal(self, number):
        pass

    def obey(self, handler, *kinds):
        self.handlers = dict.fromkeys(kinds, handler)


class Rank:
    """A rank whose steps the test takes one by one."""

    def __init__(self, path, start=0):
        self.path = path
        self.attachment = Attachment(RingWriter.create(path, rank=0, generation=1))
        self.control = self.attachment.control = FakeControl()
        self.saver = FakeSaver(start)
        self.config = Config().declare(lr=0.1, wd=0.0)
        self.metrics = MetricsBuffer(1, self.attachment.emit)
        self.loop = StepLoop(self.attachment, self.saver, self.metrics, self.config)

    def step(self, times=1):
        for _ in range(times):
            self.loop.enter_step()
            self.loop.commit_step()

    def order(self, move, step, kind="checkpoint"):
        self.control.handlers[SendBoundary](
            SendBoundary(
                id="b", move=move, kind=kind, step=step, ranks=(0,), generation=1, reason="test"
            )
        )

    def account(self):
        return read_ring(self.path, 0.0).account


@pytest.fixture
def rank(tmp_path):
    rank = Rank(str(tmp_path / "r.ring"))
    yield rank
    for number, before in rank.loop._executor._signals._before.items():
        signal.signal(number, before)


def assert_closed(account):
    spent = account.step_s + account.checkpoint_s + account.boundary_s + account.overhead_s
    assert spent == pytest.approx(account.last_step_s - account.first_step_s, abs=1e-8)


def test_restoring_comes_before_the_first_step(tmp_path, rank):
    rank.saver.start = 40
    rank.loop.begin()
    account = rank.account()
    assert (account.start_step, account.step, account.first_step_s) == (40, 40, 0.0)
    assert account.restored_s > 0
    assert (rank.config.lr, rank.config.wd, rank.config.epoch) == (0.5, 0.0, 2)


@pytest.mark.parametrize(
    ("totals", "restored"), [((50,), 1), ((10, 20, 50), 2), ((10, 40, 50), 2), ((40, 50), 1)]
)
def test_what_a_script_does_after_loops_that_are_over_is_taken_back(rank, totals, restored):
    rank.saver.start = 40
    for total in totals:
        rank.loop.begin(total)
    rank.step()
    rank.loop.begin(60)
    assert (rank.saver.restored, rank.loop.committed) == (restored, 41)


@pytest.mark.parametrize(
    ("num_steps", "told"),
    [
        (100, 100), (1e3, 1000), (99.5, 100), (np.int64(7), 7), (np.float32(8.0), 8), (True, 1),
        (0, 0), (-3, 0), (1e30, 0), (math.inf, 0), (math.nan, 0),
    ],
)  # fmt: skip
def test_how_many_steps_there_are_is_told_as_a_number_of_steps(rank, num_steps, told):
    """A float was told as one, and the controller did not understand any of the declaration."""
    rank.loop.begin()
    rank.loop.aim(5)
    rank.loop.aim(num_steps)
    declared = [event for event in rank.control.events if isinstance(event, KeysDeclared)]
    assert decode(encode(declared[-1]), AnyEvent).num_steps == told
    assert read_ring(rank.path, 0.0).num_steps == told


def test_every_instant_is_in_one_account(rank):
    rank.loop.every_steps = 3
    rank.loop.begin()
    for _ in range(10):
        rank.step()
        assert_closed(rank.account())
    rank.loop.leave()
    account = rank.account()
    assert_closed(account)
    assert account.step == 10
    assert account.finished_s >= account.last_step_s
    assert read_ring(rank.path, 0.0).phase == "finished"
    assert {record.step for record in read_records(rank.path, 0.0)} == set(range(1, 11))


def test_checkpoints_at_every_nth_step_leave_marks(rank):
    rank.loop.every_steps, rank.loop.save_at_end = 4, True
    rank.loop.begin()
    rank.step(9)
    rank.loop.leave()
    assert [(step, reason) for step, reason, _ in rank.saver.saves] == [
        (4, "interval"), (8, "interval"), (9, "end"),
    ]  # fmt: skip
    assert [step for step, _ in rank.account().marks] == [4, 8, 9]
    assert rank.saver.closed
    assert rank.saver.saves[0][2]["config"]["epoch"] == 2


def test_a_last_step_that_was_saved_is_not_saved_again(rank):
    rank.loop.every_steps, rank.loop.save_at_end = 4, True
    rank.loop.begin()
    rank.step(8)
    rank.loop.leave()
    assert [step for step, _, _ in rank.saver.saves] == [4, 8]


def test_a_last_step_that_some_rank_skipped_is_saved_again(rank):
    rank.loop.every_steps, rank.loop.save_at_end = 4, True
    rank.loop.begin()
    rank.step(8)
    rank.saver.unbegun = 8
    rank.loop.leave()
    assert [step for step, _, _ in rank.saver.saves] == [4, 8, 8]


def test_an_agreed_checkpoint_happens_at_its_step(rank):
    rank.loop.begin()
    rank.step(2)
    rank.order("prepare", 5)
    rank.order("commit", 5)
    rank.step(5)
    assert [(step, reason) for step, reason, _ in rank.saver.saves] == [(5, "checkpoint")]
    reached = [e for e in rank.control.events if isinstance(e, BoundaryReached)]
    assert [(e.id, e.step, e.error) for e in reached] == [("b", 5, "")]
    assert not rank.loop.stopping


def test_an_agreed_stop_saves_and_ends_the_loop(rank):
    rank.loop.begin()
    rank.order("prepare", 3, "stop")
    rank.order("commit", 3, "stop")
    rank.step(3)
    assert rank.loop.stopping
    assert [(step, reason) for step, reason, _ in rank.saver.saves] == [(3, "stop")]


def test_a_full_disk_is_told_and_training_goes_on(rank):
    rank.loop.begin()
    rank.saver.full = True
    rank.order("prepare", 2)
    rank.order("commit", 2)
    rank.step(4)
    reached = [e for e in rank.control.events if isinstance(e, BoundaryReached)]
    assert reached[0].error == "no space left"
    assert rank.account().marks == ()


def test_a_promise_beyond_the_end_is_broken_aloud(rank):
    rank.loop.begin()
    rank.order("prepare", 9)
    rank.step(5)
    rank.loop.leave()
    reached = [e for e in rank.control.events if isinstance(e, BoundaryReached)]
    assert "ended at step 5, before step 9" in reached[0].error


def test_gates_count_as_checkpoint_not_as_step(rank):
    rank.loop.begin()
    rank.loop.enter_step()
    rank.saver.gate_s += 1e-6
    rank.loop.commit_step()
    assert rank.account().checkpoint_s == pytest.approx(1e-6)
    assert_closed(rank.account())


def test_metrics_travel_in_batches(rank):
    rank.loop.begin()
    for step in range(100):
        rank.metrics.add(step, {"loss": float(step)})
        rank.step()
    rank.loop.leave()
    logged = [e for e in rank.control.events if isinstance(e, MetricsLogged)]
    assert len(logged) == 2  # The first at once, the others at the end.
    assert [step for e in logged for step, _ in e.rows] == list(range(100))
