"""`perdure invite`, `perdure join`: machines from elsewhere, as nodes of a job that runs."""

import os
from typing import Annotated

import typer

from perdure.cli.act import JobName
from perdure.cli.jobs import find_job
from perdure.cli.options import Json
from perdure.cli.say import note, print_json
from perdure.model.codec import encode
from perdure.model.errors import ConfigError
from perdure.service.jobfiles import resolve_home, write_atomic
from perdure.service.joining import join as join_job
from perdure.service.joining import make_invitation, read_invitation, read_source


def invite(
    job: JobName,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Written there, for you alone.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a machine needs to join a job. It holds a secret: pass it over a pipe or a file.

    The job has places for machines from elsewhere if it was started with --remote.
    """
    find_job(job)
    home = resolve_home()
    text = encode(make_invitation(job, home)) + b"\n"
    if out is None:
        print(text.decode(), end="")
        return
    out = os.path.abspath(out)
    write_atomic(out, text, mode=0o600)
    if as_json:
        print_json({"job": job, "file": out})
    else:
        print(f"{job}: the invitation is in {out}")


def join(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="The invitation; - is standard input.")
    ] = "-",
    address: Annotated[
        str, typer.Option("--address", metavar="IP", help="Where other nodes reach this one.")
    ] = "127.0.0.1",
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="What SIGTERM and SIGUSR1 leave, in seconds.")
    ] = 30.0,
    cwd: Annotated[
        str | None, typer.Option("--cwd", help="Where the script runs, if it is elsewhere here.")
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="For the job and a free place, in seconds.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Make this machine a node of a running job, until the job ends or the node is left.

    SIGTERM, SIGINT and SIGUSR1 are notices: the node is left within the grace.
    """
    invitation = read_invitation(read_source(source))
    home = resolve_home()

    def say(line: str) -> None:
        if as_json:
            print_json({"job": invitation.job, "event": line})
        else:
            note(line)

    if cwd is not None and not os.path.isdir(cwd):
        raise ConfigError(f"--cwd {cwd}: no such directory")
    code = join_job(
        invitation,
        home=home,
        address=address,
        grace_s=grace_s,
        cwd=os.path.abspath(cwd) if cwd else None,
        wait_s=wait_s,
        on_line=say,
    )
    raise typer.Exit(code)
