"""`perdure drill`: a copy of a user's own job is really harmed, and its card tells the truth."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.adapters.confinement import can_confine
from perdure.cli.page.results import Results
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock"),
]

TRAIN = """\
import os, sys, time
import torch
import torch.distributed as dist
import perdure

run = perdure.init()
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(32, 1)
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.register(model=model, optimizer=optimizer)
for step in run.steps(STEPS):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.log(loss=loss.item())
    # more
    time.sleep(0.03)
"""


class Drill:
    """A project, and the command over it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.project, self.home = folder, folder / "project", folder / "home"
        self.project.mkdir()
        self.short = Path(f"/tmp/perdure-{os.getuid()}")

    def write(self, script: str, steps: int = 20_000, **job: Any) -> None:
        """Write the script and its job file."""
        (self.project / "train.py").write_text(script.replace("STEPS", str(steps)))
        document = {"name": "mine", "script": "train.py", "nproc": 1} | job
        (self.project / "job.json").write_text(json.dumps(document))

    def start(self, *options: str) -> "subprocess.Popen[str]":
        words = ["drill", "job.json", "--yes", "--json", *options]
        return subprocess.Popen(
            [sys.executable, "-m", "perdure", *words], cwd=self.project, text=True,
            env={**os.environ, "PERDURE_HOME": str(self.home), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Return the exit code and the card; nothing may be left."""
        with self.start(*options) as process:
            out, err = process.communicate(timeout=2 * PATIENCE_S)
        assert out, err
        self.check_nothing_left()
        card: dict[str, Any] = json.loads(out)
        card["by"] = {row["fault"]: row for row in card.get("rows", ())}
        return process.returncode, card

    def list_left(self) -> list[str]:
        """Return processes of drills of this project, and what is on disks."""
        found = [str(path) for path in self.home.glob("drill/*")]
        for process in psutil.process_iter():
            try:
                words = [*process.cmdline(), *process.environ().values()]
            except psutil.Error:
                continue
            if any(str(self.home) in word for word in words):
                found.append(" ".join(process.cmdline()))
        return found

    def check_nothing_left(self) -> None:
        wait_until(lambda: not self.list_left(), f"end of {self.list_left()}")


@pytest.fixture
def drill(tmp_path: Path) -> Drill:
    return Drill(tmp_path)


def test_a_rank_is_killed_and_losses_are_as_if_nothing_had_been(drill: Drill) -> None:
    drill.write(TRAIN)
    before = sorted(path.name for path in drill.project.iterdir())
    code, card = drill.run("--fault", "crash", "--fault", "slow", "--budget", "20m")
    row = card["by"]["crash"]
    assert (row["verdict"], row["losses"], row["culprit_right"]) == ("passed", "equal", True), card
    assert row["found_as"] == "signal 9 (SIGKILL) of rank 0"
    assert row["back_s"] > 0
    assert 0 <= row["steps_redone"] <= row["step"]
    assert card["by"]["slow"]["verdict"] == "not tried"
    assert "no peers" in card["by"]["slow"]["why"]
    assert (card["passed"], code) == (True, 0)
    assert sorted(path.name for path in drill.project.iterdir()) == before
    (listed,) = Results(str(drill.home)).look().rows["drill"]
    assert (listed.title, listed.state) == ("mine", "passed")


@pytest.mark.long
def test_all_faults_of_a_job_of_two_nodes(drill: Drill) -> None:
    drill.write(TRAIN, nodes=2, detect={"node_lost_s": 4.0})
    code, card = drill.run("--budget", "20m", "--html", "card.html")
    verdicts = {name: row["verdict"] for name, row in card["by"].items()}
    slow = verdicts.pop("slow")  # Other work on the machine hides it.
    assert slow in ("passed", "not tried"), card["by"]["slow"]
    assert verdicts == dict.fromkeys(verdicts, "passed"), card
    assert set(verdicts) == {"crash", "stop", "hang", "node", "torn", "disk", "controller", "bus"}
    assert code == 0
    assert all(row["losses"] == "equal" for row in card["rows"] if row["verdict"] == "passed"), card
    assert card["by"]["disk"]["steps_redone"] == card["by"]["bus"]["steps_redone"] == 0
    assert "drill of mine" in (drill.project / "card.html").read_text()


@pytest.mark.long
def test_a_job_that_may_not_restart_fails_its_drill(drill: Drill) -> None:
    """And begins anew for the fault that is left."""
    drill.write(TRAIN, restart={"max_restarts": 0})
    code, card = drill.run("--fault", "crash", "--fault", "controller", "--budget", "20m")
    row = card["by"]["crash"]
    assert (row["verdict"], row["back_s"]) == ("failed", None), card
    assert "the job ended, failed" in row["why"]
    assert card["by"]["controller"]["verdict"] == "passed", card
    assert (card["starts"], card["passed"], code) == (2, False, 1)


@pytest.mark.long
def test_a_script_that_forgets_its_optimizer_fails_its_drill(drill: Drill) -> None:
    drill.write(TRAIN.replace(", optimizer=optimizer", ""))
    code, card = drill.run("--fault", "crash", "--budget", "20m")
    row = card["by"]["crash"]
    assert (row["verdict"], row["losses"], code) == ("failed", "differ", 1), card
    assert "undisturbed" in row["losses_why"]


@pytest.mark.long
def test_a_script_that_is_not_seeded_is_not_compared(drill: Drill) -> None:
    drill.write(TRAIN.replace("torch.manual_seed(1)", "torch.seed()"))
    code, card = drill.run("--fault", "crash", "--budget", "20m")
    row = card["by"]["crash"]
    assert (row["verdict"], row["losses"], code) == ("passed", "not compared", 0), card
    assert "does not repeat itself" in row["losses_why"]


@pytest.mark.long
def test_a_script_that_ends_too_early_is_not_tried(drill: Drill) -> None:
    drill.write(TRAIN, steps=5)
    code, card = drill.run("--fault", "crash", "--fault", "bus", "--budget", "20m")
    assert {row["verdict"] for row in card["rows"]} == {"not tried"}, card
    assert "ended by itself" in card["reason"]
    assert code == 1


@pytest.mark.long
def test_a_script_without_steps_begins_again_from_its_start(drill: Drill) -> None:
    drill.write(
        "import time\nfor step in range(100_000):\n"
        "    print(f'step {step} loss {1 / (step + 1):.4f}', flush=True)\n    time.sleep(0.05)\n",
    )
    code, card = drill.run("--fault", "crash", "--fault", "disk", "--budget", "20m")
    row = card["by"]["crash"]
    assert (row["verdict"], row["culprit_right"], row["steps_redone"]) == ("failed", True, None), (
        card
    )
    assert "began again from its start" in row["why"]
    assert "declares no steps" in card["by"]["disk"]["why"]
    assert code == 1


@pytest.mark.long
def test_what_is_the_users_is_not_written(drill: Drill) -> None:
    """A shared folder is refused by the kernel; one in the project is the copy's."""
    shared, own = drill.folder / "shared", drill.project / "out"
    for folder in (shared, own):
        folder.mkdir()
        (folder / "last.pt").write_text("precious")
    saves = "    open(sys.argv[1] + '/last.pt', 'w').write('of a drill')\n"
    script = TRAIN.replace("    # more\n", saves)
    drill.write(script, args=[str(shared)])
    code, card = drill.run("--fault", "crash", "--budget", "20m")
    assert code == 1
    assert "Permission denied" in card["reason"]
    assert "--writable" in card["reason"]
    drill.write(script, args=[str(own)])
    code, card = drill.run("--fault", "crash", "--budget", "20m")
    assert (card["by"]["crash"]["verdict"], code) == ("passed", 0), card
    assert [(folder / "last.pt").read_text() for folder in (shared, own)] == ["precious"] * 2
    drill.write(script, args=[str(shared)])
    code, card = drill.run("--fault", "crash", "--budget", "20m", "--writable", str(shared))
    assert code == 0, card
    assert (shared / "last.pt").read_text() == "of a drill"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_drill_that_is_ended_leaves_nothing(drill: Drill, number: signal.Signals) -> None:
    """Or the next one finds it: of a drill that was killed there are no processes, but files."""
    drill.write(TRAIN)
    with drill.start("--fault", "crash", "--fault", "stop", "--budget", "20m") as process:
        assert process.stderr is not None
        assert any("drill: crash: passed" in line for line in process.stderr)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        drill.check_nothing_left()
        return
    wait_until(
        lambda: not any("perdure" in left for left in drill.list_left()[1:]), "end of its processes"
    )
    (left,) = drill.list_left()
    assert f"-{process.pid}-" in left
    sockets = {p for p in drill.short.iterdir() if p.name.startswith(f"drill-{process.pid}-")}
    assert sockets
    drill.write(TRAIN, steps=3)
    drill.run("--fault", "crash", "--budget", "20m")
    assert not any(path.exists() for path in sockets)


def test_nothing_is_done_without_a_word(drill: Drill) -> None:
    drill.write(TRAIN)
    for options, code, what in (
        ((), 4, "not confirmed"),
        (("--fault", "flood"), 2, "no such fault"),
        (("--budget", "soon"), 2, "not a time"),
        (("--writable", "nowhere"), 2, "no such folder"),
    ):
        words = [sys.executable, "-m", "perdure", "drill", "job.json", "--json", *options]
        env = {**os.environ, "PERDURE_HOME": str(drill.home)}
        done = subprocess.run(words, cwd=drill.project, env=env, text=True, timeout=PATIENCE_S,
                              stdin=subprocess.DEVNULL, capture_output=True)  # fmt: skip
        assert (done.returncode, what in json.loads(done.stdout)["error"]) == (code, True), done
    words = [*words[:5], "--dry-run", "--json"]
    done = subprocess.run(words, cwd=drill.project, env=env, text=True, timeout=PATIENCE_S,
                          capture_output=True)  # fmt: skip
    plan = json.loads(done.stdout)
    assert [act["fault"] for act in plan["acts"]][:3] == ["crash", "stop", "hang"]
    assert set(plan["left_out"]) == {"node", "slow"}
    assert not (drill.home / "drill").exists()
