"""Watches the room where checkpoints land while a job runs, and says so before it runs out."""

import time
from collections.abc import Callable
from pathlib import Path

from perdure.adapters.storage import find_load, list_stored, read_room
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.plan.storage import Budget, plan_budget

LOOK_S = 10.0
_ORDER = ("ok", "low", "short")


def find_budget(spec: JobSpec, paths: JobPaths) -> Budget | None:
    """Return whether the checkpoints to come find room; None before the first, or at a URL."""
    url = spec.checkpoint.url or paths.checkpoints
    if "://" in url:
        return None
    try:
        stored = list_stored(Path(url), spec.checkpoint.keep_best)
        load = find_load(stored)
        if load is None:
            return None
        return plan_budget(read_room(url), load, spec.checkpoint, held=len(stored))
    except OSError:  # A file went while we looked: retention, or a person.
        return None


class StorageWatch:
    """Says each worsening once, and once that it is over."""

    def __init__(
        self,
        spec: JobSpec,
        paths: JobPaths,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch where the job's checkpoints land."""
        self._spec, self._paths, self._say, self._clock = spec, paths, say, clock
        self._told, self._next_s = "ok", clock()

    def look(self) -> None:
        """Look, if it is time to."""
        now = self._clock()
        if now < self._next_s:
            return
        self._next_s = now + LOOK_S
        budget = find_budget(self._spec, self._paths)
        if budget is None or budget.grade == self._told:
            return
        worse = _ORDER.index(budget.grade) > _ORDER.index(self._told)
        self._told = budget.grade
        place = self._spec.checkpoint.url or self._paths.checkpoints
        if worse:
            hint = f"perdure prune {self._spec.name} --free GB, or make room at {place}"
            self._say(f"storage is {budget.grade}: {budget.reason}; {hint}")
        elif budget.grade == "ok":
            self._say(f"storage is well again: {budget.reason}")
