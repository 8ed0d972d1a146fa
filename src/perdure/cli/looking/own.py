"""The script's own checkpoints, as they are on the disk of this machine now."""

import os
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure.files.own import OwnCheckpoint
    from perdure.model.job import JobSpec

_PATIENCE_S = 5.0
"""A disk that hangs is not waited for."""
_LOOK_S = 10.0
"""Seconds between two looks for the page."""


def list_own(spec: "JobSpec") -> "list[OwnCheckpoint]":
    """Return all declared checkpoints that are here, oldest first."""
    from perdure.files.own import examine, list_declared

    found: dict[str, OwnCheckpoint] = {}  # Two patterns may match the same one.
    for pattern in spec.checkpoint.own:
        paths = list_declared(pattern, spec.cwd)
        found |= {p: examine(p, paths[n + 1 :]) for n, p in reversed([*enumerate(paths)])}
    return list(found.values())


def describe_own(spec: "JobSpec") -> dict[str, Any]:
    """Return the newest whole checkpoint of the script as a document; empty if none is declared."""
    from perdure.files.own import find_newest

    if not spec.checkpoint.own:
        return {}
    found: list[tuple[list[OwnCheckpoint], OwnCheckpoint | None]] = []

    def look() -> None:
        found.extend([find_newest(pattern, spec.cwd) for pattern in spec.checkpoint.own])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    whole = [one for _, one in found if one is not None]
    newest = max(whole, key=lambda one: one.written_s, default=None)
    later = [
        one for torn, _ in found for one in torn if newest and one.written_s > newest.written_s
    ]
    return {
        "own": {
            "declared": spec.checkpoint.own,
            "path": newest.path if newest else "",
            "format": newest.format if newest else "",
            "step": newest.step if newest else -1,
            "age_s": round(max(0.0, time.time() - newest.written_s), 1) if newest else None,
            "not_whole": [one.path for one in later],
            "error": "" if found else f"the disk has not answered for {_PATIENCE_S:g} s",
        }
    }


def render_own(document: dict[str, Any], cwd: str) -> str:
    """Return a line about the newest whole checkpoint of the script; empty if none is declared."""
    told = document.get("own")
    if told is None:
        return ""
    if told["error"]:
        return f"own checkpoints: {told['error']}"
    if not told["path"]:
        return f"own checkpoints: none that is whole matches {', '.join(told['declared'])}"
    step = f"step {told['step']}, " if told["step"] >= 0 else ""
    path = os.path.relpath(told["path"], cwd)
    line = f"own checkpoints: the newest whole one is {path} ({step}{told['age_s']:.0f} s old)"
    for later in told["not_whole"][-1:]:
        line += f"; {os.path.relpath(later, cwd)} is not whole yet"
    return line


class OwnLine:
    """The same line for a page, which no disk may hold up."""

    def __init__(self, spec: "JobSpec") -> None:
        """Look at nothing yet."""
        self._spec = spec
        self._text = ""
        self._thread: threading.Thread | None = None
        self._next_s = 0.0

    def read(self) -> str:
        """Return the newest line; every `_LOOK_S` another look begins."""
        first = self._thread is None
        over = self._thread is None or not self._thread.is_alive()
        if self._spec.checkpoint.own and over and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOOK_S
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
            self._thread.join(1.0 if first else 0.0)
        return self._text

    def _look(self) -> None:
        self._text = render_own(describe_own(self._spec), self._spec.cwd)
