"""`perdure verify DIR`: whether checkpoints are whole."""

from typing import Annotated

import typer

from perdure.cli.options import Json
from perdure.cli.say import print_json
from perdure.model.errors import ConfigError


def verify(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, or a directory (URL) of them.")
    ],
    as_json: Json = False,
) -> int:
    """Read checkpoints back and compare sizes and hashes; nothing is loaded or changed.

    Leaves with 3 if one is damaged.
    """
    from perdure.adapters.checkpoints import verify_all

    results = verify_all(directory)
    if not results:
        raise ConfigError(f"no checkpoints in {directory}", hint="name a directory of step-*")
    if as_json:
        print_json({"dir": directory, "checkpoints": results})
    else:
        for result in results:
            size = f"{result.bytes / 1e6:.1f} MB in {result.files} files"
            word = "ok" if result.ok else "DAMAGED: " + "; ".join(result.problems)
            print(f"step {result.step}: {word} ({size}) {result.path}")
    return 0 if all(result.ok for result in results) else 3
