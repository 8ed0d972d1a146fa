"""Steady overhead: cost per event times count, and toggling inside one process.

Supervised: the recorder's poll and its CPU share; resumable: what `run.steps()` costs a step.
Both as a fraction of a step of the GPT example. Prints one JSON document.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent

CHILD = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import perdure
torch.set_num_threads(1)
run = perdure.init()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
model = DistributedDataParallel(net, bucket_cap_mb=2)
opt = torch.optim.AdamW(model.parameters())
run.register(model=model, optimizer=opt)
x = torch.randn(64, 512)
def train():
    opt.zero_grad(); model(x).square().mean().backward(); opt.step()
for _ in range(20): train()
blocks, size = 40, 25
inside, outside = [], []
steps = iter(run.steps(blocks * size // 2))
for block in range(blocks):
    t = time.perf_counter()
    if block % 2:
        for _ in range(size): next(steps); train()
        inside.append((time.perf_counter() - t) / size)
    else:
        for _ in range(size): train()
        outside.append((time.perf_counter() - t) / size)
if rank == 0:
    json.dump({"inside": inside, "outside": outside}, open(sys.argv[1], "w"))
"""

EMPTY = """
import json, sys, time, perdure
run = perdure.init()
n, blocks = 20000, []
for block in range(6):
    t = time.perf_counter()
    for step in run.steps(n * (block + 1)): pass
    blocks.append((time.perf_counter() - t) / n)
# The first block of a process is slower by half: it is no steady cost.
json.dump({"per_step_s": sorted(blocks[1:])[2]}, open(sys.argv[1], "w"))
"""


def run_under_perdure(text: str, ranks: int, **more: str) -> dict[str, object]:
    """Run a script of ours under `perdure run`; return what it wrote, and the CPU shares."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder) / "child.py", Path(folder) / "out.json"
        script.write_text(text)
        env = dict(os.environ, PERDURE_HOME=folder, **more)
        subprocess.run(
            [sys.executable, "-m", "perdure", "run", "-n", str(ranks), "--name", "bench"]
            + [str(script), str(out)],
            env=env, check=True, timeout=600, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        document: dict[str, object] = json.loads(out.read_text())
        return document


def main() -> None:
    """Measure and print."""
    toggled = run_under_perdure(CHILD, 2)
    inside, outside = toggled["inside"], toggled["outside"]
    assert isinstance(inside, list)
    assert isinstance(outside, list)
    differences = [a - b for a, b in zip(inside, outside, strict=True)]
    halves = [a - b for a, b in zip(outside[::2], outside[1::2], strict=False)]
    step_s = statistics.median(outside)
    spread = statistics.stdev(halves) / max(1, len(halves)) ** 0.5
    difference = statistics.median(differences)
    per_step_s = run_under_perdure(EMPTY, 1)["per_step_s"]
    assert isinstance(per_step_s, float)
    bare_s = run_under_perdure(EMPTY, 1, PERDURE_STAGES="off")["per_step_s"]
    assert isinstance(bare_s, float)
    result = {
        "step_s": round(step_s, 5),
        "run.steps per step, empty body, us": round(per_step_s * 1e6, 2),
        "of these without stages, us": round(bare_s * 1e6, 2),
        "fraction of this step": round(per_step_s / step_s, 6),
        "toggled difference, fraction": round(difference / step_s, 5),
        "A/A standard error, fraction": round(spread / step_s, 5),
        "resolved": abs(difference) > 2 * spread,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sweep_after_me()
    main()
