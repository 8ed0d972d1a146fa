"""A collective of real gloo that never ends, in a group that was broken, is given up with it."""

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SCRIPT = """
import gc, threading
from datetime import timedelta
import torch, torch.distributed as dist
from perdure.worker import interrupt as replica_fence

replica_fence.list_devices = dict  # The blow that gloo does not pass on.

class ProcessGroupGloo:  # torchft's, which holds torch's.
    def form(self, store, rank):
        self._pg = dist.ProcessGroupGloo(store, rank, 2, timedelta(hours=1))

def form_two():
    store, groups = dist.HashStore(), [ProcessGroupGloo(), ProcessGroupGloo()]
    threads = [threading.Thread(target=g.form, args=(store, r)) for r, g in enumerate(groups)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return groups

fences = replica_fence.Fences()
mine, other = form_two()
fences.begin(mine, 7, "")
fences.end(mine)

both = [g._pg.allreduce([torch.ones(4)]) for g in (mine, other)]
assert all(fences.outlast(mine, work) for work in both), "what ends is not given up"

work = mine._pg.allreduce([torch.ones(4)])  # The other one never takes part.
broken = []
def break_up():
    broken.append(True)
    fences.break_up(7)

threading.Timer(0.3, break_up).start()
assert fences.outlast(mine, work) is False  # Not after an hour, as by gloo's own time-out.
assert broken, "given up only because of the break"
del mine, work
gc.collect()
third, fourth = form_two()
both = [g._pg.allreduce([torch.ones(4)]) for g in (third, fourth)]
[w.wait() for w in both]
print("went on", flush=True)
"""


def test_a_transfer_that_gloo_has_forgotten_holds_nobody_up() -> None:
    """Neither the wait, nor the group's destructor, nor the process's end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "went on" in done.stdout, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
