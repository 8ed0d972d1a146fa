"""`perdure trace drive`: a user's own job under a trace, its nodes really killed and started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.cli.page.results import Results
from tests.e2e.harness import SCRIPTS
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

TRACE = "0,add,a\n0,add,b\n0,add,c\n4000,remove,b\n9000,add,b\n"
"""One of three nodes is lost, and comes back."""


def start(
    folder: Path, script: str, args: list[str], *options: str, trace: str = TRACE
) -> "subprocess.Popen[str]":
    """Write a job file and a trace, and start the command."""
    path, job = folder / "trace.csv", folder / "job.toml"
    path.write_text(trace)
    job.write_text(
        f'name = "mine"\nscript = "{SCRIPTS / script}"\nnodes = 3\nargs = {json.dumps(args)}\n'
    )
    return subprocess.Popen(
        [sys.executable, "-m", "perdure", "trace", "drive", str(path), str(job), "--json",
         *options],
        env=dict(os.environ, PERDURE_HOME=str(folder / "state")), cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the command's answer."""
    told, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, told + said
    answer: dict[str, Any] = json.loads(told)
    return answer


def drive(
    folder: Path, script: str, args: list[str], *options: str, trace: str = TRACE
) -> dict[str, Any]:
    """Start the command, and return its answer."""
    with start(folder, script, args, *options, trace=trace) as process:
        return finish(process)


def wait_played(process: "subprocess.Popen[str]") -> None:
    """Wait until the trace is played."""
    assert process.stderr is not None
    assert any("drive: drive" in line for line in process.stderr), "it plays"


def find_left(folder: Path) -> list[str]:
    """Return processes that have the state directory in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(folder / "state") in word for word in words):
            found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.long
def test_a_node_of_an_elastic_job_is_lost_and_comes_back(tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    args = ["--trail", str(trail), "--steps", "100000", "--pace-s", "0.05"]
    answer = drive(tmp_path, "elastic.py", args, "--duration", "60")
    (row,) = answer["systems"]
    lines = (trail / "rank-0.jsonl").read_text().splitlines()
    worlds = [tuple(json.loads(line)["world"]) for line in lines]
    first, without, (*old, new) = dict.fromkeys(worlds)
    assert (first, without, old) == ((0, 1, 2), (0, 2), [0, 2])
    assert new > 2, "a process that is back is another member"
    assert (answer["complete"], answer["ended"], answer["unit"]) == (True, "", "steps")
    assert (row["losses"], row["joins"]) == (1, 1)
    assert 0.3 < row["fraction_of_u1"] <= 1.1
    assert sum(row["ledger"].values()) == pytest.approx(1.0)
    assert set(answer["throughput"]) == {"1", "2", "3"}
    assert 1 in answer["assumed"]
    assert not find_left(tmp_path)
    results = Results(str(tmp_path / "state"))
    (listed,) = results.look().rows["drive"]
    assert listed.said.startswith(f"{row['system']} {row['fraction_of_u2']:.4f} of U2")
    assert answer["job"] in results.open(listed.name)[1].title


@pytest.mark.long
def test_a_node_that_stays_away_hides_no_step_of_the_others(tmp_path: Path) -> None:
    """Its last word stood for the job's step, also in `perdure status`, until it came back."""
    trail = tmp_path / "trail"
    args = ["--trail", str(trail), "--steps", "100000", "--pace-s", "0.05"]
    answer = drive(
        tmp_path, "elastic.py", args, "--duration", "24", trace=TRACE[: TRACE.index("9000")]
    )
    (row,) = answer["systems"]
    assert (row["losses"], row["joins"]) == (1, 0)
    assert row["steps_again"] == 0
    rows = [json.loads(line) for line in (trail / "rank-0.jsonl").read_text().splitlines()]
    without = [made for made in rows if made["world"] == [0, 2]]
    assert 0.5 * len(without) < row["committed"] <= len(rows)
    assert sum(row["ledger"].values()) == pytest.approx(1.0)
    assert row["ledger"]["useful"] > 0
    assert abs(row["ledger"]["unattributed"]) < 0.04
    assert answer["assumed"] == [1]


@pytest.mark.long
def test_a_drive_that_is_ended_tells_what_was_played_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "trail").mkdir()
    args = ["--trail", str(tmp_path / "trail"), "--steps", "100000", "--step-s", "0.1"]
    with start(tmp_path, "train_paced.py", args) as process:
        wait_played(process)
        process.terminate()
        answer = finish(process)
    assert (answer["complete"], answer["ended"]) == (False, "")
    assert not list((tmp_path / "state" / "replay").glob("drive-*"))
    assert not find_left(tmp_path)


@pytest.mark.long
def test_a_drive_whose_reader_is_gone_ends_its_job_all_the_same(tmp_path: Path) -> None:
    """`2>&1 | tee log`: Ctrl-C ends tee first."""
    (tmp_path / "trace.csv").write_text(TRACE)
    args = json.dumps(["--trail", str(tmp_path / "trail"), "--steps", "100000", "--step-s", "0.1"])
    (tmp_path / "job.toml").write_text(
        f'script = "{SCRIPTS / "train_paced.py"}"\nnodes = 3\nargs = {args}\n'
    )
    (tmp_path / "trail").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "perdure", "trace", "drive", "trace.csv", "job.toml"],
        env=dict(os.environ, PERDURE_HOME=str(tmp_path / "state")), cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert any("drive: start" in line for line in process.stdout)
        process.stdout.close()
        wait_until(lambda: list((tmp_path / "trail").iterdir()), "a rank")
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
    assert not find_left(tmp_path)


