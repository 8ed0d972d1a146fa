"""How long a platform waits between SIGTERM and SIGKILL, as the platform itself says."""

import math
import re
import subprocess
import time
from collections.abc import Mapping

from perdure.adapters.box import read_slurm, read_slurm_end

_SOON_S = 1800.0
"""A job that Slurm ends later was not sent SIGTERM because of it."""


def read_window_s(env: Mapping[str, str]) -> float | None:
    """Return the seconds that SIGTERM leaves this job; None if nothing tells.

    In a pod that is its grace, in an allocation Slurm's KillWait.
    """
    with_pod = env.get("PERDURE_POD_GRACE_S", "")
    try:
        if with_pod:
            return _check(float(with_pod))
        told = read_slurm().get("KillWait", "") if env.get("SLURM_JOB_ID") else ""
        if found := re.match(r"\d+", told):
            return _check(float(found[0]))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return None


def read_left_s(env: Mapping[str, str]) -> float | None:
    """Return the seconds until Slurm ends this job; None if that is not soon, or not known.

    After a warning (`--signal`) and at the beginning of a partition's GraceTime, the job runs on,
    and Slurm knows its end. After `scancel` it does not run on, and KillWait is all there is.
    """
    try:
        job = env.get("SLURM_JOB_ID", "")
        left_s = read_slurm_end(job) - time.time() if job else 0.0
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return left_s if 0 < left_s < _SOON_S else None


def _check(window_s: float) -> float | None:
    return window_s if math.isfinite(window_s) and window_s > 0 else None
