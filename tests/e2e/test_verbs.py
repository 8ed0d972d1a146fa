"""Drain, evict and restore on a real run, with the controller killed before its answer."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.exact import Start
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

STEPS = 100_000


def launch(start: Start, home: Path, name: str, *, step_s: float) -> Job:
    """Start two ranks on a node each, with a spare node."""
    (home / name).mkdir()
    spec = home / f"{name}.toml"
    script = SCRIPTS / "train_paced.py"
    args = ["--trail", str(home / name), "--steps", str(STEPS), "--step-s", str(step_s)]
    spec.write_text(f'script = "{script}"\nargs = {json.dumps(args)}\n')
    return start(name, "-n", "1", "--nodes", "2", "--spares", "1", "-c", str(spec))


def steps_made(home: Path, name: str) -> dict[int, Counter[int]]:
    """Return, by rank, how often each step was made."""
    made: dict[int, Counter[int]] = {}
    for rank in (0, 1):
        lines = (home / name / f"rank-{rank}.txt").read_text().splitlines()
        made[rank] = Counter(int(line.split()[0]) for line in lines if " " in line)
    return made


def ask(job: Job, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "perdure", *words, "--json"],
        env=job.env, cwd=job.home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate(timeout=PATIENCE_S)
    return json.loads(out)


def wait_for_entry(job: Job, word: str) -> None:
    """Wait until `word` is in the journal, and no longer than that takes."""
    deadline = time.monotonic() + PATIENCE_S
    while word not in (job.folder / "journal.jsonl").read_text():
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.005)


@pytest.mark.slow
def test_a_drain_is_whole_though_the_controller_dies_before_its_answer(
    start: Start, tmp_path: Path
) -> None:
    job = launch(start, tmp_path, "drained", step_s=1.5)
    job.wait_step(3)
    late = answer(ask(job, "node", "drain", "drained", "1", "--deadline", "0.1"))
    assert (late["exit_code"], "nothing was moved" in late["error"]) == (4, True), late
    dry = answer(ask(job, "node", "evict", "drained", "1", "--dry-run"))
    assert dry["moves"] == [{"node": 1, "to": 2, "ranks": [1]}]
    job.wait_step(job.state()["step"] + 2)
    assert job.state()["generation"] == 0
    asked = ask(job, "node", "drain", "drained", "rank:1", "--why", "fan")
    wait_for_entry(job, "NodeDraining")
    job.kill("perdure controller")
    told = answer(asked)
    assert told["ok"], told
    assert told["steps_lost"] == 0
    assert told["moves"] == [{"node": 1, "to": 2, "ranks": [1]}]
    again = answer(ask(job, "node", "drain", "drained", "node:1"))
    assert again.get("already") == ["node 1 is left and cordoned already"], again
    assert "cordoned" in job.cli("status", "drained", "--devices").stdout
    back = answer(ask(job, "node", "restore", "drained", "1"))
    assert back.get("ok"), back
    job.cli("stop", "drained")
    assert job.wait() == 0, job.text()
    events = job.cli("events", "drained").stdout
    assert "fan" in events
    made = steps_made(tmp_path, "drained")
    assert made[0] == made[1] == Counter(range(len(made[0]))), "each step is made once"


@pytest.mark.slow
@pytest.mark.long
def test_what_cannot_be_done_in_time_changes_nothing(start: Start, tmp_path: Path) -> None:
    job = launch(start, tmp_path, "late", step_s=1.5)
    job.wait_step(3)
    told = answer(ask(job, "node", "drain", "late", "1", "--deadline", "0.1"))
    assert told["exit_code"] == 4, told
    assert "nothing was moved" in told["error"]
    dry = answer(ask(job, "node", "evict", "late", "1", "--dry-run"))
    assert dry["moves"] == [{"node": 1, "to": 2, "ranks": [1]}]
    step = job.state()["step"]
    job.wait_step(step + 3)
    assert job.state()["generation"] == 0
    assert {row["state"] for row in job.state()["devices"]} == {"in use", "spare"}
    evicted = answer(ask(job, "node", "evict", "late", "1"))
    assert evicted["ok"], evicted
    job.cli("stop", "late", "--now")
    job.wait()
