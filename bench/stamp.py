"""What a figure has to carry: the commit that was measured, the load, and when."""

import os
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def name_commit(*paths: str) -> str:
    """Return the newest commit of `paths` (of all, without any); `+` where files differ from it."""
    log = ["log", "-1", "--format=%h", "--abbrev=8", "--", *paths]
    changed = _git("status", "--porcelain", "--", *(paths or (".",)))
    return (_git(*log) or "unknown") + ("+" if changed else "")


def take_load() -> float:
    """Return the machine's load over the last minute."""
    return round(os.getloadavg()[0], 1)


def stamp(*paths: str) -> dict[str, object]:
    """Return what a row of results begins with; `thresholds` is the newest commit of `paths`."""
    row: dict[str, object] = {"commit": name_commit(), "load": take_load()}
    row["at"] = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
    return row | ({"thresholds": name_commit(*paths)} if paths else {})


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
