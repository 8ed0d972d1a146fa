"""`perdure prune`: make room where checkpoints land, without losing what is worth most."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from perdure.adapters.storage import list_stored, read_room
from perdure.cli.jobs import find_job
from perdure.cli.running.options import Json
from perdure.cli.speech.say import note, print_json
from perdure.cli.steering.act import JobName
from perdure.model.errors import ConfigError, PlatformError
from perdure.plan.storage import plan_pruning


def prune(
    job: JobName,
    free_gb: Annotated[
        float, typer.Option("--free", min=0, metavar="GB", help="So much shall be free.")
    ],
    apply: Annotated[
        bool, typer.Option("--yes", help="Remove them; without it, say what would go.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints until there is room: damaged ones first, then from the oldest on.

    The newest whole one, the one with the best metric (checkpoint.keep_best) and every other file
    stay.
    """
    found = find_job(job)
    url = found.checkpoints
    if "://" in url:
        raise ConfigError(
            f"{url} is not a directory", hint="remove what lies there by its own tool"
        )
    wanted = int(free_gb * 1e9)
    room = read_room(url)
    stored = list_stored(Path(url), found.spec.checkpoint.keep_best)
    chosen, lack = plan_pruning(stored, room.bytes, wanted)
    for one in chosen if apply else ():
        remove(Path(url) / f"step-{one.step:08d}")
    freed = sum(one.bytes for one in chosen)
    if as_json:
        steps = [one.step for one in chosen]
        print_json(
            {"job": job, "dir": url, "applied": apply, "steps": steps, "bytes": freed, "lack": lack}
        )
        return
    word = "removed" if apply else "would remove"
    for one in chosen:
        damaged = "" if one.whole else ", damaged"
        print(f"{word} step {one.step} ({one.bytes / 1e9:.2f} GB{damaged})")
    print(f"{word} {len(chosen)} of {len(stored)} checkpoints, {freed / 1e9:.2f} GB")
    if lack:
        note(lack)
    if chosen and not apply:
        note("--yes removes them")


def remove(folder: Path) -> None:
    """Remove a checkpoint.

    Raises:
        PlatformError: something of it is still there.
    """
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # Retention was faster.
    except OSError as error:
        raise PlatformError(f"cannot remove {error.filename}: {error.strerror}") from error
