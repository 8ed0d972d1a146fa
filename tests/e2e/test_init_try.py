"""`perdure init --try`: a copy of the script runs, a rank is killed, and losses are compared."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.cli.adopting import scripts
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.long

BUDGET_S = 300
"""Some 25 s are spent where nobody else uses the machine."""
PACED = scripts.STEPS.replace("import torch\n", "import time\n\nimport torch\n", 1).replace(
    "        sched.step()\n", "        sched.step()\n        time.sleep(0.05)\n"
)
FORGETFUL = """\
import time

import torch
import torch.distributed as dist

import perdure

run = perdure.init()
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.register(model=model)  # And not the optimizer.
for step in run.steps(2000):
    x = torch.randn(8, 32)
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
    time.sleep(0.05)
"""
TRAINER = """\
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        time.sleep(0.02)
        row = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
training = TrainingArguments(
    output_dir="out", max_steps=400, per_device_train_batch_size=4, save_strategy="no",
    logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, ddp_backend="gloo",
)
trainer = Trainer(model=model, args=training, train_dataset=Tokens())
trainer.train()
"""


def try_script(folder: Path, budget_s: int = BUDGET_S) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the document of `perdure init --try`; nothing may be left."""
    temporary = folder / "tmp"
    temporary.mkdir()
    env = {**os.environ, "PERDURE_HOME": str(folder / "home"), "TMPDIR": str(temporary)}
    words = ["init", "train.py", "--try", "--budget", str(budget_s), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "perdure", *words],
        cwd=folder / "project", env=env, capture_output=True, text=True, timeout=2 * PATIENCE_S,
    )  # fmt: skip
    assert done.stdout, done.stderr
    assert list((folder / "home").rglob("*")) == []
    left = [p.pid for p in psutil.process_iter(["environ"])
            if str(temporary) in ((p.info["environ"] or {}).get("PERDURE_HOME") or "")]  # fmt: skip
    assert left == []
    document: dict[str, Any] = json.loads(done.stdout)
    (row,) = document["trial"]["rows"]
    assert (row["fault"], document["trial"]["passed"]) == ("crash", done.returncode == 0)
    return done.returncode, document | {"row": row}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def test_a_plain_script_goes_on_as_if_nothing_had_been(project: Path, tmp_path: Path) -> None:
    """It is a link, and writes beside itself: neither reaches what is the user's."""
    real = tmp_path / "real.py"
    real.write_text(PACED.replace("    dist.destroy", "    open('out', 'w')\n    dist.destroy"))
    (project / "train.py").symlink_to(real)
    before = real.read_bytes()
    code, document = try_script(tmp_path)
    row = document["row"]
    assert (row["verdict"], row["losses"], code) == ("passed", "equal", 0), document
    assert row["culprit_right"]
    assert 0 <= row["steps_redone"] <= row["step"]
    assert real.read_bytes() == before
    assert sorted(path.name for path in project.iterdir()) == ["job.toml", "train.py"]


def test_a_script_that_forgets_its_optimizer_is_found_out(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text(FORGETFUL)
    code, document = try_script(tmp_path)
    row = document["row"]
    assert (row["verdict"], row["losses"], code) == ("failed", "differ", 1), document


def test_a_script_that_fails_by_itself(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text(PACED.replace("    dist.destroy", "    fail()\n    dist.d")
                                      .replace("default=400", "default=0"))  # fmt: skip
    code, document = try_script(tmp_path)
    assert (document["row"]["verdict"], code) == ("not tried", 1)
    assert "NameError" in document["trial"]["reason"]


def test_a_script_without_steps_begins_again(project: Path, tmp_path: Path) -> None:
    loop = "    step = 0\n    while step < 20_000:\n        step += 1\n"
    (project / "train.py").write_text(PACED.replace("    for step in range(args.steps):\n", loop))
    code, document = try_script(tmp_path, 120)
    assert document["diff"] == ""
    assert not document["trial"]["declares_steps"]
    assert (document["row"]["verdict"], code) == ("failed", 1), document
    assert "step" in document["row"]["why"]


def test_hugging_face(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (project / "train.py").write_text(TRAINER)
    code, document = try_script(tmp_path)
    assert "perdure.huggingface.attach(trainer)" in document["diff"]
    row = document["row"]
    assert (row["verdict"], row["losses"], code) == ("passed", "equal", 0), document
