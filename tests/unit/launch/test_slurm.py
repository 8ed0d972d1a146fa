"""Slurm without Slurm: the script, the lint, what its states mean, and what follows a run."""

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from perdure.launch.catalog import load_profile
from perdure.launch.platforms import Here
from perdure.launch.runs import STUCK_RUNS, Run, decide
from perdure.launch.slurm import render
from perdure.launch.slurm.batch import Chain
from perdure.launch.slurm.containers import Container, check_container
from perdure.launch.slurm.refusal import explain_partition
from perdure.launch.slurm.render import check_cluster, quote
from perdure.launch.slurm.size import Size, count_given
from perdure.launch.slurm.submit import expand
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import CheckpointConfig, JobSpec, LaunchConfig
from perdure.model.platforms.outcome import Outcome
from perdure.model.platforms.profile import LaunchSection, Profile
from perdure.model.platforms.slurm import (
    Allocation,
    SlurmRow,
    SlurmSection,
    count_nodes,
    explain_attempt,
    explain_attempts,
    explain_rows,
    fit_nodes,
    join_ends,
    list_tasks,
    parse_job_id,
    parse_sacct,
    parse_scontrol,
    parse_time_limit,
    read_allocation,
    read_scontrol,
)
from perdure.model.platforms.slurm_reasons import explain_refusal, is_silent

# What `sacct -D -n -P` of Slurm 22.05 with slurmdbd said of real jobs; the dates are shortened.
TIMEOUT = """\
3|TIMEOUT|0:0|0:0|00:27:58|00:29:08|n1
3.batch|CANCELLED|0:15||00:27:58|00:29:08|n1
"""
OOM_HIDDEN = """\
1|COMPLETED|0:0|0:125|00:27:58|00:27:58|n1
1.batch|COMPLETED|0:0||00:27:58|00:27:58|n1
1.0|OUT_OF_MEMORY|0:125||00:27:58|00:27:58|n1
"""
OOM = """\
2|OUT_OF_MEMORY|0:125|0:0|00:27:58|00:27:58|n1
2.batch|OUT_OF_MEMORY|0:125||00:27:58|00:27:58|n1
"""
NODE_FAIL = """\
7|NODE_FAIL|0:0|0:0|00:27:58|00:28:45|n2
7.batch|CANCELLED|||00:27:58|00:28:45|n2
7.0|CANCELLED|||00:27:58|00:28:45|n2
"""
PUT_BACK = NODE_FAIL + "7|PENDING|0:0|0:0|Unknown|Unknown|None assigned\n"
DONE_THEN = (
    NODE_FAIL
    + """\
7|COMPLETED|0:0|0:0|00:30:00|00:39:00|n1
7.batch|COMPLETED|0:0||00:30:00|00:39:00|n1
"""
)
CANCELLED = "15|CANCELLED by 0|0:0|0:0|00:00:00|00:02:00|n1\n"
FAILED = "4|FAILED|7:0|0:0|00:27:58|00:27:58|n1\n4.batch|FAILED|7:0||00:27:58|00:27:58|n1\n"
PREEMPTED = "17|PREEMPTED|0:0|0:0|00:00:00|00:02:00|n1\n"
ARRAY = """\
5_0|COMPLETED|0:0|0:0|00:27:58|00:27:58|n2
5_0.batch|COMPLETED|0:0||00:27:58|00:27:58|n2
5_1|FAILED|1:0|0:0|00:27:58|00:27:58|n2
5_1.batch|FAILED|1:0||00:27:58|00:27:58|n2
"""


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
        (TIMEOUT, "3", "time limit", 0),
        (OOM_HIDDEN, "1", "out of memory", 0),
        (OOM, "2", "out of memory", 0),
        (NODE_FAIL, "7", "node failed", 0),
        (PUT_BACK, "7", "waiting", 0),
        (DONE_THEN, "7", "done", 0),
        (CANCELLED, "15", "cancelled", 0),
        (FAILED, "4", "failed", 7),
        (PREEMPTED, "17", "preempted", 0),
        (ARRAY, "5", "failed", 1),
        (ARRAY, "5_0", "done", 0),
        ("", "18", "unknown", 0),
    ],
)
def test_states_of_every_step_are_read(text: str, job: str, state: str, code: int) -> None:
    end = explain_rows(parse_sacct(text), job)
    assert (end.state, end.code) == (state, code)


