"""Micro-batches loaded before their turn: real processes."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from tests.waiting import is_readable, wait_until

from perdure.worker.data import Prefetcher


def load_one(step: int, number: int) -> tuple[torch.Tensor, int]:
    return torch.full((3,), 100.0 * step + number), os.getpid()


@pytest.fixture
def ahead() -> Iterator[Prefetcher]:
    made = Prefetcher(load_one, 2)
    yield made
    made.close()


def load(ahead: Prefetcher, step: int, *numbers: int) -> list[bool]:
    """Load and check; return which ones were loaded elsewhere."""
    found = [ahead.load(step, number) for number in numbers]
    assert [t[0].item() for t, _ in found] == [100.0 * step + number for number in numbers]
    return [pid != os.getpid() for _, pid in found]


def test_what_was_loaded_in_the_step_before_is_there(ahead: Prefetcher) -> None:
    assert load(ahead, 0, 4, 5) == [False, False]
    assert load(ahead, 1, 4, 5) == [True, True]
    assert load(ahead, 2, 4, 5) == [True, True]


def test_a_changed_share_is_loaded_here_once(ahead: Prefetcher) -> None:
    load(ahead, 0, 4, 5)
    load(ahead, 1, 4, 5)
    assert load(ahead, 2, 4, 5, 6, 7) == [True, True, False, False]
    assert load(ahead, 3, 4, 5, 6, 7) == [True, True, True, True]
    assert load(ahead, 4, 6) == [True]
    load(ahead, 5, 6)
    assert load(ahead, 6, 6) == [True]
    assert load(ahead, 2, 6) == [False]  # The job went back to a snapshot.


def test_a_process_that_dies_costs_nothing_but_its_help(
    ahead: Prefetcher, capfd: pytest.CaptureFixture[str]
) -> None:
    load(ahead, 0, 4)
    _, pid = ahead.load(1, 4)
    os.kill(pid, signal.SIGKILL)
    step = 1

    def is_loaded_here() -> bool:
        nonlocal step
        step += 1
        return load(ahead, step, 4) == [False]

    wait_until(is_loaded_here, "step without the dead process")
    assert load(ahead, step + 1, 4) == [False]
    assert "a process that loaded data has died" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nor_do_all_that_die_when_a_guess_was_wrong(ahead: Prefetcher) -> None:
    """Python 3.11's pool tells nobody of a death once a call that waits for it was cancelled."""
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGSTOP)
    assert load(ahead, 0, 4) == [False]
    assert load(ahead, 7, 4) == [False]
    for worker in workers:
        worker.kill()
    assert load(ahead, 8, 4) == [False]


def test_an_error_of_the_dataset_is_raised_when_its_turn_comes() -> None:
    def fail_later(step: int, number: int) -> int:
        if step == 1:
            raise LookupError("sample 3")
        return number

    ahead = Prefetcher(fail_later, 1)
    assert ahead.load(0, 7) == 7
    with pytest.raises(LookupError, match="sample 3"):
        ahead.load(1, 7)
    ahead.close()


def test_no_process_outlives_its_rank() -> None:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()  # What other tests have left is not to be finalized in a forked child.
            ahead = Prefetcher(load_one, 1)
            ahead.load(0, 1)
            os.write(tell, b"%d" % ahead.load(1, 1)[1])
            signal.pause()
        finally:
            os._exit(1)  # And never a second pytest.
    assert is_readable(told)
    loader = os.pidfd_open(int(os.read(told, 100)))
    assert not is_readable(loader, 0)  # It lives.
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert is_readable(loader)
    for fd in (told, tell, loader):
        os.close(fd)
