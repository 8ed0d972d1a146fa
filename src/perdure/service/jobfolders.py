"""Which jobs there are: folders below the state directory. What is in one is `jobfiles`' to read.

Every command asks this, also one that then has nothing to read, so that nothing of the model is
imported here but names of paths.
"""

import contextlib
import os
from pathlib import Path

from perdure.files import is_locked
from perdure.files.private import locate_job
from perdure.model.errors import ConfigError
from perdure.model.paths import JobPaths

ENDED = ("done", "failed", "stopped")
"""States of a job that has ended."""


def resolve_home(env: dict[str, str] | None = None) -> str:
    """Return the absolute state directory: `$PERDURE_HOME`, or `~/.perdure`.

    Raises:
        ConfigError: its name is not UTF-8, or it is no directory.
    """
    value = (os.environ if env is None else env).get("PERDURE_HOME") or "~/.perdure"
    home = os.path.abspath(os.path.expanduser(value))
    try:
        home.encode()
    except UnicodeEncodeError:
        hint = "set PERDURE_HOME to a folder whose name is"
        raise ConfigError(f"{home!a} is not UTF-8", hint=hint) from None
    if os.path.exists(home) and not os.path.isdir(home):
        raise ConfigError(f"PERDURE_HOME={home}: not a directory", hint="a directory, or unset it")
    return home


def paths_of(home: str, job: str) -> JobPaths:
    """Return the paths of `job` for this user."""
    return locate_job(home, job)


def list_jobs(home: str) -> list[str]:
    """Return the names of the jobs under `home`, oldest first."""
    found = []
    for path in Path(home, "jobs").glob("[!.]*/job.json"):
        with contextlib.suppress(FileNotFoundError):  # It is just being removed.
            found.append((path.parent.stat().st_mtime, path.parent.name))
    return [name for _, name in sorted(found, key=lambda each: each[0])]


def is_alive(paths: JobPaths) -> bool:
    """Return whether a `perdure run` of this job lives now."""
    return os.access(paths.lock, os.R_OK | os.W_OK) and is_locked(paths.lock)
