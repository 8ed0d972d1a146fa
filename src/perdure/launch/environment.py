"""The environment of a rank: torchrun's variables, and perdure's own.

Later layers win: the environment of `perdure run`, defaults where nothing is set, the job's own
`env`, and last what describes the world, which nobody may set wrongly.
"""

import secrets
from collections.abc import Mapping

from msgspec import structs

from perdure.model.bus.lighthouse import PATIENCE
from perdure.model.job import JobSpec
from perdure.model.nccl import NCCL_DEFAULTS, SUPERVISED, TORCHRUN, choose_defaults, mark_defaults
from perdure.model.orders import Assignment
from perdure.model.paths import JobPaths
from perdure.model.steering import Steering

RDZV_SECRET = "PERDURE_RDZV_SECRET"
"""What the nodes of `perdure run --nnodes N` have in common."""
LIGHTHOUSE_URL = "PERDURE_LIGHTHOUSE"
"""Where an agent finds the URL of the lighthouse (`service.supervisor`)."""

HASH_SEED = "PYTHONHASHSEED"

GROUP_DEVICES = "PERDURE_GROUP_DEVICES"
"""Where an agent leaves what CUDA_VISIBLE_DEVICES is to be in its replica group."""

INTERNAL = ("PERDURE_RUN_PID", LIGHTHOUSE_URL, GROUP_DEVICES, NCCL_DEFAULTS, "SPT_NOENV")
"""Variables of perdure's own parts that no rank inherits."""
_OF_A_RANK = "GENERATION", "KEEPER", "MEMBER", "NODE", "RANK", "RING", "SOCKET", "SPEC", "STEERING"
OF_A_RANK = tuple(f"PERDURE_{name}" for name in _OF_A_RANK)
"""Variables by which a keeper knows its ranks, and they their job."""


def leave_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for a job that is started within a rank of another job.

    A keeper ends all processes that have the marks of an earlier keeper of its node.
    """
    return {name: value for name, value in environ.items() if name not in OF_A_RANK}


def explain_default_threads(spec: JobSpec, base: Mapping[str, str]) -> str:
    """Return why OMP_NUM_THREADS is set, in one line to show once; empty where it is not.

    The default is torchrun's: several ranks on a machine with as many threads each as it has cores
    would only hinder one another. Nodes that are emulated on one machine share its cores as well.
    """
    ranks = spec.nproc * max(1, min(spec.nodes, spec.local_nodes))
    if ranks == 1 or "OMP_NUM_THREADS" in spec.env or "OMP_NUM_THREADS" in base:
        return ""
    return (
        f"OMP_NUM_THREADS=1 for each of the {ranks} ranks of a machine, as torchrun does; "
        "set it yourself for more"
    )


def set_hash_seed(spec: JobSpec, previous: JobSpec | None, environ: Mapping[str, str]) -> JobSpec:
    """Return the job with the hash seed of its earlier run, or with a new one.

    All lives and nodes of a job iterate over sets in one order. A seed that the user gives wins.
    """
    if HASH_SEED in spec.env or HASH_SEED in environ:
        return spec
    before = previous.env.get(HASH_SEED) if previous is not None else None
    seed = before or str(secrets.randbelow(1 << 32))
    return structs.replace(spec, env=spec.env | {HASH_SEED: seed})


def _world_environment(rank: int, world_size: int, nproc: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % nproc),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(rank // nproc),
        "GROUP_WORLD_SIZE": str(world_size // nproc),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
    }


def _replica_environment(
    spec: JobSpec, rank: int, assignment: Assignment, base: Mapping[str, str]
) -> dict[str, str]:
    """Return what is different in a replica group: a world of its own, and torchft's variables.

    torchft lets its variables win over what the script says. The groups of a machine divide its
    GPUs, since LOCAL_RANK begins at 0 in each. A quorum may take as long as it
    takes: who is late or dead is the lighthouse's business, and it may itself be restarted.
    """
    env = {
        **_world_environment(rank - assignment.replica * spec.nproc, spec.nproc, spec.nproc),
        "REPLICA_GROUP_ID": str(assignment.replica),
        "NUM_REPLICA_GROUPS": str(spec.groups),
        "TORCHFT_LIGHTHOUSE": base.get(LIGHTHOUSE_URL, ""),
    }
    if base.get(GROUP_DEVICES):
        env["CUDA_VISIBLE_DEVICES"] = base[GROUP_DEVICES]
    if spec.lighthouse is not None and spec.lighthouse.own:
        env |= {k: v for k, v in PATIENCE.items() if k not in base and k not in spec.env}
    return env


def rank_environment(
    spec: JobSpec,
    rank: int,
    assignment: Assignment,
    paths: JobPaths,
    *,
    node: int,
    base: Mapping[str, str],
    home: str,
    clock_offset_s: float,
    nccl_plugin: str = "",
) -> dict[str, str]:
    """Return the environment of global rank `rank` on `node` in the generation of `assignment`.

    A number beyond the world is a member that came later, in the slot of its predecessors.
    `nccl_plugin` is the path of perdure's profiler plugin, on a node with a GPU; the user's own
    NCCL_PROFILER_PLUGIN, `none` among them, goes before it.
    """
    generation = assignment.generation
    env = {name: value for name, value in base.items() if name not in INTERNAL}
    env.setdefault("PERDURE_RECORDER", "auto")
    if explain_default_threads(spec, base):
        env["OMP_NUM_THREADS"] = "1"
    env |= spec.env
    if spec.tracking.wandb:  # So that the script's runs and perdure's are found together.
        env.setdefault("WANDB_RUN_GROUP", spec.name)
    if spec.unordered.sets_nccl and not spec.groups:
        env |= mark_defaults(env, SUPERVISED)
    else:
        env |= choose_defaults(env, TORCHRUN)
    if nccl_plugin:
        env.setdefault("NCCL_PROFILER_PLUGIN", nccl_plugin)
    if assignment.replica >= 0:
        env |= _replica_environment(spec, rank, assignment, base)
    else:
        env |= _world_environment(spec.slot_of(rank), spec.world_size, spec.nproc)
        if rank >= spec.world_size:
            env["PERDURE_MEMBER"] = str(rank)
            env["LOCAL_RANK"] = str(spec.local_rank_of(rank))
    env |= {
        "MASTER_ADDR": assignment.master_addr,
        "MASTER_PORT": str(assignment.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(assignment.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.restart.max_restarts),
        "ROLE_NAME": spec.env.get("ROLE_NAME", "default"),
        "TORCHELASTIC_RUN_ID": spec.env.get("TORCHELASTIC_RUN_ID") or spec.name,
        "TORCHELASTIC_USE_AGENT_STORE": str(assignment.agent_store),
        "TORCHELASTIC_ERROR_FILE": paths.error_file(generation, rank),
        "PERDURE_JOB": spec.name,
        "PERDURE_HOME": home,
        "PERDURE_GENERATION": str(generation),
        "PERDURE_NODE": str(node),
        "PERDURE_RING": paths.ring(generation, rank),
        "PERDURE_SOCKET": paths.worker_socket(node),
        "PERDURE_SPEC": paths.spec,
        "PERDURE_CHECKPOINT_URL": spec.checkpoint.url or paths.checkpoints,
        "PERDURE_CLOCK_OFFSET_S": repr(clock_offset_s),
    }
    if assignment.steering != Steering():
        env["PERDURE_STEERING"] = paths.steering(generation, node)
    return env
