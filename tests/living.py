"""A job that lives, as its controller and its `perdure run` leave it on disk, without them."""

import fcntl
import os
import time
from pathlib import Path

import msgspec

from perdure.model.codec import encode
from perdure.model.job import JobSpec
from perdure.model.report import DeviceRow, RankRow, Snapshot
from perdure.service.jobfiles import LOCK, write_document


class LivingJob:
    """A job of 2 ranks: a directory with a snapshot in it, and a lock that says that it lives."""

    def __init__(self, home: Path) -> None:
        self.home, self.root = home, home / "jobs" / "j"
        self.root.mkdir(parents=True)
        (self.root / "job.json").write_bytes(encode(JobSpec(name="j", script="x.py", nproc=2)))
        (self.root / "endpoint.json").write_text(
            '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
        )
        self.lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.picture = Snapshot(
            version=1, job="j", state="running", at_s=0.0, started_s=0.0, generation=0, restarts=0,
            step=7, steps_per_s=8.0, world_size=2, depth="resumable", reason="",
            ranks=tuple(RankRow(r, 0, 9, "running", "step", 7, 8.0, "allreduce #7", 1.0, 1)
                        for r in range(2)),
            devices=(DeviceRow("cpu-x-0", 0, (0,), (), "in use", ("node0/slot0",)),),
        )  # fmt: skip
        self.write()

    def write(self, **changes: object) -> None:
        """Write the picture as it is now, with `changes`."""
        now = time.monotonic()
        self.picture = msgspec.structs.replace(self.picture, at_s=now, **changes)
        write_document(str(self.root / "state.json"), self.picture)

    def die(self) -> None:
        """`perdure run` is gone, and has not ended the job."""
        os.close(self.lock)
        self.lock = -1
