"""What a rank finds in its environment: everything torchrun would have set, and perdure's own.

Pure: a specification, an assignment and a base environment in, a dictionary out.
"""

from collections.abc import Mapping

from perdure.model.actions import Assignment
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths


def rank_environment(
    spec: JobSpec,
    assignment: Assignment,
    paths: JobPaths,
    rank: int,
    base: Mapping[str, str],
    *,
    clock_offset_s: float,
) -> dict[str, str]:
    """Return the whole environment of `rank` in the assignment's generation.

    The names and meanings are torchrun's; the role is the whole world, as torchrun has it for one
    role. `OMP_NUM_THREADS` gets torchrun's default of 1 where several ranks share a node and
    nothing else was said. The user's `env` wins over the base, perdure's own names over both.
    """
    node, generation = spec.node_of(rank), assignment.generation
    env = {**base, **spec.env}
    if spec.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank - spec.ranks_of(node)[0]),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.nproc),
        GROUP_RANK=str(node),
        GROUP_WORLD_SIZE=str(spec.nodes),
        ROLE_NAME="default",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(spec.world_size),
        MASTER_ADDR=assignment.master_addr,
        MASTER_PORT=str(assignment.master_port),
        TORCHELASTIC_RESTART_COUNT=str(assignment.restart_count),
        TORCHELASTIC_MAX_RESTARTS=str(spec.restart.max_restarts),
        TORCHELASTIC_RUN_ID=spec.run_id or spec.name,
        TORCHELASTIC_USE_AGENT_STORE=str(assignment.agent_store),
        TORCHELASTIC_ERROR_FILE=paths.error_file(generation, rank),
        TORCH_NCCL_ASYNC_ERROR_HANDLING=env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        PERDURE_JOB=spec.name,
        PERDURE_GENERATION=str(generation),
        PERDURE_NODE=str(node),
        PERDURE_RING=paths.ring(generation, rank),
        PERDURE_SOCKET=paths.worker_socket(node),
        PERDURE_SPEC=paths.spec,
        PERDURE_CHECKPOINT_URL=spec.checkpoint.url or paths.checkpoints,
        PERDURE_CLOCK_OFFSET_S=repr(clock_offset_s),
        PERDURE_RECORDER=env.get("PERDURE_RECORDER", "auto"),
    )
    env.pop("PERDURE_RUN_PID", None)
    return env
