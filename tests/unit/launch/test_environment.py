"""torchrun's variables, on one node and on several."""

from msgspec import structs

from perdure.launch.environment import explain_default_threads, rank_environment, set_hash_seed
from perdure.model.job import CheckpointConfig, JobSpec, TorchftConfig, TrackingConfig
from perdure.model.nccl import ELASTIC, NCCL_DEFAULTS, SUPERVISED
from perdure.model.orders import Assignment
from perdure.model.paths import job_paths

PATHS = job_paths("/h", "j", "/tmp/perdure-1000", "/dev/shm/perdure-1000")
RUN = Assignment(
    number=3,
    generation=2,
    phase="run",
    master_addr="10.0.0.1",
    master_port=29511,
    agent_store=True,
    restart_count=2,
)


def make(spec: JobSpec, rank: int, base: dict[str, str] | None = None) -> dict[str, str]:
    node = spec.node_of(rank)
    return rank_environment(
        spec, rank, RUN, PATHS, node=node, base=base or {}, home="/h", clock_offset_s=1.5
    )


def test_the_role_is_what_the_job_says() -> None:
    spec = JobSpec(name="j", script="s.py", env={"ROLE_NAME": "trainer"})
    assert make(spec, 0, base={"ROLE_NAME": "other"})["ROLE_NAME"] == "trainer"
    assert make(JobSpec(name="j", script="s.py"), 0)["ROLE_NAME"] == "default"


def test_ranks_of_several_nodes() -> None:
    spec = JobSpec(name="j", script="s.py", nproc=3, nodes=2, env={"TORCHELASTIC_RUN_ID": "my-run"})
    env = make(spec, 4)
    assert (
        env
        | {
            "RANK": "4",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_NAME": "default",
            "ROLE_RANK": "4",
            "ROLE_WORLD_SIZE": "6",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29511",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_RUN_ID": "my-run",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": "/h/jobs/j/errors/g2-r4.json",
            **SUPERVISED,
            "PERDURE_NCCL_DEFAULTS": ",".join(SUPERVISED),
            "PERDURE_NODE": "1",
            "PERDURE_SOCKET": PATHS.worker_socket(1),
            "PERDURE_RING": PATHS.ring(2, 4),
            "PERDURE_CHECKPOINT_URL": "/h/jobs/j/checkpoints",
            "PERDURE_CLOCK_OFFSET_S": "1.5",
            "PERDURE_RECORDER": "auto",
            "OMP_NUM_THREADS": "1",
        }
        == env
    )


def test_threads_are_the_users_where_set() -> None:
    several, one = JobSpec(script="s.py", nproc=2), JobSpec(script="s.py")
    assert "OMP_NUM_THREADS=1" in explain_default_threads(several, {})
    assert explain_default_threads(one, {}) == ""
    assert "OMP_NUM_THREADS" not in make(one, 0)
    assert make(several, 0, {"OMP_NUM_THREADS": "6"})["OMP_NUM_THREADS"] == "6"
    emulated = JobSpec(script="s.py", nodes=4)
    assert "each of the 4 ranks of a machine" in explain_default_threads(emulated, {})
    assert make(emulated, 0)["OMP_NUM_THREADS"] == "1"
    for apart in (JobSpec(script="s.py", nodes=4, remote=3), JobSpec(script="s.py", spares=1)):
        assert explain_default_threads(apart, {}) == ""
    own = JobSpec(script="s.py", nproc=2, env={"OMP_NUM_THREADS": "4"})
    assert explain_default_threads(own, {}) == ""
    assert make(own, 0)["OMP_NUM_THREADS"] == "4"


