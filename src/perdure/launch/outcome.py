"""What became of a job, for the program that ran it where it was launched to: by its own files."""

from pathlib import Path

import msgspec

from perdure.model.paths import JobPaths
from perdure.model.report import Snapshot


def look_at_job(paths: JobPaths) -> tuple[str, int]:
    """Return a job's state, `lost` where nobody wrote it, and the step of its newest checkpoint."""
    try:
        snapshot = msgspec.json.decode(Path(paths.snapshot).read_bytes(), type=Snapshot)
    except (OSError, msgspec.MsgspecError):
        return "lost", -1
    steps = [int(str(row.get("step", -1))) for row in snapshot.checkpoints]
    return snapshot.state, max(steps, default=-1)
