"""What torch's NCCL groups are to do when something breaks: other things at each depth.

A world that is restarted as a whole gains by an error that ends its ranks at once, with a dump of
what they did. The survivors of an elastic world have to outlive the same error: torch must neither
end the process nor wait with the lock that every next collective needs, and perdure alone aborts.

`perdure run` cannot know the depth before the script says it. So it sets a supervised job's values
and names in NCCL_DEFAULTS those that nobody had set; an elastic world's ranks set their own before
their first group, and leave alone what the user has said. Untested: no GPU has run with them.
"""

from collections.abc import Mapping

NCCL_DEFAULTS = "PERDURE_NCCL_DEFAULTS"
"""Names the variables of this table that perdure has set, with commas between them."""

TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets: for jobs on whose errors perdure does not act, and for torchft's groups."""

SUPERVISED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "1",
}
"""For jobs that are restarted as a whole, whether or not they resume exactly."""

ELASTIC = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
    "NCCL_NVLS_ENABLE": "0",
}
"""For ranks of an elastic world."""

_BREAKS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (0.0, "torch ends the survivors of an error"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": (250.0, "torch waits for a dump, four times as long"),
    "TORCH_NCCL_ENABLE_MONITORING": (0.0, "torch ends ranks whose watchdog waits"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": (0.0, "torch ends the survivors of an error"),
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": (60.0, "a world that lacks a member forms so many seconds"),
    "NCCL_NVLS_ENABLE": (0.0, "an abort may hang in NVLink SHARP"),
}
"""The largest value that an elastic world recovers with, and what happens above it."""

_WORDS = {
    **dict.fromkeys(("n", "no", "f", "false"), "0"),
    **dict.fromkeys(("y", "yes", "t", "true"), "1"),
}

_OVERRIDES = ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE")
"""By these NCCL can be brought to accept two ranks on one GPU."""


def _find_own(env: Mapping[str, str], name: str) -> str | None:
    """Return the user's value of a variable, which torch reads under its former name as well."""
    if name in env.get(NCCL_DEFAULTS, "").split(","):
        return None
    return env.get(name, env.get(name.removeprefix("TORCH_")))


def choose_defaults(env: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    """Return what of `table` is to be added to `env`: all but what the user has set."""
    return {name: value for name, value in table.items() if _find_own(env, name) is None}


def mark_defaults(env: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    """Return what of `table` is to be added to `env`, with the variable that names it."""
    added = choose_defaults(env, table)
    return {**added, NCCL_DEFAULTS: ",".join(added)}


def explain_breaking(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return which of the user's own values keep an elastic world from recovering, and how.

    >>> explain_breaking({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": "0"})
    ('TORCH_NCCL_ASYNC_ERROR_HANDLING=1: torch ends the survivors of an error',)
    """
    told = []
    for name, (limit, why) in _BREAKS.items():
        value = (_find_own(env, name) or "").strip()
        try:
            breaks = value != "" and float(_WORDS.get(value.lower(), value)) > limit
        except ValueError:
            continue  # Torch itself refuses it, or NCCL says that it ignores it.
        if breaks:
            told.append(f"{name}={value}: {why}")
    return tuple(told)


def explain_shared_gpus(ranks: int, gpus: int, env: Mapping[str, str]) -> str:
    """Return why NCCL cannot connect `ranks` of one node with `gpus` visible; empty where it can.

    Without any GPU torch says so itself.

    >>> explain_shared_gpus(4, 4, {}), explain_shared_gpus(4, 0, {})
    ('', '')
    """
    if ranks <= gpus or not gpus or any(env.get(name) for name in _OVERRIDES):
        return ""
    return (
        f"{ranks} ranks share {gpus} visible GPU{'' if gpus == 1 else 's'}, and NCCL refuses two "
        "ranks on one GPU: start as many ranks as GPUs, or use gloo"
    )
