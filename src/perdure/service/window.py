"""How long a platform waits between SIGTERM and SIGKILL, as the platform itself says."""

import math
import re
import subprocess
from collections.abc import Mapping

from perdure.adapters.box import read_slurm
from perdure.model.platforms.kubernetes import USABLE


def read_window_s(env: Mapping[str, str]) -> float | None:
    """Return the seconds that SIGTERM leaves this job; None if nothing tells.

    In a pod that is the share of its grace that perdure uses, in an allocation Slurm's KillWait.
    """
    with_pod = env.get("PERDURE_POD_GRACE_S", "")
    try:
        if with_pod:
            return _check(float(with_pod) * USABLE)
        told = read_slurm().get("KillWait", "") if env.get("SLURM_JOB_ID") else ""
        if found := re.match(r"\d+", told):
            return _check(float(found[0]))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return None


def _check(window_s: float) -> float | None:
    return window_s if math.isfinite(window_s) and window_s > 0 else None
