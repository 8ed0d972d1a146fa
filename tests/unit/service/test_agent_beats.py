"""What an agent says of its machine's cores, with processes that really use them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_until

from perdure.adapters.host import measure_cpu
from perdure.agent.state import KeeperView
from perdure.model.paths import JobPaths
from perdure.service.agent.beats import RankReader

_KEEPER = """\
import subprocess, sys
image = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(image.pid, flush=True)
sys.stdin.read()
image.kill()
image.wait()
"""


def test_what_the_keeper_runs_beside_the_ranks_is_the_jobs_own(tmp_path: Path) -> None:
    """An image of it imports for seconds while ranks train; that was told as others' work."""
    reader = RankReader(JobPaths(*[str(tmp_path)] * 3), 0, 0.0)
    with subprocess.Popen(
        [sys.executable, "-c", _KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdout is not None
        image = int(keeper.stdout.readline())
        reader.read_beat("a0-1", 1, 100.0, KeeperView(keeper.pid))
        since_s = measure_cpu(image)
        wait_until(lambda: measure_cpu(image) - since_s >= 1.0, "second of CPU time")
        used_s = measure_cpu(image) - since_s
        beat = reader.read_beat("a0-1", 2, 102.0, KeeperView(keeper.pid))
        assert keeper.stdin is not None
        keeper.stdin.close()
    assert beat.host is not None
    assert beat.host.own >= used_s / 2.0


def test_a_keeper_that_is_gone_uses_nothing(tmp_path: Path) -> None:
    reader = RankReader(JobPaths(*[str(tmp_path)] * 3), 0, 0.0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for now in (0.0, 1.0):
        beat = reader.read_beat("a0-1", 1, now, KeeperView(gone.pid))
    assert beat.host is not None
    assert beat.host.own < (os.cpu_count() or 1)
