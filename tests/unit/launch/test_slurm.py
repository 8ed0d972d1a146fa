"""Slurm without Slurm: the script, the lint, what its states mean, and what follows a run."""

from typing import Any

import pytest
from msgspec import structs

from perdure.launch.catalog import load_profile
from perdure.launch.platforms import Here
from perdure.launch.slurm import expand, render
from perdure.launch.slurm.chain import STUCK_RUNS, Run, decide
from perdure.launch.slurm.checks import check_cluster
from perdure.model.errors import ConfigError
from perdure.model.job import CheckpointConfig, JobSpec, LaunchConfig
from perdure.model.profile import Profile
from perdure.model.slurm import (
    SlurmRow,
    SlurmSection,
    explain_rows,
    find_job_id,
    join_tasks,
    parse_sacct,
    parse_scontrol,
    parse_time_limit,
    read_scontrol,
)

# In the form of `sacct -D -n -P` of Slurm 22.05; no accounting ran where this was written.
TIMEOUT = """\
12|TIMEOUT|0:0|0:0|2026-01-01T00:00:00|2026-01-01T00:02:00
12.batch|CANCELLED|0:9||2026-01-01T00:00:00|2026-01-01T00:02:05
"""
OOM_HIDDEN = """\
13|COMPLETED|0:0|0:125|2026-01-01T00:00:00|2026-01-01T00:02:00
13.batch|COMPLETED|0:0||2026-01-01T00:00:00|2026-01-01T00:02:00
13.0|OUT_OF_MEMORY|0:125||2026-01-01T00:00:00|2026-01-01T00:01:00
"""
NODE_FAIL_THEN_DONE = """\
14|NODE_FAIL|0:0|0:0|2026-01-01T00:00:00|2026-01-01T00:02:00
14.batch|CANCELLED|0:0||2026-01-01T00:00:00|2026-01-01T00:02:00
14|COMPLETED|0:0|0:0|2026-01-01T00:03:00|2026-01-01T00:09:00
14.batch|COMPLETED|0:0||2026-01-01T00:03:00|2026-01-01T00:09:00
"""
CANCELLED = "15|CANCELLED by 0|0:0|0:0|2026-01-01T00:00:00|2026-01-01T00:02:00\n"
FAILED = "16|FAILED|7:0|7:0|2026-01-01T00:00:00|2026-01-01T00:02:00\n"
PREEMPTED = "17|PREEMPTED|0:0|0:0|2026-01-01T00:00:00|2026-01-01T00:02:00\n"


def profile(**changes: Any) -> Profile:
    found = load_profile("slurm", "/nowhere").profile
    return structs.replace(found, slurm=SlurmSection(**changes))


def spec(**changes: Any) -> JobSpec:
    launch = LaunchConfig(project="/srv/proj", gpus=changes.pop("gpus", 0))
    return JobSpec(name="j", script="train.py", launch=launch, **changes)


def levels(found: Profile, job: JobSpec | None = None) -> list[tuple[str, str]]:
    plan = render(job or spec(), found)
    return [(f.level, f.trap) for f in plan.findings]


@pytest.mark.parametrize(
    ("text", "job", "state", "code"),
    [
        (TIMEOUT, "12", "time limit", 0),
        (OOM_HIDDEN, "13", "out of memory", 0),
        (NODE_FAIL_THEN_DONE, "14", "done", 0),
        ("".join(NODE_FAIL_THEN_DONE.splitlines(True)[:2]), "14", "node failed", 0),
        (CANCELLED, "15", "cancelled", 0),
        (FAILED, "16", "failed", 7),
        (PREEMPTED, "17", "preempted", 0),
        ("", "18", "unknown", 0),
    ],
)
def test_states_of_every_step_are_read(text: str, job: str, state: str, code: int) -> None:
    end = explain_rows(parse_sacct(text), job)
    assert (end.state, end.code) == (state, code)


def test_what_scontrol_tells() -> None:
    text = (
        "JobId=7 JobName=x JobState=PENDING Reason=BeginTime Requeue=1 Restarts=2 "
        "ExitCode=0:15 DerivedExitCode=0:0 BatchHost=n1\n"
    )
    row = read_scontrol(parse_scontrol(text))
    assert row is not None
    assert (row.restarts, row.nodes, row.signal) == (2, "n1", 15)
    assert explain_rows([row], "7").state == "waiting"
    assert read_scontrol(parse_scontrol("")) is None


def test_an_array_is_as_its_tasks_are() -> None:
    def task(number: int, state: str) -> SlurmRow:
        return SlurmRow(id=str(number), state=state)

    states = ("COMPLETED", "OUT_OF_MEMORY", "RUNNING", "PENDING")
    tasks = [task(number, state) for number, state in enumerate(states)]
    assert join_tasks(tasks).state == "running"
    assert join_tasks([*tasks[:2], tasks[3]]).state == "waiting"
    assert join_tasks(tasks[:2]).state == "out of memory"
    assert join_tasks(tasks[:1] * 3).state == "done"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("02:30", 150), ("1:00:00", 3600), ("2-0", 172800), ("1-01:00:30", 90030)],
)
def test_time_limits_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert parse_time_limit(text) == seconds


