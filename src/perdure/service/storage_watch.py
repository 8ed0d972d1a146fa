"""Watches the room where checkpoints land while a job runs, and says so before it runs out."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from perdure.adapters.file_thread import FileThread
from perdure.adapters.storage import estimate_load, list_stored, read_free_space
from perdure.model.events import Grade, RoomNoted
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.plan.checkpoints import Budget, plan_budget

LOOK_S = 10.0
_ORDER = ("ok", "low", "short")


def compute_storage_budget(spec: JobSpec, paths: JobPaths) -> Budget | None:
    """Return whether the checkpoints to come find room; None before the first, or at a URL."""
    url = spec.checkpoint.url or paths.checkpoints
    if "://" in url:
        return None
    with contextlib.suppress(OSError):  # A file went while we looked: retention, or a person.
        stored = list_stored(Path(url), spec.checkpoint.keep_best)
        load = estimate_load(stored)
        if load is not None:
            return plan_budget(read_free_space(url), load, spec.checkpoint, held=len(stored))
    return None


class StorageWatch:
    """Tells each worsening once, and once that it is over."""

    def __init__(self, spec: JobSpec, paths: JobPaths) -> None:
        """Watch where the job's checkpoints land."""
        self._spec, self._paths = spec, paths
        self._told: Grade = "ok"

    def look(self, now: float) -> RoomNoted | None:
        """Look; return what has changed."""
        budget = compute_storage_budget(self._spec, self._paths)
        if budget is None or budget.grade == self._told:
            return None
        worse = _ORDER.index(budget.grade) > _ORDER.index(self._told)
        self._told = budget.grade
        if not worse and budget.grade != "ok":
            return None
        place = self._spec.checkpoint.url or self._paths.checkpoints
        return RoomNoted(grade=budget.grade, reason=budget.reason, place=place, at_s=now)


async def watch_free_space(
    spec: JobSpec,
    paths: JobPaths,
    clock: Callable[[], float],
    say: Callable[[str], None],
    put: Callable[[RoomNoted], None],
) -> None:
    """Look for as long as the job runs; each change is said, and becomes an event of the job."""
    watch = StorageWatch(spec, paths)
    with contextlib.closing(FileThread()) as files:  # A disk that is away keeps nobody from ending.
        while True:
            noted = await files.call(watch.look, clock())
            if noted is not None:
                say(describe(noted, spec.name))
                put(noted)
            await asyncio.sleep(LOOK_S)


def describe(noted: RoomNoted, job: str) -> str:
    """Return in one line what has changed, and what can be done."""
    if noted.grade == "ok":
        return f"storage is well again: {noted.reason}"
    hint = f"perdure rm {job} --checkpoints-until GB, or make room at {noted.place}"
    return f"storage is {noted.grade}: {noted.reason}; {hint}"
