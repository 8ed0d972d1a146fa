"""When a checkpoint is worth its cost, from what saves cost and how often the job fails."""

import math

from perdure.model.job import CheckpointConfig

_PRIOR_MTBF_S = 3600.0
"""Assumed until the job has shown better: one failure an hour."""


def decide_checkpoint_interval(
    config: CheckpointConfig, *, stall_s: float | None, failures: int, elapsed_s: float
) -> float | None:
    """Return the seconds between checkpoints; None where steps decide instead.

    Automatic is Young's first-order optimum sqrt(2 C M) (CACM 17(9), 1974), with C the measured
    stall (a background write costs training only its stall) and M the job's elapsed time over its
    failures, with one failure an hour as the prior. Bounds keep a free snapshot from being taken
    all the time, and the first one from being late.
    """
    if config.every_steps:
        return None
    if config.every_s:
        return config.every_s
    if stall_s is None:
        return 15.0
    mtbf_s = (elapsed_s + _PRIOR_MTBF_S) / (failures + 1)
    return min(900.0, max(5.0, math.sqrt(2.0 * max(stall_s, 0.005) * mtbf_s)))
