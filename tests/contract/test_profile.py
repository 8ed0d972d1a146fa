"""`perdure profile`: a script's own call measures; figures are those that were declared."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import perdure
from perdure.adapters.host import read_state
from perdure.model.planning.costs import read_profile
from tests.lab.network import Lab, why_not
from tests.waiting import PATIENCE_S, wait_until

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

first, last = nn.Linear(8, 8), nn.Linear(8, 8)
last.weight = first.weight
perdure.elastic.train(
    blocks=[first, Paced(), last], dataset=Data(),
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
        capture_output=True, text=True, timeout=PATIENCE_S,
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

    (shared,) = profile.shared
    assert (shared.blocks, shared.parameter_bytes, shared.gradient_bytes) == ((0, 2), 256, 256)
    assert profile.blocks[2].parameter_bytes == 256 + 32

    code, report, said = run_profile(tmp_path, "--ranks", "2", script)
    assert (code, report["measured"]) == (0, [])


@pytest.mark.long
@pytest.mark.serial  # A lab is built beside no other, and figures of its links are compared.
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_links_between_nodes_are_those_of_the_network(tmp_path: Path) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "kept.json"
    script.write_text(SCRIPT)
    options = ["--ranks", "2", "--nnodes", "2", "--seconds", "0", "--json"]
    with Lab(2) as lab, contextlib.ExitStack() as stack:
        lab.slow_link(0, 1, 400)  # 50 MB/s, each way.
        lab.slow_link(1, 0, 400)
        where = f"{lab.addresses[0]}:29500"
        words = [sys.executable, "-m", "perdure", "profile", *options, "--rdzv-endpoint", where]
        nodes = []
        for number in (1, 0):  # Who comes first, waits.
            home = {**os.environ, "PERDURE_HOME": str(tmp_path / f"home-{number}")}
            command = ["ip", "netns", "exec", lab.space(number), *words, "-o", str(kept)]
            process = subprocess.Popen(
                [*command, str(script)], env=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            stack.callback(process.kill)
            nodes.append(process)
        (joined, _), (told, said) = (process.communicate(timeout=PATIENCE_S) for process in nodes)
    assert [process.returncode for process in nodes] == [0, 0], said
    assert json.loads(joined) == {"joined": where, "nodes": 2}
    assert json.loads(told)["measured"] == ["links between nodes", "blocks", "links"]
    profile = read_profile(kept.read_text(), "profile")
    within, between = (profile.estimate_transfer(place) for place in ("node", "cluster"))
    assert 0.6 * 50e6 <= between.bytes_per_s <= 1.1 * 50e6
    assert within.bytes_per_s > 4 * between.bytes_per_s
    sums = {(a.place, a.group_size): a.bytes_per_s for a in profile.all_reduces}
    assert sums["cluster", 2] < sums["node", 2] / 2
    plan = [sys.executable, "-m", "perdure", "plan", str(kept), "--devices", "2"]
    plan += ["--per-node", "1", "--global-batch", "8", "--memory", "1GB", "--json"]
    home = {**os.environ, "PERDURE_HOME": str(tmp_path)}
    done = subprocess.run(plan, env=home, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_nodes_have_to_know_where_they_meet(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "profile", "--nnodes", "2", str(script)],
        env={**os.environ, "PERDURE_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "where do the nodes meet" in done.stderr


def test_a_node_of_another_version_is_told_and_measures_nothing(tmp_path: Path) -> None:
    """It is played by a process of this machine whose perdure says that it is an older one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    held = socket.socket()  # Nobody else gets the port before the first node listens on it.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    words = ["profile", "--seconds", "0", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    env = {**os.environ, "PERDURE_HOME": str(tmp_path)}
    older = "import sys, perdure; perdure.__version__ = '0.0.9'; sys.argv[0] = 'links'; "
    older += "from perdure.worker.profiling.links import main; main(sys.argv[1:])"
    with held, subprocess.Popen(
        [sys.executable, "-m", "perdure", *words, "--node-rank", "0", str(script)], env=env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as first:  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, "-c", older, "next", "2", "127.0.0.1", str(port), str(PATIENCE_S)],
                capture_output=True, text=True, timeout=PATIENCE_S,
            )  # fmt: skip
        finally:
            first.kill()
    assert done.returncode == 1
    assert f"links: 127.0.0.1:{port} has perdure {perdure.__version__}, torch" in done.stderr
    assert "and this machine perdure 0.0.9, torch" in done.stderr


def test_who_is_ended_leaves_neither_its_script_nor_its_folder(tmp_path: Path) -> None:
    script, room = tmp_path / "train.py", tmp_path / "room"
    room.mkdir()
    script.write_text(
        "import os, time\n"
        "open('pid.new', 'w').write(str(os.getpid()))\n"
        "os.rename('pid.new', 'pid')\n"
        "time.sleep(3600)\n"
    )
    words = [sys.executable, "-m", "perdure", "profile", str(script)]
    env = {**os.environ, "PERDURE_HOME": str(tmp_path / "state"), "TMPDIR": str(room)}
    for number in (signal.SIGTERM, signal.SIGKILL):
        (tmp_path / "pid").unlink(missing_ok=True)
        with subprocess.Popen(words, env=env, cwd=tmp_path, stderr=subprocess.PIPE) as process:
            wait_until((tmp_path / "pid").exists, "script")
            pid = int((tmp_path / "pid").read_text())
            process.send_signal(number)
            process.wait(PATIENCE_S)
        wait_until(lambda pid=pid: read_state(pid) in "XZ", "end of the script")
        if number == signal.SIGTERM:
            assert not list(room.iterdir())


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('begun', 'w')\n")
    words = [sys.executable, "-m", "perdure", "profile", "-o", "none/costs.json", str(script)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    assert "its folder cannot be written" in done.stderr
    assert not (tmp_path / "begun").exists()
