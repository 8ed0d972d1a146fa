"""`perdure image`: what a cluster's pods run, for any builder of images."""

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.speech.say import Json, note, print_json
from perdure.dash.terminal import print_exact
from perdure.model.platforms.kubernetes import IMAGE_BASE, NO_TORCH


def image(
    torch: Annotated[
        str | None,
        typer.Option(
            "--torch",
            metavar="VERSION",
            help=f"Such as 2.13.0+cpu or 2.13.0+cu130; {NO_TORCH}: the base has it. "
            "[default: the torch of this machine]",
        ),
    ] = None,
    base: Annotated[str, typer.Option("--base", metavar="IMAGE", help="Image to build on.")] = (
        IMAGE_BASE
    ),
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write the build context there instead."),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option("--tag", metavar="NAME", help="Its name. [default: perdure:VERSION]"),
    ] = None,
    wheel: Annotated[
        Path | None,
        typer.Option(
            "--wheel", metavar="FILE", help="perdure itself. [default: made of this installation]"
        ),
    ] = None,
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the recorder in a stage with the g++ of a Debian or Ubuntu base.",
        ),
    ] = True,
    as_json: Json = False,
) -> int:
    """Print the Dockerfile of an image for pods; build nothing."""
    import shlex

    from perdure.cli.platforms.launch import render_finding
    from perdure.launch.kubernetes.image import check_folder, make_image, write_context
    from perdure.launch.platforms import write_files

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
