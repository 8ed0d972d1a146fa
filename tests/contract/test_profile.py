"""`perdure profile`: a script's own call measures; figures are those that were declared."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from perdure.model.planning.costs import read_profile

SCRIPT = '''
import time
import torch
from torch import nn
import perdure.elastic

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None

class Paced(nn.Module):
    """Sleeps 5 ms forward, 10 ms for its input's gradient, 15 ms for its weight's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, value):
        value = Sleep.apply(value, 0.005, 0.010)
        return torch.tanh(value @ Sleep.apply(self.weight, 0.0, 0.015))

class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index)), torch.zeros(8)

perdure.elastic.train(
    blocks=[nn.Linear(8, 8), Paced(), nn.Linear(8, 8)], dataset=Data(),
    loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.Adam(p),
    global_batch=8, micro_batch=4, steps=1,
)
print("trained")
'''


def run_profile(folder: Path, *args: str) -> tuple[int, dict[str, Any], str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "profile", "--json", "--seconds", "0", *args],
        env={**os.environ, "PERDURE_HOME": str(folder)},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_a_script_is_measured_once(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    code, report, said = run_profile(tmp_path, "--ranks", "2", script)
    assert code == 0, said
    assert report["measured"] == ["blocks", "links"]
    assert "trained" not in said
    profile = read_profile(Path(report["path"]).read_text(), "profile")
    assert profile.micro_batches == (2, 4, 8)
    assert [a.group_size for a in profile.all_reduces] == [2]
    paced = profile.blocks[1]
    cost = paced.costs[4]
    assert min(cost.forward_s, cost.recompute_s) >= 0.005
    assert cost.backward_s >= 0.025
    assert cost.weight_s is not None
    assert 0.015 <= cost.weight_s <= cost.backward_s
    assert cost.input_bytes == 4 * 8 * 4
    assert cost.stored_bytes == 2 * 4 * 8 * 4  # its input and tanh's result
    assert (paced.parameter_bytes, paced.gradient_bytes) == (256, 256)
    assert 512 <= paced.optimizer_bytes <= 520  # two moments, and the count of steps

    code, report, said = run_profile(tmp_path, "--ranks", "2", script)
    assert (code, report["measured"]) == (0, [])
