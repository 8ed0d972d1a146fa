"""The kit's harness, on the CPU: nothing here says anything about a GPU."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.sweep import read_stat

from tests.gpu import kit
from tests.gpu.kit import EXPERIMENTS, PART_S, PROBE_S, ROOT, Experiment
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

FAILS = "def run(trial):\n    trial.check(True, '')\n    trial.check(1 == 2, 'one is not two')\n"
ENDS = "import os\ndef run(trial):\n    trial.note(seen=3)\n    os.kill(os.getpid(), 11)\n"
HANGS = """
import os, subprocess, time
def run(trial):
    left = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    trial.note(pid=left.pid)
    time.sleep(3600)
"""
FORGETS = "def run(trial):\n    trial.expect(2)\n    trial.passed()\n"
LONG = {"G19-exact", "G19-elastic", "G19-shard", "G19-stages"}
"""Jobs of several generations or worlds: left to `make campaign`."""
PASSES = "def run(trial):\n    trial.check(True, '')\n"


def read_rows(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "gpu.json").read_text())["rows"]
    return rows


def check_dry(out: Path, names: set[str]) -> None:
    """Run these by the command; each has to pass, and to be called dry."""
    done = subprocess.run(
        [ROOT / "scripts" / "gpu.sh", "all", "--dry", "--out", out, "--only", ",".join(names)],
        env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True,
    )  # fmt: skip
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in out.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    rows = {row["name"]: row for row in read_rows(out)}
    assert set(rows) == names
    for row in rows.values():
        assert row["result"] == "ok", row
        assert row["dry"], "what a dry run has shown is called so"
        assert row["device"] == "cpu"
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == sorted(rows)


SHORT = sorted({one.name for one in EXPERIMENTS} - LONG)


FEW = {SHORT[0], SHORT[-1]}


def test_two_of_the_experiments_pass_dry(tmp_path: Path) -> None:
    check_dry(tmp_path, FEW)


@pytest.mark.long
def test_the_other_experiments_pass_dry(tmp_path: Path) -> None:
    check_dry(tmp_path, set(SHORT) - FEW)


@pytest.mark.long
def test_the_longer_experiments_pass_dry(tmp_path: Path) -> None:
    check_dry(tmp_path, LONG)


def test_a_name_chooses_all_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "trial_passes.py").write_text(PASSES)
    table = [Experiment(n, "trial_passes", 3, 20, "") for n in ("T1-a", "T1-b", "T10")]
    for asked, names in (("T1", ["T1-a", "T1-b"]), ("T1-b", ["T1-b"]), ("T10", ["T10"])):
        assert kit.main(["3", "--dry", "--out", str(tmp_path / asked), "--only", asked], table) == 0
        assert sorted(row["name"] for row in read_rows(tmp_path / asked)) == names
    with pytest.raises(SystemExit):
        kit.main(["3", "--dry", "--out", str(tmp_path), "--only", "T"], table)
    assert "this part has no T" in capsys.readouterr().err


def end_hangs_once_it_has_spoken(patch: pytest.MonkeyPatch) -> None:
    """Let the time of the trial `T-hangs` be over as soon as it has noted its process."""
    here, carry_out = threading.local(), kit.Kit._carry_out

    def watch(self: kit.Kit, one: Experiment, folder: Path, limit_s: float) -> str:
        here.folder = folder if one.name == "T-hangs" else None
        try:
            return carry_out(self, one, folder, limit_s)
        finally:
            here.folder = None

    def read_clock() -> float:
        folder = getattr(here, "folder", None)
        spoken = folder is not None and "pid" in kit.read_said(folder)["figures"]
        return time.monotonic() + (3600.0 if spoken else 0.0)

    patch.setattr(kit.Kit, "_carry_out", watch)
    patch.setattr(kit, "time", SimpleNamespace(monotonic=read_clock, sleep=time.sleep))


def test_one_that_fails_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    texts = {"fails": FAILS, "ends": ENDS, "hangs": HANGS, "forgets": FORGETS, "passes": PASSES}
    for name, text in texts.items():
        (tmp_path / f"trial_{name}.py").write_text(text)
    table = [Experiment(f"T-{n}", f"trial_{n}", 1, 20, "") for n in texts]
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        end_hangs_once_it_has_spoken(patch)
        assert kit.main(["1", "--dry", "--out", str(out)], table) == 1
    rows = {row["name"].removeprefix("T-"): row for row in read_rows(out)}
    results = {name: (row["result"], row["passed"], row["of"]) for name, row in rows.items()}
    assert results["fails"] == ("failed", 1, 2)
    assert rows["fails"]["reason"] == "AssertionError: one is not two"
    assert "SIGSEGV" in rows["ends"]["reason"]
    assert rows["ends"]["figures"] == {"seen": 3}
    assert results["hangs"][0] == "failed"
    assert "did not end within" in rows["hangs"]["reason"]
    assert not read_stat(rows["hangs"]["figures"]["pid"])[1], "what it had started is still there"
    assert rows["forgets"]["reason"] == "only 1 of 2 tries have passed"
    said = capsys.readouterr().out.splitlines()
    assert "T-fails failed 1/2 (dry): AssertionError: one is not two" in said
    assert kit.main(["1", "--dry", "--out", str(out), "--only", "T-passes"], table) == 0
    assert Counter(row["name"] for row in read_rows(out))["T-fails"] == 1, "older rows stay"
    assert read_rows(out)[-1]["result"] == "ok"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_kit_that_is_ended_ends_what_it_has_started(tmp_path: Path, number: int) -> None:
    """It had left jobs that went on for minutes, and their folders."""
    (tmp_path / "trial_hangs.py").write_text(HANGS)
    (tmp_path / "trial_passes.py").write_text(PASSES)
    out = tmp_path / "out"
    code = (
        "import sys; from tests.gpu.kit import Experiment, main\n"
        "table = [Experiment(f'T{n}', 'trial_hangs', 1, 200, '') for n in range(2)]\n"
        "table.append(Experiment('T2', 'trial_passes', 1, 200, ''))\n"
        f"sys.exit(main(['1', '--dry', '--out', {str(out)!r}], table))"
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "src"), str(ROOT)))
    }
    scratch = out / "scratch"
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: len(list(scratch.glob("*/said.json"))) == 2, "notes of two trials")
            left = [json.loads(said.read_text()) for said in scratch.glob("*/said.json")]
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 1
        finally:
            process.kill()
    assert not any(read_stat(each["figures"]["pid"])[1] for each in left)
    assert not list(scratch.iterdir())
    rows = {row["name"]: (row["result"], row["reason"]) for row in read_rows(out)}
    assert rows == dict.fromkeys(("T0", "T1"), ("failed", kit.ENDED))


def test_a_process_that_is_left_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import jobs as module

    monkeypatch.setattr(module, "FREE_S", 0.2)
    jobs = module.Jobs(kit.Trial(tmp_path, dry=True), 5.0)
    with pytest.raises(AssertionError, match="not seen"):
        jobs.check_held()
    env = os.environ | {"PERDURE_HOME": str(jobs.home / "state")}
    with subprocess.Popen(["sleep", "3600"], env=env) as left:
        jobs.check_held()
        with pytest.raises(AssertionError, match="1 are still held"):
            jobs.check_nothing_left()
        left.kill()
    monkeypatch.setattr(module, "FREE_S", PATIENCE_S)
    jobs.check_nothing_left()


@pytest.mark.long
def test_a_test_that_fails_or_is_skipped_counts_as_one_that_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu import g01_machine

    tests = tmp_path / "test_three.py"
    tests.write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    monkeypatch.setattr(g01_machine, "DRY_TESTS", (str(tests),))
    wrong = g01_machine.run_tests(kit.Trial(tmp_path, dry=True))
    assert wrong == ["test_fails: failure", "test_skipped: skipped"]
    said = kit.read_said(tmp_path)
    assert (said["passed"], said["of"]) == (1, 3)
    monkeypatch.setattr(g01_machine, "DRY_TESTS", (str(tests), "-k", "no_such_test"))
    assert g01_machine.run_tests(kit.Trial(tmp_path, dry=True)) == ["pytest has run no test"]
    tests.write_text("import time\ndef test_passes(): pass\ndef test_waits(): time.sleep(3600)\n")
    monkeypatch.setattr(g01_machine, "DRY_TESTS", (str(tests),))
    monkeypatch.setattr(g01_machine, "TESTS_S", 30.0)
    (tmp_path / "late").mkdir()
    wrong = g01_machine.run_tests(kit.Trial(tmp_path / "late", dry=True))
    assert "pytest ended with 2" in wrong
    assert not any("test_passes" in one for one in wrong)


def test_without_cuda_all_are_skipped(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu.sh", "all", "--out", tmp_path],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{one.name} skipped: no CUDA device here" for one in EXPERIMENTS
    ]
    assert {(row["result"], row["dry"]) for row in read_rows(tmp_path)} == {("skipped", False)}


def test_the_limits_of_a_part_fit_into_it() -> None:
    for part in (1, 2, 3):
        limits = [one.limit_s for one in EXPERIMENTS if one.part == part]
        assert sum(limits) <= PART_S - PROBE_S
