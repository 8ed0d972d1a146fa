"""G10: the NCCL profiler plugin in two ranks of one GPU: its records, its cost, graphs' replays.

Passes where the file of each rank has every sum, with times of the GPU's clock unless only
collectives are asked for (PERDURE_NCCL_EVENTS=0x2), and there is none without the plugin. What a
sum takes each way, and whether replays are recorded, is noted: over sockets no cost is a real one.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from perdure.worker.native.build import build_nccl_plugin
from perdure.worker.ring import RingWriter
from tests.contract.one_gpu import NCCL_ON_ONE_GPU
from tests.gpu.kit import ROOT, Trial
from tests.gpu.plugin_rank import REPLAYS
from tests.nccl_files import read_nccl

RANKS = 2
LIMIT_S = 30.0
COLLECTIVES = "0x2"


def run(trial: Trial) -> None:
    count, plugin = trial.choose(200, 50), build_nccl_plugin()
    ways = {"off": ("none", ""), "on": (plugin, ""), "collectives": (plugin, COLLECTIVES)}
    costs: dict[str, float] = {}
    for name, (library, events) in ways.items():
        folder = trial.folder / name
        folder.mkdir()
        said = run_ranks(trial, folder, library, events, count)
        costs[name] = said[0]["sum_s"]
        for rank in range(RANKS):
            check_file(trial, name, str(folder / f"g0-r{rank}.ring"), count)
        if name != "off":
            before, after = said[0]["before"], said[0]["after"]
            seen = {key: after.get(key, 0) - before.get(key, 0) for key in ("ops", "kernels")}
            how = {"replays": REPLAYS, "recorded": seen, "error": said[0]["error"]}
            trial.note(**{f"replay_{name}": how})
    trial.note(sum_s={name: round(seconds, 7) for name, seconds in costs.items()})
    trial.took(costs["on"])


def run_ranks(
    trial: Trial, folder: Path, plugin: str, events: str, count: int
) -> list[dict[str, Any]]:
    """Return what each rank has said; all have to end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(RANKS):
        ring = str(folder / f"g0-r{rank}.ring")
        RingWriter.create(ring, rank=rank, generation=0).close()
        env = os.environ | NCCL_ON_ONE_GPU | {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PERDURE_RING": ring}
        env |= {"NCCL_PROFILER_PLUGIN": plugin} | (
            {"PERDURE_NCCL_EVENTS": events} if events else {}
        )
        command = [sys.executable, "-m", "tests.gpu.plugin_rank", trial.device, str(count)]
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE))
    try:
        outs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0] * RANKS, f"the ranks ended with {codes}"
    return [json.loads(out.splitlines()[-1]) for out in outs]


def check_file(trial: Trial, name: str, ring: str, count: int) -> None:
    """See what the plugin has written."""
    reading = read_nccl(ring, 0.0)
    if name == "off":
        trial.check(reading is None, "there is a file without the plugin")
        return
    assert reading is not None, f"{name}: there is no file"
    reduces = [op for op in reading.ops if op.op == "AllReduce"]
    trial.check(len(reduces) >= count, f"{name}: {len(reduces)} of {count} sums are there")
    timed = [op for op in reduces if op.gpu_stop_ns > op.gpu_start_ns > 0]
    trial.note(**{f"file_{name}": {"api": reading.api, "sums": len(reduces), "timed": len(timed)}})
    if name == "on":
        trial.check(len(timed) >= count, f"only {len(timed)} sums have times of the GPU")
    else:
        trial.check(not timed, "kernels are timed though nobody asked for them")