def test_a_time_limit_that_is_none() -> None:
    with pytest.raises(ConfigError, match="no time limit"):
        parse_time_limit("an hour")


def test_the_job_id_below_a_login_banner() -> None:
    assert find_job_id(["Welcome 2 n1", "", "4711;cluster"]) == "4711"
    assert find_job_id(["sbatch: error: 12"]) == ""


def test_the_script_asks_for_what_the_profile_says() -> None:
    found = profile(
        partition="gpu", mem="64G", array="0-3%2", dependency="afterok:9", warn_s=300,
        time_limit="04:00:00", modules=("cuda/12",), extra=("--exclude=n7",),
    )  # fmt: skip
    script = render(spec(nproc=4, gpus=4), found).files["job.sbatch"]
    lines = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    assert lines == [
        "--job-name=j", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=4",
        "--time=04:00:00", "--signal=B:USR1@300", "--requeue", "--open-mode=append",
        "--partition=gpu", "--mem=64G", "--array=0-3%2", "--gres=gpu:4",
        "--dependency=afterok:9", "--kill-on-invalid-dep=yes", "--exclude=n7",
        "--output=/srv/proj/slurm-j-%j.out",
    ]  # fmt: skip
    assert "module load cuda/12\n" in script
    assert script.index("trap 'touch") < script.index("perdure.launch.slurm.batch")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"time_limit": "1", "warn_s": 30}, ("error", "SLURM2")),
        ({"time_limit": "4", "warn_s": 120, "startup_s": 60}, ("error", "SLURM2")),
        ({"time_limit": "10", "warn_s": 61, "checkpoint_s": 10}, ("warning", "SLURM2")),
    ],
)
def test_a_walltime_without_room_is_found(changes: Any, expected: tuple[str, str]) -> None:
    assert expected in levels(profile(**changes))


def test_a_walltime_with_room_is_not() -> None:
    assert levels(profile(time_limit="5", warn_s=120, startup_s=60, checkpoint_s=30)) == []


def test_places_that_would_be_lost_or_shared_by_mistake() -> None:
    fleeting = spec(checkpoint=CheckpointConfig(url="$TMPDIR/x"))
    assert ("error", "SLURM5") in levels(profile(), fleeting)
    one_place = spec(checkpoint=CheckpointConfig(url="/scratch/x"))
    assert ("error", "") in levels(profile(array="0-3"), one_place)
    alone = structs.replace(profile(), shared_fs=False)
    with pytest.raises(ConfigError, match="shared file system"):
        render(spec(nodes=2), alone)


def test_words_that_would_be_shell_are_refused(tmp_path: Any) -> None:
    path = tmp_path / "p.toml"
    path.write_text('base = "slurm"\n[slurm]\npartition = "x; rm -rf /"\n')
    with pytest.raises(ConfigError, match="line 3"):
        load_profile(str(path), str(tmp_path))


def test_the_cluster_s_own_settings() -> None:
    quiet = {"PreemptType": "preempt/none", "AccountingStorageType": "accounting_storage/slurmdbd"}
    assert check_cluster(quiet) == []
    loud = {"JobRequeue": "0", "PreemptType": "preempt/qos", "AccountingStorageType": "x/none"}
    assert [f.trap for f in check_cluster(loud)] == ["SLURM2b", "SLURM2", "SLURM4"]


def test_variables_of_the_profile_s_places() -> None:
    here = Here(home="/h", environ={"USER": "eve", "HOME": "/home/eve"}, tell=lambda text: None)
    assert expand("/scratch/$USER/a/${HOME}x", here) == "/scratch/eve/a//home/evex"


def end(state: str = "stopped", checkpoint: int = 10, **changes: Any) -> Run:
    fields = {"job": "1", "restart": 0, "code": 0, "warned": True, **changes}
    return Run(state=state, checkpoint=checkpoint, **fields)


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (end(), "requeue"),
        (end("done"), "leave"),
        (end("failed", code=1), "leave"),
        (end("lost", code=137, warned=False), "leave"),
        (end(warned=False), "leave"),
        (end(ended_by="TERM"), "leave"),
        (end(restart=5), "give up"),
    ],
)
def test_what_follows_a_run(run: Run, what: str) -> None:
    assert decide(run, [], 5)[0] == what


def test_a_chain_that_gets_nowhere_is_ended() -> None:
    assert decide(end(), [end()] * (STUCK_RUNS - 2), 99)[0] == "requeue"
    assert decide(end(), [end()] * (STUCK_RUNS - 1), 99)[0] == "give up"
    assert decide(end(checkpoint=11), [end()] * (STUCK_RUNS - 1), 99)[0] == "requeue"
    preempted = [end(warned=False, ended_by="TERM")] * STUCK_RUNS
    assert decide(end(), preempted, 99)[0] == "requeue"
