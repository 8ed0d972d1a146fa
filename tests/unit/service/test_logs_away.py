"""The disk of logs is away for a while: whoever cuts them goes on once it is back."""

from pathlib import Path

import pytest
from tests.disks import dead_disk

from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.agent.logs import LogWatch, cut_logs


def test_logs_on_a_dead_disk_end_no_watch(tmp_path: Path) -> None:
    paths = JobPaths(*[str(tmp_path)] * 3)
    logs = Path(paths.logs)
    logs.mkdir()
    watch = LogWatch(JobSpec(script=""), paths, 0)
    with dead_disk(logs):
        with pytest.raises(OSError, match="Transport endpoint"):
            list(logs.iterdir())
        cut_logs(paths.logs, str(tmp_path / "output"))
        watch.look(0, [0])
