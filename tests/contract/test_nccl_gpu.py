"""A real NCCL loads the plugin. One GPU shows that it does; two show what it records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.worker.native.build import build_nccl_plugin
from perdure.worker.ring import RingWriter
from tests.nccl_files import read_nccl
from tests.waiting import PATIENCE_S

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RANK = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
tensor = torch.ones(1 << 20, device="cuda")
for _ in range(10):
    dist.all_reduce(tensor)
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def test_real_nccl_fills_the_file(tmp_path: Path) -> None:
    plugin = build_nccl_plugin()
    size = min(2, torch.cuda.device_count())
    ranks = []
    for rank in range(size):
        ring = tmp_path / f"g0-r{rank}.ring"
        RingWriter.create(str(ring), rank=rank, generation=0).close()
        world = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        world |= {"MASTER_PORT": "29791", "PERDURE_RING": str(ring)}
        world |= {"NCCL_PROFILER_PLUGIN": plugin, "NCCL_DEBUG": "INFO"}
        command = [sys.executable, "-c", RANK]
        ranks.append(subprocess.Popen(command, env=os.environ | world, stdout=subprocess.PIPE))
    logs = [rank.communicate(timeout=PATIENCE_S)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, logs
    for rank in range(size):
        reading = read_nccl(str(tmp_path / f"g0-r{rank}.ring"), 0.0)
        assert reading is not None, logs[rank]
        (comm,) = [comm for comm in reading.comms if comm.num_ranks == size]
        assert comm.rank == rank
        assert comm.closed_s > 0
        print(json.dumps({"api": reading.api, "ops": len(reading.ops)}))
        if size < 2:
            continue  # NCCL copies for a lone rank, and calls nothing.
        reduces = [op for op in reading.ops if op.op == "AllReduce"]
        assert len(reduces) >= 10
        assert all(op.ended and op.bytes == 4 << 20 and op.algo for op in reduces)
        assert all(op.gpu_stop_ns > op.gpu_start_ns > 0 for op in reduces)
