"""What another distribution adds to perdure: commands, `drill --on`, and kinds of results.

perdure-lab has them, and they are found by entry points. If they are missing, perdure says how to
install perdure-lab.
"""

import json
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from perdure import __version__
from perdure.model.errors import PlatformError


def list_plugins() -> dict[str, Any]:
    """Return name -> entry point; those of another version than perdure's do not count."""
    from importlib import metadata

    labs = metadata.distributions(name="perdure-lab")  # To search all of them takes 0.1 s.
    return {e.name: e for lab in labs if lab.version == __version__ for e in lab.entry_points}


def load_plugin(name: str, what: str) -> Any:
    """Return what perdure-lab has under `name`; a person typed `perdure what`.

    Raises:
        PlatformError: perdure-lab is not installed here.
    """
    if (found := list_plugins().get(name)) is None:
        raise PlatformError(
            f"perdure {what} is part of perdure-lab {__version__}, which is not installed",
            hint=tell_install(),
        )
    return found.load()


def tell_install() -> str:
    """Return the command that installs perdure-lab beside this perdure, from the same place."""
    from importlib import metadata

    # None: perdure is only on the path, and not installed.
    own = next(iter(metadata.distributions(name="perdure")), None)
    origin = json.loads((own and own.read_text("direct_url.json")) or "{}")
    url, commit = str(origin.get("url", "")), origin.get("vcs_info", {}).get("commit_id")
    place = Path(unquote(urlsplit(url).path))
    there = [
        str(path)
        for path in (place / "lab", *place.parent.glob(f"perdure_lab-{__version__}-*.whl"))
        if url.startswith("file:") and path.exists()
    ]
    if commit:
        there = [f"perdure-lab @ git+{url}@{commit}#subdirectory=lab"]
    elif own and not url:
        there = [f"perdure-lab=={__version__}"]
    if not there:
        return f"`pip install ./lab` in a checkout of perdure {__version__}"
    pip = (
        [sys.executable, "-m", "pip", "install"]
        if find_spec("pip")
        else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*pip, there[0]])
