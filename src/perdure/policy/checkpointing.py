"""When a checkpoint is worth its cost, from what saves cost and how often the job fails."""

from collections.abc import Callable

from perdure.model.job import CheckpointConfig

_PRIOR_MTBF_S = 3600.0
"""Assumed until the job has shown better: one failure an hour."""
_FIRST_S = 15.0
_SHORTEST_S, _LONGEST_S = 5.0, 900.0
_STALL_FLOOR_S = 0.005


def decide_checkpoint_interval(
    config: CheckpointConfig,
    *,
    stall_s: float | None,
    failures: int,
    elapsed_s: float,
    optimum: Callable[[float, float], float],
) -> float | None:
    """Return the seconds between checkpoints; None where steps decide instead.

    Automatic is `optimum(C, M)`, Young's or Daly's, with C the measured stall (a background write
    costs training only its stall) and M the job's elapsed time over its failures, with one
    failure an hour as the prior. Bounds keep a free snapshot from being taken all the time, and
    the first one from being late.
    """
    if config.every_steps:
        return None
    if config.every_s:
        return config.every_s
    if stall_s is None:
        return _FIRST_S
    mtbf_s = (elapsed_s + _PRIOR_MTBF_S) / (failures + 1)
    return min(_LONGEST_S, max(_SHORTEST_S, optimum(max(stall_s, _STALL_FLOOR_S), mtbf_s)))
