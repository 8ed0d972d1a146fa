"""What holds a job's [env] is in folders that are nobody else's."""

import stat
from pathlib import Path

from perdure.launch.catalog import load_profile
from perdure.launch.records import write_record
from perdure.model.platforms.launching import LaunchRecord
from perdure.service.jobfiles import JobLock
from perdure.service.jobfolders import paths_of
from perdure.service.queue.store import QueueStore


def mode(path: Path | str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_the_folders_of_jobs_launches_and_queues_are_private(tmp_path: Path) -> None:
    paths = paths_of(str(tmp_path), "gpt")
    lock = JobLock(paths)
    assert mode(paths.root) == 0o700
    lock.release()
    profile = load_profile("local", str(tmp_path)).profile
    write_record(
        str(tmp_path), LaunchRecord(job="gpt", profile=profile, place="p", home="h", python="p")
    )
    assert mode(tmp_path / "launches") == 0o700
    store = QueueStore(str(tmp_path), "default")
    with store.writing():
        assert mode(store.root) == 0o700