def test_what_torch_s_nccl_is_told_is_the_users_where_set() -> None:
    assert SUPERVISED["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    asked = {"TORCH_NCCL_ENABLE_MONITORING": "1"}
    for base, own in ((asked, {}), ({}, asked)):
        env = make(JobSpec(script="s.py", env=own), 0, base)
        assert {name: env[name] for name in SUPERVISED} == SUPERVISED | asked
        assert set(env[NCCL_DEFAULTS].split(",")) == set(SUPERVISED) - set(asked)
    former = make(JobSpec(script="s.py"), 0, {"NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in former  # It would win over the user's.
    nested = make(JobSpec(script="s.py"), 0, make(JobSpec(script="s.py"), 0))
    assert nested[NCCL_DEFAULTS] == ""  # What a job around this one has set is somebody's choice.


def test_where_perdure_does_not_answer_errors_torch_is_told_what_torchrun_tells() -> None:
    groups = TorchftConfig(replicas=2)
    run = structs.replace(RUN, replica=0)
    observed = make(JobSpec(script="s.py", observe=True), 0)
    replica = rank_environment(
        JobSpec(script="s.py", nodes=2, torchft=groups), 0, run, PATHS,
        node=0, base={}, home="/h", clock_offset_s=0.0,
    )  # fmt: skip
    for env in (observed, replica):
        told = {name: env[name] for name in (*ELASTIC, NCCL_DEFAULTS) if name in env}
        assert told == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_layers() -> None:
    spec = JobSpec(
        name="j",
        script="s.py",
        env={"A": "job", "RANK": "99"},
        checkpoint=CheckpointConfig(url="s3://b/k"),
    )
    base = {
        "A": "base",
        "B": "base",
        "CUDA_VISIBLE_DEVICES": "3",
        "PERDURE_RUN_PID": "7",
        "PERDURE_RECORDER": "off",
        "MASTER_PORT": "1",
    }
    env = make(spec, 0, base)
    assert (env["A"], env["B"], env["CUDA_VISIBLE_DEVICES"]) == ("job", "base", "3")
    assert (env["RANK"], env["MASTER_PORT"]) == ("0", "29511")
    assert "PERDURE_RUN_PID" not in env
    assert env["PERDURE_RECORDER"] == "off"
    assert env["PERDURE_CHECKPOINT_URL"] == "s3://b/k"
    assert base["A"] == "base"


def test_a_scripts_runs_are_in_the_group_of_perdures_own_unless_it_says_otherwise() -> None:
    tracked = JobSpec(name="j", script="s.py", tracking=TrackingConfig(wandb="p"))
    assert make(tracked, 0)["WANDB_RUN_GROUP"] == "j"
    assert make(tracked, 0, {"WANDB_RUN_GROUP": "mine"})["WANDB_RUN_GROUP"] == "mine"
    assert "WANDB_RUN_GROUP" not in make(JobSpec(name="j", script="s.py"), 0)


def test_spare_node_stands_in_under_the_ranks_of_the_one_it_replaces() -> None:
    spec = JobSpec(script="s.py", nproc=3, nodes=2, spares=3)
    env = rank_environment(spec, 4, RUN, PATHS, node=2, base={}, home="/h", clock_offset_s=1.5)
    assert (env["GROUP_RANK"], env["LOCAL_RANK"], env["RANK"]) == ("1", "1", "4")
    assert env["PERDURE_NODE"] == "2"
    assert env["PERDURE_SOCKET"] == PATHS.worker_socket(2)


def test_nccl_plugin_only_where_the_user_set_none() -> None:
    def plugin(spec: JobSpec, base: dict[str, str], path: str = "/p.so") -> str | None:
        env = rank_environment(
            spec, 0, RUN, PATHS, node=0, base=base, home="/h", clock_offset_s=0, nccl_plugin=path
        )
        return env.get("NCCL_PROFILER_PLUGIN")

    spec = JobSpec(name="j", script="s.py")
    assert plugin(spec, {}) == "/p.so"
    assert plugin(spec, {}, "") is None
    assert plugin(spec, {"NCCL_PROFILER_PLUGIN": "none"}) == "none"
    own = JobSpec(name="j", script="s.py", env={"NCCL_PROFILER_PLUGIN": "inspector"})
    assert plugin(own, {}) == "inspector"


def test_a_job_has_one_hash_seed() -> None:
    spec = JobSpec(name="j", script="x.py")
    first = set_hash_seed(spec, None, {})
    assert int(first.env["PYTHONHASHSEED"]) < 1 << 32
    assert set_hash_seed(spec, first, {}) == first
    own = JobSpec(name="j", script="x.py", env={"PYTHONHASHSEED": "7"})
    assert set_hash_seed(own, first, {}) == own
    assert set_hash_seed(spec, first, {"PYTHONHASHSEED": "7"}) == spec
