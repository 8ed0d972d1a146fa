"""A checkpoint that does not fit is tried once, and one line names what differs."""

from pathlib import Path

import pytest

from tests.e2e.exact import Start
from tests.e2e.harness import Job

pytestmark = pytest.mark.slow

_HEAD = """
import os, time, torch, perdure
from torch import nn
here = os.path.dirname(os.path.abspath(__file__)) + "/"
run = perdure.init()
first = not os.path.exists(here + "flag")
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
objects = dict(model=model, optimizer=optimizer)
class Own:
    def __init__(self, state): self.state = state
    def state_dict(self): return self.state
    def load_state_dict(self, state):
        for key in self.state: state[key]
"""
_LOOP = """
run.register(**objects)
for step in run.steps(100):
    loss = model(torch.ones(2, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step(); run.log(loss=loss.item())
    if step == 25 and first:
        open(here + "flag", "w").close()
        while not os.path.isdir(here + "saved/step-00000020"): time.sleep(0.01)
        os.kill(os.getpid(), 9)
"""
CHANGES = {
    "shape": (
        "objects['model'] = model if first else nn.Linear(8, 5)",
        "model 'model': the parameter weight has the shape [5, 8], and [4, 8] in the checkpoint",
    ),
    "parameter": (
        "objects['model'] = model if first else nn.Sequential(model)",
        "model 'model': the checkpoint has the parameter bias, and the script does not",
    ),
    "optimizer": (
        "if not first: objects['optimizer'] = torch.optim.Adam([model.weight, *nn.Linear(2, 2)"
        ".parameters()])",
        "optimizer 'optimizer': it steps group0.1, and did not when the checkpoint was made",
    ),
    "object": (
        "objects['own'] = Own({'a': 1} if first else {'a': 1, 'b': 2})",
        "object 'own': KeyError: 'b'",
    ),
}


@pytest.mark.parametrize(
    "change",
    [pytest.param(c, marks=() if c == "shape" else pytest.mark.long) for c in CHANGES],
)
def test_a_checkpoint_that_does_not_fit_is_tried_once(
    start: Start, tmp_path: Path, change: str
) -> None:
    line, said = CHANGES[change]
    job = run_script(start, tmp_path, line, code=1)
    ends = [t for t in job.text().splitlines() if t.startswith("u failed: ")]
    assert ends == [f"u failed: rank 0: step-00000020 does not fit the script: {said}"]
    assert "hint: run the script as it was" in job.text()
    assert len(job.report()["recoveries"]) == 2, "the kill, and the one try after it"


def test_a_state_that_no_checkpoint_keeps_is_refused_once(start: Start, tmp_path: Path) -> None:
    job = run_script(start, tmp_path, "objects['own'] = Own({'a': Own})", code=1)
    (said,) = [t for t in job.text().splitlines() if t.startswith("u failed: ")]
    assert "the state of own (Own) holds __main__.Own: nothing could be saved" in said
    assert "or set checkpoint.allow_pickle" in job.text()
    assert len(job.report()["recoveries"]) == 1, "one try"


@pytest.mark.long
def test_a_job_of_which_every_save_failed_leaves_with_3(start: Start, tmp_path: Path) -> None:
    """The state is plain before the first step, and is so no more."""
    line = "class Late(Own):\n    def state_dict(self): return [Own] if run.step else []\n"
    job = run_script(start, tmp_path, f"{line}objects['own'] = Late({{}}); first = False", code=3)
    (said,) = [t for t in job.text().splitlines() if t.startswith("u failed: ")]
    assert "and every checkpoint failed: " in said
    assert "the state of own holds __main__.Own" in said


def run_script(start: Start, folder: Path, line: str, *, code: int) -> Job:
    """Run a script with `line` before its objects are registered, until it leaves with `code`."""
    (folder / "train.py").write_text(_HEAD + line + _LOOP)
    (folder / "job.toml").write_text(f'[checkpoint]\nevery_steps = 10\nurl = "{folder}/saved"\n')
    job = start("u", "-n", "1", "-c", str(folder / "job.toml"), str(folder / "train.py"))
    assert job.wait() == code, job.text()
    return job
