"""A thread of perdure's that is in torch's own code does not abort a process that ends."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.waiting import PATIENCE_S

from perdure.worker import attach
from perdure.worker.ring import RingWriter

pytestmark = pytest.mark.torch

SCRIPT = """
import sys, threading, time
from datetime import timedelta

from torch.distributed import TCPStore

from perdure.worker.attach import attach_ring

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(3.0)

def ask():
    begun.set()
    try:
        store.wait(["nobody sets it"], timedelta(seconds=1.0))
    except RuntimeError:
        pass

attach_ring()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
begun = threading.Event()
thread = threading.Thread(target=ask, name="perdure-store", daemon=True)
sys.slow = Slow()  # The interpreter needs long to end.
thread.start()
begun.wait()
"""


def test_a_thread_that_asks_a_store_does_not_abort_the_end(tmp_path: Path) -> None:
    ring = tmp_path / "0.ring"
    RingWriter.create(str(ring), rank=0, generation=0).close()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PERDURE_RING": str(ring), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


def test_several_threads_that_a_stopped_store_holds_delay_the_end_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them delayed it by 2 s, so that a rank with four outlived a grace of 8 s."""
    now_s = [100.0]

    def wait(timeout: float) -> None:
        now_s[0] += timeout

    rank = attach.stand_alone()
    held = [SimpleNamespace(name="perdure-store", join=wait) for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(attach, "threading", SimpleNamespace(enumerate=lambda: held))
        patch.setattr(attach, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        rank.stop()
    assert now_s == [100.0 + attach._END_S]
