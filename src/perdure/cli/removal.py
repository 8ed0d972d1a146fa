"""`perdure rm`: a job that has ended leaves this machine, with its checkpoints."""

import os
import shutil
import time
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import typer

from perdure.cli.jobs import Job, find_here
from perdure.cli.speech.say import Json, Yes, answer, complete_jobs, note
from perdure.launch.records import forget_record, read_record
from perdure.model.errors import PlatformError, SafetyError
from perdure.service.jobfiles import JobLock
from perdure.service.jobfolders import resolve_home

_ASIDE = ".removed-"
"""Such a folder is no job any more."""


def rm(
    jobs: Annotated[
        list[str],
        typer.Argument(metavar="JOB...", help="Jobs that ended.", autocompletion=complete_jobs),
    ],
    checkpoints_until: Annotated[
        float | None,
        typer.Option(
            "--checkpoints-until",
            min=0,
            metavar="GB",
            help="Remove only checkpoints, until so much is free; without --yes, list them.",
        ),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove jobs that have ended, with their checkpoints and logs.

    perdure shows the list, and asks once. Checkpoints at a URL or in a folder of yours stay, and
    the script's own files as well. perdure refuses a running job (`perdure stop`), and one that was
    launched elsewhere (`perdure teardown`).

    With --checkpoints-until, the job and its logs stay, and it may run. Damaged checkpoints go
    first, then the oldest. The newest whole one, the best one (checkpoint.keep_best) and every
    other file stay.
    """
    if checkpoints_until is not None:
        from perdure.cli.checkpoints import prune

        for name in jobs:
            prune(name, checkpoints_until, yes, as_json)
        return
    home = resolve_home()
    found = [find_here(name, home) for name in dict.fromkeys(jobs)]
    rows = [_describe(job) for job in found]
    for job, row in zip(found, rows, strict=True):
        if job.alive:
            raise SafetyError(f"{job.name} runs", hint=f"perdure stop {job.name}, then again")
        record = read_record(home, job.name)
        if record is not None and record.profile.kind != "local" and not record.torn_down_s:
            hint = f"perdure pull {job.name} DIR; perdure teardown {job.name}"
            raise SafetyError(f"{job.name} was launched to another machine", hint=hint)
        if not as_json or not yes:
            note(_render(row))
    if not yes:
        _ask(len(found))
    for job in found:
        _remove(job, home)
    freed = sum(row["bytes"] for row in rows)
    text = f"removed {', '.join(row['job'] for row in rows)}; {freed / 1e9:.2f} GB"
    answer({"removed": rows, "bytes": freed}, text, as_json=as_json)


def _describe(job: Job) -> dict[str, Any]:
    root = Path(job.paths.root)
    stored = Path(job.paths.checkpoints).glob("step-*")
    steps = sorted(int(path.name[5:]) for path in stored if path.name[5:].isdigit())
    sizes = [_measure(path) for path in root.rglob("*")]
    return {"job": job.name, "bytes": sum(sizes), "checkpoints": steps, "folder": str(root)}


def _measure(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _render(row: dict[str, Any]) -> str:
    steps = row["checkpoints"]
    kept = f"{len(steps)} checkpoints up to step {steps[-1]}" if steps else "no checkpoint"
    return f"{row['job']}: {row['bytes'] / 1e9:.2f} GB in {row['folder']}, {kept}"


def _ask(count: int) -> None:
    """Ask on the terminal.

    Raises:
        SafetyError: it was not answered with yes, or nobody can be asked.
    """
    from perdure.cli.platforms.profiles import ask_person

    what = "it" if count == 1 else f"these {count}"
    if ask_person(f"remove {what} for good? [y/N] ").lower() not in ("y", "yes"):
        raise SafetyError("nothing was removed", hint="--yes removes without a question")


def _remove(job: Job, home: str) -> None:
    """Take a job's folder away under its lock, at once, and then file by file.

    Raises:
        PlatformError: something of it is still there.
    """
    root = Path(job.paths.root)
    lock = JobLock(job.paths)
    try:
        aside = root.with_name(f"{_ASIDE}{root.name}-{token_hex(4)}")
        os.rename(root, aside)
        for left in root.parent.glob(f"{_ASIDE}*"):  # Of one that was ended here before, too.
            shutil.rmtree(left)
        for folder in (job.paths.sockets, job.paths.memory):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise PlatformError(f"cannot remove {error.filename}: {error.strerror}") from error
    finally:
        lock.release()
    if read_record(home, job.name) is not None:
        forget_record(home, job.name, time.time())
