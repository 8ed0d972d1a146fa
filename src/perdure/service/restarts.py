"""What the ranks' output files say of the restarts of a script that declares no steps."""

import os
import shlex

from perdure.files.rotation import measure_file, read_piece
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.telemetry.restarts import Began, judge_restart

_HEAD_BYTES = 1 << 16
_LOOK_BACK = 3
"""Generations before this one that may have printed nothing."""
_RANKS = 4
"""Ranks of which the first one that prints how far it is, is believed: often that is rank 0."""

_WAIT_S = 120.0
"""For so long after a restart the script may be silent before nothing can be told."""


def read_began(paths: JobPaths, spec: JobSpec, generation: int) -> Began | None:
    """Return where the script began in a generation, beside the one before; None: not known.

    One that died before it printed anything is passed over.
    """
    for rank in range(min(_RANKS, spec.world_size)):
        for name in ("out", "err"):
            after = _read(paths.stream(generation, rank, name, spec.log_dir), 0)
            for earlier in range(generation - 1, max(-1, generation - 1 - _LOOK_BACK), -1):
                before = paths.stream(earlier, rank, name, spec.log_dir)
                found = judge_restart(_read(before, 0), _read(before, -_HEAD_BYTES), after)
                if found is not None:
                    return found
    return None


def _read(path: str, offset: int) -> list[str]:
    """Return the whole lines at the front of a file, or at its end for a negative `offset`.

    None at the front where that was cut away. A bar is redrawn after a carriage return: each of
    its states is a line.
    """
    if not os.path.exists(path):
        return []
    begin = offset if offset >= 0 else max(0, measure_file(path) + offset)
    at, data = read_piece(path, begin, _HEAD_BYTES)
    if offset >= 0 and at > begin:
        return []
    lines = data.decode(errors="replace").replace("\r", "\n").split("\n")
    return lines[0 if begin == 0 else 1 : -1]


class RestartWatch:
    """Tells once, after each restart of a script that declares no steps, where it began again."""

    def __init__(self, paths: JobPaths, spec: JobSpec) -> None:
        """Begin with the generation that is there first."""
        self._paths, self._spec = paths, spec
        self._told: int | None = None
        self._until_s = 0.0

    def tell(self, generation: int, *, declares_steps: bool, now_s: float) -> str:
        """Return a line once it is known, else an empty text; `now_s` is job time, in seconds."""
        if self._told is None or declares_steps:
            self._told = max(generation, 0)  # The first start is no restart.
        if generation <= self._told:
            self._until_s = now_s + _WAIT_S
            return ""
        began = read_began(self._paths, self._spec, generation)
        if began is None and now_s < self._until_s:
            return ""
        self._told = generation
        what = began.describe() if began else "what was lost is not known: no steps are declared"
        if began and began.where == "further":
            return f"warning: {what}"
        return f"warning: {what}; {hint_at_lines(self._spec)}"


def hint_at_lines(spec: JobSpec) -> str:
    """Return what would have had a script go on from a checkpoint."""
    lines = "with perdure.init() it would have gone on from a checkpoint"
    if spec.module or spec.no_python:
        return lines
    return f"{lines}: perdure init {shlex.quote(os.path.relpath(spec.script))} proposes the lines"