def test_each_attempt_of_a_job_is_told_apart() -> None:
    attempts = explain_attempts(parse_sacct(DONE_THEN), "7")
    assert [(a.state, a.nodes) for a in attempts] == [("node failed", "n2"), ("done", "n1")]
    requeued = PUT_BACK.replace("NODE_FAIL", "REQUEUED")
    assert [a.state for a in explain_attempts(parse_sacct(requeued), "7")] == [
        "put back",
        "waiting",
    ]
    assert explain_attempts(parse_sacct(""), "7") == []


def test_the_attempt_that_a_process_runs_in() -> None:
    assert read_allocation({}) is None
    plain = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2"}
    assert read_allocation(plain) == Allocation("12", 2)
    task = {"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}
    assert read_allocation(task) == Allocation("12_1")
    assert list_tasks("") == []


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


# What sbatch of Slurm 22.05 said with slurmdbd and AccountingStorageEnforce=limits,qos.
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"


@pytest.mark.parametrize(
    ("said", "setting", "text"),
    [
        ("allocation failure: Invalid account or account/partition combination specified\n",
         "account", "Invalid account or account/partition combination specified"),
        ("sbatch: error: invalid partition specified: nope\n"
         "allocation failure: Invalid partition name specified\n",
         "partition", "invalid partition specified: nope"),
        ("allocation failure: Invalid qos specification\n", "qos", "Invalid qos specification"),
        ("sbatch: error: QOSMaxCpuPerJobLimit\nallocation failure: " + POLICY,
         "limit", "QOSMaxCpuPerJobLimit: its QOS gives no job so much (cores)"),
        ("sbatch: error: Batch job submission failed: " + POLICY, "limit", POLICY.strip()),
        ("allocation failure: Invalid feature specification\n", "constraint",
         "Invalid feature specification"),
        ("sbatch: error: Invalid --time specification\n", "time_limit",
         "Invalid --time specification"),
        ("", "", "it gives no reason"),
    ],
)  # fmt: skip
def test_why_slurm_refuses_a_job(said: str, setting: str, text: str) -> None:
    refusal = explain_refusal(said)
    assert (refusal.setting, refusal.text) == (setting, text)
    assert refusal.hint
    assert not is_silent(said)


def test_a_controller_that_is_away_refuses_nothing() -> None:
    assert is_silent("allocation failure: Unable to contact slurm controller (connect failure)\n")


@pytest.mark.parametrize(
    ("reason", "never", "word"),
    [
        ("Resources", False, "taken"),
        ("ReqNodeNotAvail,_UnavailableNodes:n1", False, "UnavailableNodes:n1"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_"
         "partitions", False, "drained"),
        ("DependencyNeverSatisfied", True, "slurm.dependency"),
        ("PartitionTimeLimit", True, "slurm.time_limit"),
        ("PartitionNodeLimit", True, "so many nodes"),
        ("JobHeldUser", True, "scontrol release"),
        ("AssocGrpCpuLimit", False, "its account"),
        ("AssocGrpCPUMinutesLimit", False, "core-minutes"),
        ("QOSMaxCpuPerJobLimit", True, "cores"),
        ("QOSMaxGRESPerUser", False, "all jobs of a user in its QOS"),
        ("QOSMinGRES", True, "wants more"),
        ("SomethingNew", False, "SomethingNew"),
        ("", False, ""),
    ],
)  # fmt: skip
def test_what_a_job_in_the_queue_waits_for(reason: str, never: bool, word: str) -> None:
    row = SlurmRow(id="7", state="PENDING", reason=reason)
    told = explain_attempt([row]).reason
    assert ("will not start as it is" in told, word in told) == (never, True)
    assert told.startswith(reason.partition(",")[0])


def test_what_of_a_partition_stands_against_a_job() -> None:
    said = (
        "PartitionName=tiny AllowGroups=ALL AllowAccounts=broke AllowQos=ALL Default=NO "
        "MaxNodes=1 MaxTime=00:10:00 MinNodes=0 Nodes=n1 State=UP TotalCPUs=4 TotalNodes=1"
    )
    told = explain_partition(
        parse_scontrol(said), spec(nodes=2), SlurmSection(time_limit="20", account="lab")
    )
    assert told == [
        "partition tiny gives a job 00:10:00 at most", "partition tiny gives a job 1 nodes at most",
        "partition tiny is for accounts broke",
    ]  # fmt: skip
    easy = said.replace("State=UP", "State=DOWN").replace("00:10:00", "UNLIMITED")
    fits = SlurmSection(time_limit="20", account="broke")
    assert explain_partition(parse_scontrol(easy), spec(), fits) == ["partition tiny is DOWN"]
    assert explain_partition({}, spec(), fits) == []


def test_an_array_is_as_its_tasks_are() -> None:
    def task(number: int, state: str) -> Outcome:
        return explain_attempt([SlurmRow(id=str(number), state=state)])

    states = ("COMPLETED", "OUT_OF_MEMORY", "RUNNING", "PENDING")
    tasks = [task(number, state) for number, state in enumerate(states)]
    assert join_ends(tasks).state == "running"
    assert join_ends([*tasks[:2], tasks[3]]).state == "waiting"
    assert join_ends(tasks[:2]).state == "out of memory"
    assert join_ends(tasks[:1] * 3).state == "done"


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
    assert parse_job_id(["Welcome 2 n1", "", "4711;cluster"]) == "4711"
    assert parse_job_id(["sbatch: error: 12"]) == ""


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


def test_a_project_whose_name_has_spaces() -> None:
    launch = LaunchConfig(project="/srv/my proj 50%")
    job = structs.replace(spec(), launch=launch, cwd="/srv/my proj 50%")
    script = render(job, profile()).files["job.sbatch"]
    assert '#SBATCH --output="/srv/my proj 50%%/slurm-j-%j.out"\n' in script
    assert 'cd "/srv/my proj 50%" ||' in script


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
    for path in ("/scratch/$USER-data/${USER}.x", "~/a", "$HOME/$UNSET/a"):  # As the script has it.
        said = subprocess.run(["bash", "-c", f"echo {quote(path)}"], env={**here.environ,
                              "UNSET": "$UNSET"}, capture_output=True, text=True)  # fmt: skip
        assert expand(path, here) == said.stdout.strip()


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


def test_on_a_login_node_the_script_finds_what_was_sent_there() -> None:
    found = structs.replace(profile(), launch=LaunchSection(host="login"))
    plan = render(spec(), found)
    assert plan.place == "/scratch/$USER/perdure/j"
    assert set(plan.files) == {
        "job.sbatch", "job.json", "chain.json", "env.sh", "setup.sh", "results.py",
    }  # fmt: skip
    script = plan.files["job.sbatch"]
    assert "#SBATCH --output=slurm-j-%j.out" in script  # Slurm expands no variable there.
    assert '. "/scratch/$USER/perdure/j/launch"/env.sh' in script
    assert '"$PERDURE_PYTHON" -P -m perdure.launch.slurm.batch' in script
    assert "/srv/proj" not in script  # It lies elsewhere there.


def test_a_chain_that_gets_nowhere_is_ended() -> None:
    assert decide(end(), [end()] * (STUCK_RUNS - 2), 99)[0] == "requeue"
    assert decide(end(), [end()] * (STUCK_RUNS - 1), 99)[0] == "give up"
    assert decide(end(checkpoint=11), [end()] * (STUCK_RUNS - 1), 99)[0] == "requeue"
    preempted = [end(warned=False, ended_by="TERM")] * STUCK_RUNS
    assert decide(end(), preempted, 99)[0] == "requeue"


def read_directives(script: str) -> list[str]:
    """Return what a script asks of sbatch."""
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


def test_a_range_of_nodes_is_asked_for_where_a_job_may_grow() -> None:
    lines = read_directives(render(spec(nodes=1, nodes_max=3), profile()).files["job.sbatch"])
    assert "--nodes=1-3" in lines
    assert not any(line.startswith("--ntasks") for line in lines)  # Slurm would take the fewest.
    lines = read_directives(
        render(spec(nodes=1, nodes_max=3, remote=2), profile()).files["job.sbatch"]
    )
    assert "--nodes=1" in lines, "two come from other allocations"
    assert ("error", "") in levels(profile(), spec(nodes_max=2, observe=True))


@pytest.mark.parametrize("given", [1, 2, 3])
def test_a_run_on_what_slurm_gave_is_a_job_that_run_takes(given: int) -> None:
    whole = spec(nodes=1, nodes_max=4, remote=1)
    assert count_nodes(whole) == (1, 3)
    size = Size(whole, count_given(whole, {"SLURM_JOB_NUM_NODES": str(given)}))
    run = fit_nodes(whole, size.nodes)
    assert (run.nodes, run.local_nodes, run.num_nodes) == (given, given, 4)
    assert run.remote >= run.growth, "else perdure run refuses it"


def test_a_world_of_a_fixed_size_waits_for_as_many_nodes_as_it_had(tmp_path: Path) -> None:
    whole = spec(nodes=1, nodes_max=3)
    size = Size(whole, 1)
    assert size.find_wanted([end(nodes=2)]) == 0, "elastic"
    assert size.find_wanted([end(nodes=2, fixed=True)]) == 2
    assert size.find_wanted([end(nodes=1, fixed=True)]) == 0
    assert size.find_wanted([end(nodes=5, fixed=True)]) == 0, "of a launch that asked for others"
    assert Size(spec(nodes=2), 2).find_wanted([end(nodes=1, fixed=True)]) == 0
    path, fitted = size.write(tmp_path, "7")
    assert msgspec.json.decode(path.read_bytes(), type=JobSpec) == fitted
    assert Size(spec(nodes=2), 2).write(tmp_path, "7")[0] == tmp_path / "job.json"


def test_a_further_node_is_a_slurm_job_of_its_own() -> None:
    found = profile(partition="gpu", array="0-1", dependency="afterok:3", warn_s=120, mem="9G")
    files = render(spec(nodes=3, remote=2), found).files
    lines = read_directives(files["join.sbatch"])
    assert lines[:3] == ["--job-name=j-node", "--nodes=1", "--ntasks-per-node=1"]
    assert {"--partition=gpu", "--mem=9G", "--signal=B:USR1@120", "--no-requeue"} <= set(lines)
    assert not [line for line in lines if line.startswith(("--array", "--dep", "--kill", "--req"))]
    assert 'slurm.joined "$place" j "${1:-$SLURM_JOB_ID}" "${2:-60}"' in files["join.sbatch"]
    assert "join.sbatch" not in render(spec(nodes=3), found).files


def read_container(found: Profile, job: JobSpec) -> tuple[str, Container]:
    plan = render(job, found)
    chain = msgspec.json.decode(plan.files["chain.json"], type=Chain)
    return plan.files["job.sbatch"], chain.container


def test_apptainer_carries_the_agent_in_and_leaves_the_batch_script_outside() -> None:
    found = profile(container="apptainer exec --nv $HOME/torch.sif", container_mounts=("/data",))
    script, container = read_container(found, spec(gpus=4))
    assert "apptainer" not in script
    seen = "/srv/proj,/scratch/$USER/perdure,/data"
    assert f'export APPTAINER_BIND="{seen}${{APPTAINER_BIND:+,$APPTAINER_BIND}}"\n' in script
    assert container.command == ("apptainer", "exec", "--nv", "$HOME/torch.sif")
    assert (container.options, container.python) == ((), "python3")


def test_pyxis_is_asked_by_options_of_the_agents_steps() -> None:
    found = profile(
        container_image="nvcr.io#nvidia/pytorch:25.01-py3", container_mounts=("/data", "/a:/b:ro"),
        container_python="/opt/py",
    )  # fmt: skip
    script, container = read_container(found, spec())
    assert "container" not in script, "a batch script in an image could not ask Slurm"
    seen = "/srv/proj:/srv/proj,/scratch/$USER/perdure:/scratch/$USER/perdure"
    assert container.options == (
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        f"--container-mounts={seen},/data:/data,/a:/b:ro",
    )
    assert (container.command, container.python) == ((), "/opt/py")


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"container": "apptainer exec --nv x.sif"}, []),
        ({"container": "apptainer exec x.sif"}, ["warning"]),
        ({"container": "apptainer exec --nv --pid x.sif"}, ["error"]),
        ({"container": "singularity exec --nv -C x.sif"}, ["error"]),
        ({"container": "apptainer exec --nv --cleanenv x.sif"}, ["error"]),
        ({"container": "apptainer run --nv x.sif"}, ["error"]),
        ({"container": "ch-run /images/torch --"}, []),
        ({"container": "apptainer exec 'x.sif"}, ["error"]),
        ({"container_image": "docker://x"}, []),
        ({"container_image": "docker://x", "container": "ch-run x --"}, ["error"]),
        ({"container_mounts": ("/data",)}, ["error"]),
    ],
)
def test_a_container_that_cannot_work_is_found(changes: Any, level: list[str]) -> None:
    found = check_container(SlurmSection(**changes), gpus=True, groups=False)
    assert [finding.level for finding in found] == level


def test_a_container_s_words_are_expanded_where_the_job_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHERE", "/bin")
    assert Container(command=("$WHERE/sh", "-c"), options=("--x=$WHERE",)).expand() == (
        ["--x=/bin"], ["/bin/sh", "-c"],
    )  # fmt: skip
    with pytest.raises(PlatformError, match="is not there"):
        Container(command=("no-such-runtime", "exec")).expand()
