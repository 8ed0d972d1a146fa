"""The gate and a real sshd: an unmodified script's weights, a colleague, a login (P1, P6)."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.box import Laptop, make_boxes, needs_sshd, read_json
from tests.waiting import wait_until

pytestmark = [pytest.mark.serial, pytest.mark.torch, needs_sshd]

SCRIPT = """\
import pathlib
import torch
model = torch.nn.Linear(4, 2)
for step in range(3):
    model(torch.randn(8, 4)).sum().backward()
pathlib.Path("checkpoints").mkdir(exist_ok=True)
torch.save(model.state_dict(), "checkpoints/best.pth")
"""
JOB = 'name = "plain"\nscript = "train.py"\n[launch]\nproject = "project"\n'
THEIRS = "import sys, torch; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Laptop]]:
    yield from make_boxes(tmp_path)


@pytest.mark.timeout(400)
def test_weights_that_an_unmodified_script_wrote_are_not_destroyed(
    make: Callable[..., Laptop],
) -> None:
    laptop = make()
    project = laptop.folder / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    (laptop.folder / "job.toml").write_text(JOB)
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.cli("attach", "plain")
    best = laptop.box.home / "perdure" / "plain" / "project" / "checkpoints" / "best.pth"
    assert best.exists()
    refused = laptop.cli("teardown", "plain", "--confirm", "plain", code=4).stderr
    assert "nothing was pulled" in refused

    assert "project/checkpoints: 1 files" in laptop.cli("pull", "plain", "pulled").stderr
    assert not (laptop.folder / "pulled" / "project" / "train.py").exists()
    assert laptop.ask("verify", "pulled")["tensors"] == 2
    later = best.with_name("later.pth")
    later.write_bytes(best.read_bytes())
    refused = laptop.cli("teardown", "plain", "--confirm", "plain", code=4).stderr
    assert "project/checkpoints/later.pth on the box is not what was pulled" in refused
    laptop.cli("pull", "plain", "pulled")
    assert laptop.ask("verify", "pulled")["tensors"] == 4

    words = ["ssh", "-F", str(laptop.ssh_config), laptop.box.name]
    theirs = subprocess.Popen([*words, f"exec {sys.executable} -c \"{THEIRS}\""],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    login = subprocess.Popen([*words[:1], "-tt", *words[1:], "sleep 300"],
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        assert theirs.stdout is not None
        assert theirs.stdout.readline() == b"ready\n"
        wait_until(
            lambda: (
                b"sleep 300"
                in b" ".join(" ".join(p.cmdline()).encode() for p in laptop.box.find_processes())
            ),
            "the login",
        )
        refused = laptop.cli("teardown", "plain", "--confirm", "plain", code=4).stderr
        assert f"({sys.executable} -c import sys, torch;" in refused
        assert "has torch in its memory" in refused
        assert "is logged in from 127.0.0.1 (pts/" in refused
        assert not Path(f"{laptop.stopped}-plain").exists()
    finally:
        theirs.communicate()
        login.kill()
        login.wait()
    laptop.cli("teardown", "plain", "--confirm", "plain", "--others-agree")
    assert Path(f"{laptop.stopped}-plain").exists()
    assert read_json(laptop.home / "launches" / "plain.json")["torn_down_s"] > 0
