"""T16: what a healthy rank waits for a slow one is no work of its own, however busy its CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.worker.native.build import BuildError, build
from perdure.worker.ring import RingWriter
from tests.rings import read_stages
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("waiting_rank.py")
STEPS, SLOW_S = 60, 0.1


@pytest.mark.long
def test_no_wait_is_counted_as_work_on_a_busy_cpu(tmp_path: Path) -> None:
    """A future wakes whoever waits before it calls back: some ends were stamped too late."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"the compiled recorder cannot be built here: {error}")
    rings, processes = [], []
    for rank in range(3):
        rings.append(str(tmp_path / f"{rank}.ring"))
        RingWriter.create(rings[-1], rank=rank, generation=0).close()
        env = os.environ | {
            "RANK": str(rank), "PERDURE_RING": rings[-1], "OMP_NUM_THREADS": "1",
            "PERDURE_RECORDER": "compiled",
        }  # fmt: skip
        command = [sys.executable, str(SCRIPT), str(tmp_path / "store"), str(STEPS), str(SLOW_S)]
        processes.append(subprocess.Popen(command, env=env))
    try:
        assert [process.wait(timeout=PATIENCE_S) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank in (0, 2):
        steps = read_stages(rings[rank], 0.0)
        assert len(steps) >= STEPS / 2
        missed = [s.step for s in steps if s.backward_s > SLOW_S / 2 and s.wait_s < SLOW_S / 2]
        assert len(missed) <= 1, f"rank {rank}: waits of steps {missed} count as work"