@pytest.mark.long
def test_a_job_that_ends_before_its_trace_is_told(tmp_path: Path) -> None:
    trail = str(tmp_path / "trail")
    args = ["--trail", trail, "--steps", "150", "--pace-s", "0.5", "--hold-at", "140"]
    with start(tmp_path, "elastic.py", args, "--duration", "3600") as process:
        wait_played(process)
        (tmp_path / "trail" / "hurry").touch()
        answer = finish(process)
    assert not answer["complete"]
    assert answer["ended"].startswith("done")
    assert not find_left(tmp_path)


def test_a_dry_run_says_what_is_done_when_and_starts_nothing(tmp_path: Path) -> None:
    answer = drive(tmp_path, "elastic.py", [], "--dry-run", "--notice", "2", "--speed", "2")
    assert answer["first"] == [0, 1, 2]
    assert answer["acts"] == [
        [0.0, "notice", [1], 2.0], [2.0, "leave", [1], 0.0], [4.5, "come", [1], 0.0],
    ]  # fmt: skip
    many = TRACE + "".join(f"9000,add,more{n}\n" for n in range(4))
    scaled = drive(tmp_path, "elastic.py", [], "--dry-run", trace=many)
    touched = {*scaled["first"], *(place for act in scaled["acts"] for place in act[2])}
    assert touched == {0, 1, 2}, "a trace of seven nodes, on a job of three"
    assert not (tmp_path / "state" / "jobs").exists()


@pytest.mark.long
def test_a_job_that_runs_loses_a_node_and_goes_on_with_all_of_them(tmp_path: Path) -> None:
    """Nobody drives it without a word of its owner's, and then nobody else meanwhile."""
    trail = tmp_path / "trail"
    (tmp_path / "trace.csv").write_text(TRACE)
    env = dict(os.environ, PERDURE_HOME=str(tmp_path / "state"))
    drive = [sys.executable, "-m", "perdure", "trace", "drive", "trace.csv", "mine", "--duration",
             "20", "--json"]  # fmt: skip

    def cli(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True,
                              timeout=PATIENCE_S, stdin=subprocess.DEVNULL)  # fmt: skip

    none = cli(*drive)
    assert (none.returncode, "unknown job `mine`" in none.stdout) == (2, True), none.stdout
    run = [sys.executable, "-m", "perdure", "run", "--name", "mine", "--nodes", "3", "--detach"]
    args = ["--trail", str(trail), "--steps", "100000", "--pace-s", "0.05"]
    assert cli(*run, str(SCRIPTS / "elastic.py"), *args).returncode == 0
    try:
        asked = cli(*drive)
        assert (asked.returncode, "name was not typed" in asked.stdout) == (4, True), asked.stdout
        done = cli(*drive, "--yes", "--notice", "1")
        assert done.returncode == 0, done.stdout + done.stderr
        (row,) = json.loads(done.stdout)["systems"]
        assert (row["losses"], row["joins"]) == (1, 1)
        lines = (trail / "rank-0.jsonl").read_text().splitlines()
        worlds = list(dict.fromkeys(tuple(json.loads(line)["world"]) for line in lines))
        assert worlds[:2] == [(0, 1, 2), (0, 2)]
        status = json.loads(cli(*run[:3], "status", "mine", "--json").stdout)
        assert status["state"] == "running"
        assert not (tmp_path / "state" / "jobs" / "mine" / "away").exists()
        stopped = cli(*drive, "--yes", "--duration", "3", "--stop")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        status = json.loads(cli(*run[:3], "status", "mine", "--json").stdout)
        assert status["state"] == "stopped", "a job that was told to stop"
    finally:
        cli(*run[:3], "stop", "mine", "--now")
    assert not find_left(tmp_path)


@pytest.mark.long
def test_varunas_way_is_launched_again_at_each_change_and_loses_what_was_not_saved(
    tmp_path: Path,
) -> None:
    """Beside perdure, on the same trace: torch's own pipelining, in another grid each time."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n0,add,b\n0,add,c\n0,add,d\n8000,remove,b\n8000,remove,c\n")
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "trace", "replay", str(trace), "--stages", "2",
         "--policy", "perdure,varuna", "--nodes-max", "4", "--duration", "24", "--pace-ms", "40",
         "--json"],
        env=dict(os.environ, PERDURE_HOME=str(tmp_path / "state")), cwd=tmp_path,
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    perdure, varuna = json.loads(done.stdout)["systems"]
    assert (perdure["system"], varuna["system"]) == ("perdure", "varuna")
    assert perdure["steps_again"] == 0 < varuna["steps_again"]
    assert varuna["committed"] < perdure["committed"]
    assert not find_left(tmp_path)
