"""What a rank tells torch and NCCL before its first group, so that it outlives the others' errors.

Only ranks of perdure's jobs are told: elsewhere nobody would form the next world.
"""

from collections.abc import Callable, MutableMapping

from perdure.model.nccl import ELASTIC, NCCL_DEFAULTS, choose_defaults, explain_breaking


def outlive_errors(env: MutableMapping[str, str], tell: Callable[[str], object]) -> None:
    """Set in `env` what an elastic world needs; `tell` which of the user's values defeat it.

    Torch reads these variables when a group of NCCL is made, some of them once a process.
    """
    if NCCL_DEFAULTS not in env:
        return
    for line in explain_breaking(env):
        tell(f"an elastic world cannot recover over NCCL with {line}")
    env.update(choose_defaults(env, ELASTIC))
