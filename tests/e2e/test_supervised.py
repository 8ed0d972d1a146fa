"""Depth supervised: scripts that know nothing of perdure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.model.nccl import ELASTIC, SUPERVISED
from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]


def test_environment_is_torchruns_and_the_exit_code_is_passed_on_and_named(
    start: Start, tmp_path: Path
) -> None:
    script = (str(SCRIPTS / "env.py"), "17", str(tmp_path))
    job = start("env", "-n", "2", "--cold", "--max-restarts", "0", *script)
    assert job.wait() == 17, job.text()
    rows = [
        json.loads((job.folder / "logs" / "ranks" / "g0" / f"rank-{r}.out").read_text())
        for r in range(2)
    ]
    assert [row["RANK"] for row in rows] == ["0", "1"]
    assert {row["WORLD_SIZE"] for row in rows} == {"2"}
    assert {row["LOCAL_WORLD_SIZE"] for row in rows} == {"2"}
    assert {row["OMP_NUM_THREADS"] for row in rows} == {"1"}
    assert {row["TORCHELASTIC_RESTART_COUNT"] for row in rows} == {"0"}
    assert all(value is not None for row in rows for value in row.values()), rows
    assert "to standard error" in job.text()
    verdicts = json.loads(job.cli("diagnose", "env", "--json").stdout)["verdicts"]
    assert verdicts[0]["kind"] == "Crash"
    assert verdicts[0]["culprit"]["rank"] == 1


def test_nccl_is_told_what_the_depth_needs_and_the_users_value_stays(
    start: Start, tmp_path: Path
) -> None:
    script, config = tmp_path / "depths.py", tmp_path / "job.toml"
    script.write_text(
        "import json, os, torch\n"
        "def look(): print(json.dumps({k: v for k, v in os.environ.items() if 'NCCL_' in k}))\n"
        "look()\n"
        "import perdure.elastic\n"
        "model = torch.nn.Linear(2, 1)\n"
        "def compute(step, number): return model(torch.ones(1, 2)).sum()\n"
        "made = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "trainer = perdure.elastic.open_trainer(model, made, compute, micro_batches=2)\n"
        "for _ in trainer.steps(3): pass\n"
        "look()\n"
    )
    config.write_text('[env]\nTORCH_NCCL_RETHROW_CUDA_ERRORS = "1"\n')
    job = start("depths", "-n", "2", "-c", str(config), str(script))
    assert job.wait() == 0, job.text()
    for rank in range(2):
        rows = (job.folder / "logs" / "ranks" / "g0" / f"rank-{rank}.out").read_text()
        before, after = map(json.loads, rows.splitlines())
        assert before.items() >= SUPERVISED.items()
        assert after.items() >= (ELASTIC | {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}).items()
    assert "cannot recover over NCCL with TORCH_NCCL_RETHROW_CUDA_ERRORS=1" in job.text()


@pytest.mark.long
def test_exception_is_shown_with_its_traceback(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("def f():\n    raise ValueError('a bad value')\nf()\n")
    job = start("broken", "-n", "1", "--max-restarts", "0", str(script))
    assert job.wait() == 1
    verdicts = json.loads(job.cli("diagnose", "broken", "--json").stdout)["verdicts"]
    assert "ValueError: a bad value" in json.dumps(verdicts)
    text = (job.folder / "logs" / "ranks" / "g0" / "rank-0.err").read_text()
    assert text.splitlines()[0] == "Traceback (most recent call last):"
    assert "perdure" not in text


def test_import_error_is_not_retried(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    script.write_text("import a_module_that_is_not_there\n")
    job = start("imports", "-n", "2", "--cold", str(script))
    assert job.wait() == 1
    assert not (job.folder / "logs" / "ranks" / "g1").exists()
    assert "a_module_that_is_not_there" in job.text()


@pytest.mark.parametrize(("text", "where"), [("def f(:\n", "line 1"), (None, "no_such.py")])
def test_script_that_cannot_run_is_refused_at_once(
    start: Start, tmp_path: Path, text: str | None, where: str
) -> None:
    script = tmp_path / "no_such.py"
    if text is not None:
        script.write_text(text)
    job = start("refused", "-n", "2", str(script))
    assert job.wait() == 2
    assert where in job.text()
    assert "hint:" in job.text()


def test_a_killed_and_a_stopped_rank_are_named_and_the_world_restarts_warm(
    start: Start, tmp_path: Path
) -> None:
    job = start("harmed", "-n", "2", str(SCRIPTS / "train_counting.py"), str(tmp_path))
    kill_one_after_steps(job)
    job.wait_until(lambda: job.state()["restarts"] == 1, "another generation")
    job.wait_until(lambda: job.find("perdure rank harmed g1 r1"), "its ranks")
    job.wait_state("running")
    job.cli("inject", "harmed", "stop", "--rank", "1")
    job.wait_until(lambda: job.state()["restarts"] == 2, "a third generation")
    (tmp_path / "hurry").touch()
    assert job.wait() == 0, job.text()
    report = job.report()
    first, second = [row for row in report["recoveries"] if row["rung"] == "restart"]
    assert "SIGKILL" in first["cause"]
    assert (first["culprit"], second["culprit"]) == ("rank 1", "rank 1")
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.02, report["ledger"]
    verdicts = json.loads(job.cli("diagnose", "harmed", "--json").stdout)["verdicts"]
    # On a busy machine a rank may stand still before; that ends by itself.
    standing = [v for v in verdicts if "Hang" in v["kind"] and "withdrawn" not in v["evidence"]]
    assert [v["culprit"]["rank"] for v in standing] == [1], verdicts
    check_lost(job, "began again from its start: `iter 0` after")


@pytest.mark.long
def test_what_a_script_that_goes_on_by_itself_has_lost_is_not_called_useful(
    start: Start, tmp_path: Path
) -> None:
    script = [str(SCRIPTS / "train_counting.py"), str(tmp_path), "--keeps"]
    job = start("counting", "-n", "2", *script)
    kill_one_after_steps(job)
    (tmp_path / "hurry").touch()
    assert job.wait() == 0, job.text()
    check_lost(job, "went on by itself: `iter ")


def kill_one_after_steps(job: Job) -> None:
    """Kill rank 1, and wait until perdure says what the script lost."""
    job.wait_until(lambda: "iter 20:" in job.text(), "some steps")
    job.kill(f"perdure rank {job.name} g0 r1")
    job.wait_until(lambda: "warning: the script" in job.text(), "the warning")


def check_lost(job: Job, where: str) -> None:
    """What the script has lost is unknown, and is not called useful."""
    assert f"[perdure] warning: the script {where}" in job.text()
    assert job.report()["lost_unknown"]
    told = job.cli("report", job.name).stdout
    assert "goodput at most " in told
    assert "what was lost is unknown" in told
    assert where in told


def test_rank_that_leaves_early_is_a_verdict(start: Start) -> None:
    job = start(
        "early", "-n", "2", "--max-restarts", "0", str(SCRIPTS / "allreduce.py"), "--leave-early"
    )
    assert job.wait() != 0
    verdicts = json.loads(job.cli("diagnose", "early", "--json").stdout)["verdicts"]
    assert any(v["culprit"].get("rank") == 1 for v in verdicts), verdicts


@pytest.mark.long
def test_emulated_nodes(start: Start) -> None:
    job = start("nodes", "-n", "1", "--nodes", "2", str(SCRIPTS / "allreduce.py"), "--steps", "50")
    assert job.wait() == 0, job.text()
    devices = json.loads(job.cli("status", "nodes", "--devices", "--json").stdout)["devices"]
    assert [d["node"] for d in devices] == [0, 1]
