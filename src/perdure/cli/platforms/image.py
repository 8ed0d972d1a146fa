"""`perdure launch --write-image`: what a cluster's pods run, for any builder of images."""

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.speech.say import note, print_json
from perdure.dash.terminal import print_exact
from perdure.model.platforms.kubernetes import NO_TORCH

WriteImage = Annotated[
    Path | None,
    typer.Option(
        "--write-image",
        metavar="DIR",
        help="Alone: write the build context of an image for pods; - prints its Dockerfile.",
    ),
]
Torch = Annotated[
    str | None,
    typer.Option(
        "--torch",
        metavar="VERSION",
        help=f"With --write-image: its torch, such as 2.13.0+cu130; {NO_TORCH}: the base has it. "
        "[default: the torch of this machine]",
    ),
]
Wheel = Annotated[
    Path | None,
    typer.Option(
        "--wheel",
        metavar="FILE",
        help="With --write-image: perdure itself. [default: made of this installation]",
    ),
]
Compiles = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="With --write-image: compile the recorder, with the g++ of a Debian or Ubuntu base.",
    ),
]


def write_image(
    target: Path,
    torch: str | None,
    base: str,
    tag: str | None,
    wheel: Path | None,
    compiles: bool,
    as_json: bool,
) -> int:
    """Write the build context of an image for pods, or print its Dockerfile; build nothing."""
    import shlex

    from perdure.cli.platforms.launch import render_finding
    from perdure.launch.kubernetes.image import check_folder, make_image, write_context
    from perdure.launch.platforms import write_files

    out = None if str(target) == "-" else target
    if out is not None:
        check_folder(out)
    folder = str(out or "DIR")
    made = make_image(
        base=base, torch=torch, tag=tag, wheel=wheel, compiles=compiles, folder=folder
    )
    if out is not None:
        write_files(made.files, out)
        write_context(made, out, wheel)
    if as_json:
        print_json(made)
    elif out is not None:
        for name in (*made.files, made.wheel):
            print(out / name)
    else:
        for name, content in made.files.items():
            print(f"# ==> {name} <==")
            print_exact(content, end="")
    for finding in made.findings:
        note(render_finding(finding))
    if out is not None:
        note(f"builds it: {shlex.join(made.build)}")
    return 0
