"""`exact` has three values, and each is shown where a person looks: status, report, log."""

from pathlib import Path

import pytest

from tests.e2e.exact import Start
from tests.e2e.harness import Job

pytestmark = pytest.mark.slow

_SCRIPT = """
import enum, os, sys, time, torch, perdure
from torch import nn
kind = sys.argv[1]
here = os.path.dirname(os.path.abspath(__file__)) + "/"
first = not os.path.exists(here + "go")
run = perdure.init()
torch.manual_seed(1)
class Part(nn.Linear):
    pass
class Factor:
    value = 1.0
class Phase(enum.Enum):
    WARM = 1
    HOT = 2
model, other, factor = Part(8, 4), nn.Linear(2, 2), 1.0
model.factor, model.phase = None, Phase.WARM
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.register(model=model, optimizer=optimizer)
if kind != "never taken" or first:
    run.register(other=other)
for step in run.steps(40):
    loss = (model(torch.randn(4, 8)) * factor).square().mean()
    if kind == "made late":
        model.factor = model.factor or Factor()
        model.factor.value *= 1.01
        loss = loss * model.factor.value
    if kind == "attribute":
        loss = loss * model.phase.value
        if step == 5:
            model.phase = Phase.HOT
    if kind == "not registered":
        factor *= 1.01
    if kind == "not seen":
        os.environ["FACTOR"] = str(float(os.environ.get("FACTOR", "1")) * 1.01)
        loss = loss * float(os.environ["FACTOR"])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    run.log(loss=loss.item(), speed=time.time())
    while step == 27 and first and not os.path.exists(here + "go"):
        run.log(mark=1.0)
        time.sleep(0.05)
    if step == 28 and first:
        while not os.path.isdir(here + "saved/step-00000020"): time.sleep(0.01)
        os.kill(os.getpid(), 9)
"""


def resume(start: Start, folder: Path, kind: str) -> Job:
    """Return a job that was killed at step 28, and has resumed at step 20 and ended."""
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "job.toml").write_text(f'[checkpoint]\nevery_steps = 10\nurl = "{folder}/saved"\n')
    job = start("x", "-n", "1", "-c", str(folder / "job.toml"), str(folder / "train.py"), kind)
    job.wait_until(lambda: job.state().get("metrics", {}).get("mark"), "the losses of step 27")
    unkept = kind in ("not registered", "made late")
    assert job.state()["exact"]["state"] == ("not" if unkept else "expected")
    (folder / "go").touch()
    assert job.wait() == 0, job.text()
    return job


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "state", "reason"),
    [
        ("all", "proved", "is the same to the last bit as before the resume at step 20"),
        pytest.param("not seen", "not", "the loss of step 20 was ", marks=LONG),
        pytest.param("attribute", "proved", "is the same to the last bit as before", marks=LONG),
        pytest.param("made late", "not", "what no checkpoint has: model.factor", marks=LONG),
        ("not registered", "not", "the script changes what no checkpoint has: factor"),
        pytest.param("never taken", "not", "and not registered: other", marks=LONG),
    ],
)
def test_exactness_is_shown_with_its_reason(
    start: Start, tmp_path: Path, kind: str, state: str, reason: str
) -> None:
    job = resume(start, tmp_path, kind)
    line = f"exact: {state}; "
    for text in (job.cli("status", "x").stdout, job.cli("report", "x").stdout, job.text()):
        (shown,) = [one for one in text.splitlines() if line in one]
        assert reason in " ".join(text.split()), shown
    for document in (job.state(), job.report()):
        assert document["exact"]["state"] == state
        assert reason in document["exact"]["reason"]
