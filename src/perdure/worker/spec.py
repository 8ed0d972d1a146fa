"""What a rank knows of its job from the files and variables that its agent has prepared."""

import os
from pathlib import Path

from perdure.model.codec import decode
from perdure.model.job import CheckpointConfig, JobSpec


def read_spec() -> JobSpec:
    """Return the job's specification; the defaults where perdure has not started this process.

    Raises:
        OSError: it cannot be read.
        ProtocolError: it is none.
    """
    path = os.environ.get("PERDURE_SPEC", "")
    return decode(Path(path).read_bytes(), JobSpec) if path else JobSpec(script="")


def find_checkpoint_url(config: CheckpointConfig) -> str:
    """Return where the job's checkpoints lie; empty where that is not known."""
    return os.environ.get("PERDURE_CHECKPOINT_URL", "") or config.url
