"""What a drill does to whom, from a seed; and the job that it runs in the user's place."""

import os
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.results import CARD

from perdure.cli.drill import locate_project, parse_budget
from perdure.drill.copies import CopiedRun, check_size, copy_project
from perdure.drill.here import sweep
from perdure.drill.isolation import (
    check_drillable,
    clean_environ,
    isolate,
    list_changes,
    list_writable,
)
from perdure.drill.place import NotMadeError
from perdure.drill.planning import FAULTS, Act, choose_lead, plan_acts
from perdure.drill.rehearsal import aim
from perdure.drill.screens import make_card_document, render_card
from perdure.drill.strikes import Target
from perdure.model.errors import ConfigError
from perdure.model.events import CheckpointSaved
from perdure.model.job import JobSpec
from perdure.model.report import RankRow, Snapshot
from perdure_lab.live.fleets.local import Gates


def test_the_same_seed_harms_the_same() -> None:
    names = list(FAULTS)
    acts, left_out = plan_acts(names, 3, nodes=2, nproc=4)
    assert (acts, left_out) == plan_acts(list(reversed(names)), 3, nodes=2, nproc=4)
    assert left_out == {}
    assert [act.fault for act in acts] == names
    (alone,), _ = plan_acts(["hang"], 3, nodes=2, nproc=4)
    assert alone == next(act for act in acts if act.fault == "hang")
    others = [plan_acts(names, seed, 2, 4)[0] for seed in range(20)]
    assert len({tuple(one) for one in others}) == 20
    assert {act.rank for one in others for act in one if act.fault == "crash"} > {0, 1, 2}
    assert all(act.rank // 4 == act.node for one in others for act in one if act.fault != "node")


def test_what_such_a_world_cannot_have_is_said() -> None:
    acts, left_out = plan_acts(list(FAULTS), 0, nodes=1, nproc=1)
    assert set(left_out) == {"node", "slow"}
    assert "--nodes 2" in left_out["node"]
    assert not {act.fault for act in acts} & set(left_out)
    acts, left_out = plan_acts(list(FAULTS), 0, nodes=2, nproc=1, python=False)
    assert set(left_out) == {"hang", "slow"}


def test_a_fault_is_some_steps_after_its_checkpoint() -> None:
    assert choose_lead(0.0, 0.0) == 3
    assert choose_lead(0.99, 0.1) == 6
    assert choose_lead(0.0, 100.0) == 50
    assert choose_lead(0.5, 100.0) == 150
    assert choose_lead(0.99, 1e6) < 1e6


def test_nothing_of_the_users_is_in_the_job_that_is_drilled(tmp_path: Path) -> None:
    document = {
        "checkpoint": {"url": "s3://bucket/run", "every_steps": 50},
        "nats": {"url": "nats://ours:4222"},
        "alerts": {"command": ["page-me"]},
        "metrics": {"prometheus_port": 9000},
        "tracking": {"wandb": "team/project"},
        "notify": {"webhook_port": 9001},
        "preemption": {"platform": "aws"},
        "restart": {"max_restarts": 7},
        "detect": {"node_lost_s": 4.0},
    }
    spec = msgspec.convert(
        document
        | {
            "name": "big", "script": "train.py", "cwd": "/home/u/proj", "log_dir": "/shared/logs",
            "nodes": 4, "remote": 3, "env": {"DATA": "/home/u/proj/data", "WANDB_API_KEY": "k"},
            "args": ["--out=/home/u/proj/out", "/home/u/project/x", "/mnt/home/u/proj"],
        },
        JobSpec,
    )  # fmt: skip
    copy, scratch = tmp_path / "copy", tmp_path
    mine = isolate(spec, "big-drill", Path("/home/u/proj"), copy, scratch)
    assert mine.args == (f"--out={copy}/out", "/home/u/project/x", "/mnt/home/u/proj")
    assert (mine.cwd, mine.env["DATA"]) == (str(copy), f"{copy}/data")
    assert (mine.env["WANDB_MODE"], mine.env["WANDB_API_KEY"]) == ("disabled", "")
    assert mine.env["MLFLOW_TRACKING_URI"] == f"file:{scratch}/mlruns"
    assert (mine.checkpoint.url, mine.checkpoint.every_steps) == ("", 50)
    assert mine.nats.url == ""
    assert (mine.alerts.command, mine.metrics.prometheus_port, mine.notify.webhook_port) == (
        (), 0, 0,
    )  # fmt: skip
    assert mine.tracking.targets == {}
    assert (mine.preemption.platform, mine.remote, mine.log_dir) == ("none", 0, "")
    assert (mine.restart.max_restarts, mine.detect.node_lost_s) == (7, 4.0)
    assert mine.detect.hang_action_s == 5.0
    told = " ".join(list_changes(spec))
    for word in ("hang_action_s = 5", "s3://bucket/run", "nats://ours:4222", "alerted", "emulated",
                 "no experiment tracker"):  # fmt: skip
        assert word in told
    assert list_changes(JobSpec(script="x.py", detect=mine.detect)) == []


def test_no_key_of_a_tracker_reaches_the_script(tmp_path: Path) -> None:
    environ = {"WANDB_API_KEY": "secret", "PATH": "/bin", "PERDURE_FAILPOINTS": "x"}
    cleaned = clean_environ(environ, tmp_path)
    assert "secret" not in cleaned.values()
    assert "PERDURE_FAILPOINTS" not in cleaned
    assert (cleaned["PATH"], cleaned["TMPDIR"]) == ("/bin", str(tmp_path))


def test_only_devices_and_caches_may_be_written_outside() -> None:
    spec = JobSpec(script="x.py", env={"HF_HOME": "/big/hf"})
    assert list_writable({"HOME": "/home/u"}, spec) == [
        "/dev", "/proc", "/home/u/.cache", "/home/u/.triton", "/home/u/.nv", "/big/hf",
    ]  # fmt: skip


def test_jobs_that_cannot_be_drilled_are_refused() -> None:
    with pytest.raises(ConfigError, match="observe = true"):
        check_drillable(JobSpec(script="x.py", observe=True))


def test_the_folder_that_is_copied(tmp_path: Path) -> None:
    """As `perdure run` finds the script from here, or else as `perdure launch` does."""
    project = tmp_path.resolve() / "project"
    (project / "src").mkdir(parents=True)
    (project / "train.py").touch()
    (project / "src" / "inner.py").touch()
    job = str(project / "job.toml")
    here = JobSpec(script="train.py", cwd=str(project))
    assert locate_project(here, job) == (here, project)
    far = JobSpec(script="train.py", cwd=str(tmp_path))
    assert locate_project(far, job) == (here, project)
    absolute = JobSpec(script=str(project / "train.py"), cwd=str(tmp_path))
    assert locate_project(absolute, job) == (here, project)
    inner = JobSpec(script="inner.py", cwd=str(project / "src"))
    assert locate_project(inner, job) == (inner, project)
    elsewhere = tmp_path / "jobs"
    elsewhere.mkdir()
    around = JobSpec(script="project/train.py", cwd=str(tmp_path.resolve()))
    assert locate_project(absolute, str(elsewhere / "job.toml")) == (around, tmp_path.resolve())


@pytest.mark.parametrize(
    ("text", "budget_s"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("60", 60)]
)
def test_budgets(text: str, budget_s: float) -> None:
    assert parse_budget(text) == budget_s


@pytest.mark.parametrize("text", ["", "soon", "10 minutes", "-5m", "1s", "nan"])
def test_no_budgets(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        parse_budget(text)


def test_what_killed_drills_have_left_is_removed(tmp_path: Path) -> None:
    folders, short = tmp_path / "drill", tmp_path / "short"
    host = platform.node()
    dead, living = folders / f"drill-{host}-999999999-x", folders / f"drill-{host}-{os.getpid()}-x"
    elsewhere = {folders / f"drill-{name}-999999999-x" for name in ("another", f"{host}-1")}
    for path in (dead / "home" / "jobs" / "job", living, *elsewhere, short / "drill-999999999-y"):
        path.mkdir(parents=True)
    sweep(folders, f"drill-{host}-")
    sweep(short, "drill-")
    assert (set(folders.iterdir()), set(short.iterdir())) == ({living, *elsewhere}, set())


def test_a_state_directory_in_the_project_is_not_copied_into_itself(tmp_path: Path) -> None:
    home = tmp_path / "state" / "perdure"
    (home / "jobs").mkdir(parents=True)
    (home / "jobs" / "big").write_bytes(bytes(1000))
    (tmp_path / "state" / "vocabulary").write_text("words")
    (tmp_path / "train.py").write_text("x")
    target = home / "drill" / "copy"
    assert check_size(tmp_path, "it", (home,)) == 6
    copy_project(tmp_path, target, (home,))
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*"))
    assert found == ["state", "state/vocabulary", "train.py"]


def make_row(rank: int, node: int, state: str = "running") -> RankRow:
    return RankRow(rank, node, 7, state, "step", 1, 1.0, "", 0.0, 0)


def make_snapshot(*ranks: RankRow) -> Snapshot:
    return Snapshot(
        version=1, job="mine", state="running", at_s=1.0, started_s=0.0, generation=0, restarts=0,
        step=9, steps_per_s=1.0, world_size=2, depth="elastic", reason="", ranks=ranks,
    )  # fmt: skip


def test_who_is_harmed_is_there() -> None:
    seen = make_snapshot(make_row(0, 0), make_row(1, 1, "exited"), make_row(2, 2))
    assert aim(Act("crash", 0, 0, 0.5), seen) == Act("crash", 0, 0, 0.5)
    assert aim(Act("crash", 1, 1, 0.5), seen) == Act("crash", 2, 2, 0.5)
    assert aim(Act("node", 0, 2, 0.5), seen).node == 2
    assert aim(Act("node", 0, 1, 0.5), seen).node in (0, 2)


def test_a_card_on_a_terminal_and_as_a_page() -> None:
    text = render_card(CARD, 100)
    assert text.startswith("gpt: FAILED (1 passed, 1 failed, 1 not tried); 2 ranks, seed 0")
    lines = text.splitlines()
    assert any(line.split()[:2] == ["crash", "passed"] and "0.71 s" in line for line in lines)
    assert any(line.startswith("stop") and "FAILED" in line and "WRONG" in line for line in lines)
    assert "not tried: the job has one node" in " ".join(text.split())
    assert "detect.hang_action_s = 5: why" in text
    assert all(len(line) <= 100 for line in lines)
    page = make_card_document(CARD).render_file()
    assert "&lt;SIGSTOP&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert CARD.exit_code == 1


def test_only_what_is_below_the_drills_own_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a rank that has just ended may be a stranger's."""
    monkeypatch.setattr(Target, "now", lambda self: 1.0)
    (tmp_path / "project").mkdir()
    run = CopiedRun(tmp_path, tmp_path / "project", "job", {})
    target = Target(run, tmp_path / "full", Gates(run.paths))
    with subprocess.Popen(["sleep", "60"]) as stranger, subprocess.Popen(["sleep", "60"]) as own:
        try:
            run.process = own
            seen = make_snapshot(msgspec.structs.replace(make_row(0, 0), pid=stranger.pid))
            with pytest.raises(NotMadeError, match="rank 0 has no process"):
                target.strike(Act("crash", 0, 0, 0.0), seen, -1)
            assert stranger.poll() is None
        finally:
            stranger.kill()
            own.kill()


def test_a_file_that_is_another_ones_as_well_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that keeps its best checkpoint by a hard link has one file under two names."""
    (tmp_path / "project").mkdir()
    run = CopiedRun(tmp_path, tmp_path / "project", "job", {})
    run.own = tmp_path / "own"
    newest = run.own / "step-00000002"
    newest.mkdir(parents=True)
    (tmp_path / "best.pt").write_text("the user's")
    os.link(tmp_path / "best.pt", newest / "rank-0.pt")
    saved = [
        SimpleNamespace(
            body=CheckpointSaved(
                generation=0,
                at_s=1.0,
                step=step,
                path=str(newest),
                bytes=10,
                stall_s=0.0,
                save_s=0.0,
            )
        )
        for step in (1, 2)
    ]
    monkeypatch.setattr(Target, "read", lambda self: saved)
    monkeypatch.setattr(Target, "_find_pid", lambda *_: pytest.fail("nobody is harmed"))
    target = Target(run, tmp_path / "full", Gates(run.paths))
    with pytest.raises(NotMadeError, match="alone"):
        target.strike(Act("torn", 0, 0, 0.0), make_snapshot(make_row(0, 0)), -1)
    assert (tmp_path / "best.pt").read_text() == "the user's"
