"""`perdure verify DIR|JOB`: whether checkpoints, or all that was pulled, are whole."""

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.jobs import find_job
from perdure.cli.running.options import Json
from perdure.cli.speech.say import print_json
from perdure.model.errors import ConfigError


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
    nothing_to_keep: Annotated[
        bool,
        typer.Option("--nothing-to-keep", help="It is right that a pull has no tensor in it."),
    ] = False,
    as_json: Json = False,
) -> int:
    """Read checkpoints back and compare sizes and hashes.

    A directory that `perdure pull` has filled is compared with its roster, and everything in it
    that has tensors is loaded with `weights_only`: the proof that `perdure teardown` asks for.
    A pull without a single tensor is no proof, but with --nothing-to-keep.
    Leaves with 3 if something is damaged.
    """
    from perdure.adapters.checkpoints import verify_all
    from perdure.cli.platforms.pull import verify_pulled
    from perdure.launch.results.pulling import read_manifest

    if "/" not in directory and not Path(directory).exists():
        directory = find_job(directory).checkpoints
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
    results = verify_all(directory)
    if not results:
        raise ConfigError(
            f"no checkpoints in {directory}", hint="name a directory of step-*, or of a pull"
        )
    if as_json:
        print_json({"dir": directory, "checkpoints": results})
    else:
        for result in results:
            size = f"{result.bytes / 1e6:.1f} MB in {result.files} files"
            word = "ok" if result.ok else "DAMAGED: " + "; ".join(result.problems)
            print(f"step {result.step}: {word} ({size}) {result.path}")
    return 0 if all(result.ok for result in results) else 3
