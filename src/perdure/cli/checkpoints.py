"""`perdure verify`, `perdure rm --checkpoints-until`: is what was saved whole, and room for more.

Nothing is removed that is worth most: damaged checkpoints go first, then the oldest.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from perdure.cli.jobs import find_job
from perdure.cli.speech.say import Json, answer, note
from perdure.model.errors import ConfigError, PlatformError

if TYPE_CHECKING:
    from perdure.model.checkpoints import VerifyResult
    from perdure.model.job import JobSpec


def verify(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR|JOB",
            help="A checkpoint, a directory (URL) of them, a pull, or the job that wrote them.",
        ),
    ],
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Load what is no plain data too: it may run code."),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Load the script's own checkpoints as well.")
    ] = False,
    nothing_to_keep: Annotated[
        bool,
        typer.Option("--nothing-to-keep", help="It is right that a pull has no tensor in it."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Read checkpoints back and compare sizes and hashes.

    The directory of a `perdure pull` is compared with its list, and its tensors are loaded with
    `weights_only`. `perdure teardown` asks for this. A pull without tensors needs
    --nothing-to-keep. A job's own checkpoints (checkpoint.own) are checked too. The exit code is 3
    if something is damaged.
    """
    from perdure.adapters.checkpoints import verify_all
    from perdure.cli.platforms.pull import verify_pulled
    from perdure.cli.speech.bar import Bar
    from perdure.launch.results.pulling import read_manifest

    results: list[VerifyResult] = []
    declared: tuple[str, ...] | None = None
    if "/" not in directory and not Path(directory).exists():
        job = find_job(directory)
        directory, declared = job.checkpoints, job.spec.checkpoint.own
        results = verify_own(job.spec, full=full, allow_pickle=allow_pickle)
    if "://" not in directory:
        manifest = read_manifest(Path(directory))
        if manifest is not None:
            return verify_pulled(
                Path(directory),
                manifest,
                allow_pickle=allow_pickle,
                nothing_to_keep=nothing_to_keep,
                as_json=as_json,
            )
    if declared is None or "://" in directory or Path(directory).exists():
        with Bar(as_json=as_json) as bar:
            results += verify_all(
                directory,
                lambda number, of, share: bar.say(
                    "verify", (number + share) / of, f"checkpoint {number + 1} of {of}"
                ),
            )
    if not results:
        _refuse_nothing(directory, declared)
    words = {True: "ok", False: "DAMAGED: "}
    lines = [
        f"{f'step {r.step}' if r.step >= 0 else 'no step'}: {words[r.ok]}{'; '.join(r.problems)} "
        f"({r.bytes / 1e6:.1f} MB in {r.files} files) {r.path}"
        for r in results
    ]
    answer({"dir": directory, "checkpoints": results}, "\n".join(lines), as_json=as_json)
    return 0 if all(result.ok for result in results) else 3


def _refuse_nothing(directory: str, declared: tuple[str, ...] | None) -> NoReturn:
    """Say that there is nothing to verify; `declared` is what a job says that its script saves."""
    if declared is None:
        raise ConfigError(
            f"no checkpoints in {directory}", hint="name a directory of step-*, or of a pull"
        )
    why = f"none of the script's own matches {', '.join(declared)}"
    raise ConfigError(
        "no checkpoints: perdure has saved none, and "
        + (why if declared else "the job declares none that its script saves"),
        hint='checkpoint.own = ["out/checkpoint-*"] in the job file says where they are',
    )


def verify_own(spec: "JobSpec", *, full: bool, allow_pickle: bool) -> "list[VerifyResult]":
    """Return a result for each checkpoint that the script saved, oldest first; `full` loads them.

    One that is not understood counts as damaged only if it does not load.

    Raises:
        PlatformError: torch is not installed here, so that nothing can be loaded.
    """
    from perdure.cli.looking.own import list_own
    from perdure.launch.results.pulling import load_files
    from perdure.model.checkpoints import VerifyResult

    results = []
    for one in list_own(spec):
        problems: tuple[str, ...] = (one.why,) if one.state == "torn" else ()
        paths = _list_loadable(one.path) if full and not problems else []
        if paths:
            problems = load_files(paths, allow_pickle=allow_pickle).problems
        files = sum(len(names) for _, _, names in os.walk(one.path)) or 1
        results.append(VerifyResult(one.path, not problems, one.step, files, one.bytes, problems))
    return results


def _list_loadable(path: str) -> list[str]:
    """Return what of a checkpoint is loaded by itself: torch's files, and folders with an index.

    Of safetensors a check without a load has shown that all bytes are there.
    """
    from perdure.files.tensorfiles import is_pickle

    files, found = [path] if os.path.isfile(path) else [], list[str]()
    for base, _, names in os.walk(path):
        found += [base] if ".metadata" in names else []
        files += [f"{base}/{name}" for name in sorted(names) if not name.endswith(".distcp")]
    return found + [f for f in files if not f.endswith(".metadata") and is_pickle(Path(f))]


def prune(job: str, free_gb: float, apply: bool, as_json: bool) -> None:
    """Remove checkpoints until there is room: damaged ones first.

    After these they go from the oldest on. The newest whole one, the one with the best metric
    (checkpoint.keep_best) and every other file stay.
    """
    from perdure.adapters.storage import list_stored, read_free_space
    from perdure.plan.checkpoints import plan_pruning

    found = find_job(job)
    url = found.checkpoints
    if "://" in url:
        raise ConfigError(
            f"{url} is not a directory", hint="remove what lies there by its own tool"
        )
    stored = list_stored(Path(url), found.spec.checkpoint.keep_best)
    chosen, lack = plan_pruning(stored, read_free_space(url).bytes, int(free_gb * 1e9))
    for one in chosen if apply else ():
        remove(Path(url) / f"step-{one.step:08d}")
    freed = sum(one.bytes for one in chosen)
    document = {
        "job": job,
        "dir": url,
        "applied": apply,
        "steps": [one.step for one in chosen],
        "bytes": freed,
        "lack": lack,
    }
    word = "removed" if apply else "would remove"
    lines = [
        f"{word} step {o.step} ({o.bytes / 1e9:.2f} GB{'' if o.whole else ', damaged'})"
        for o in chosen
    ]
    lines.append(f"{word} {len(chosen)} of {len(stored)} checkpoints, {freed / 1e9:.2f} GB")
    answer(document, "\n".join(lines), as_json=as_json)
    if lack and not as_json:
        note(lack)
    if chosen and not apply and not as_json:
        note("--yes removes them")


def remove(folder: Path) -> None:
    """Remove a checkpoint.

    Raises:
        PlatformError: something of it is still there.
    """
    import shutil

    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass  # Retention was faster.
    except OSError as error:
        raise PlatformError(f"cannot remove {error.filename}: {error.strerror}") from error
