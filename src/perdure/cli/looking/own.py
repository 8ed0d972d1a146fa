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


def list_own(spec: "JobSpec") -> "list[OwnCheckpoint]":
    """Return all declared checkpoints that are here, oldest first; none if the disk hangs."""
    from perdure.files.own import examine, list_declared

    found: list[OwnCheckpoint] = []

    def look() -> None:
        for pattern in spec.checkpoint.own:
            paths = list_declared(pattern, spec.cwd)
            found.extend(examine(p, paths[n + 1 :]) for n, p in reversed([*enumerate(paths)]))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return list(found)


def describe_own(spec: "JobSpec") -> dict[str, Any]:
    """Return the newest whole checkpoint of the script as a document; empty if none is declared."""
    if not spec.checkpoint.own:
        return {}
    found = list_own(spec)
    whole = [one for one in found if one.state == "whole"]
    newest = whole[-1] if whole else None
    later = [one for one in found if newest and one.written_s > newest.written_s]
    return {
        "own": {
            "declared": spec.checkpoint.own,
            "path": newest.path if newest else "",
            "format": newest.format if newest else "",
            "step": newest.step if newest else -1,
            "age_s": round(max(0.0, time.time() - newest.written_s), 1) if newest else None,
            "not_whole": [one.path for one in later],
        }
    }


def render_own(spec: "JobSpec") -> str:
    """Return a line about the newest whole checkpoint of the script; empty if none is declared."""
    told = describe_own(spec).get("own")
    if told is None:
        return ""
    if not told["path"]:
        return f"own checkpoints: none that is whole matches {', '.join(told['declared'])}"
    step = f"step {told['step']}, " if told["step"] >= 0 else ""
    path = os.path.relpath(told["path"], spec.cwd)
    line = f"own checkpoints: the newest whole one is {path} ({step}{told['age_s']:.0f} s old)"
    for later in told["not_whole"][-1:]:
        line += f"; {os.path.relpath(later, spec.cwd)} is not whole yet"
    return line
