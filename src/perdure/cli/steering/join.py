"""`perdure node invite` and `perdure node join`: machines from elsewhere become nodes of a job."""

import os
import time
from functools import partial
from typing import Annotated

import typer

from perdure.cli.jobs import Job, find_job, send_command
from perdure.cli.speech.say import (
    JobName,
    Json,
    answer,
    keep_given,
    note,
    print_json,
    render_table,
)
from perdure.model.errors import ConfigError
from perdure.model.events import EXPIRES_S
from perdure.service.jobfolders import resolve_home

_ANSWER_S = 30.0


def invite(
    job: JobName,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Written there, for you alone.")
    ] = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="Such as 10m, 24h, 7d; or never.")
    ] = f"{EXPIRES_S / 3600:g}h",
    uses: Annotated[
        int, typer.Option("--uses", min=0, help="Machines that it serves; 0: all that come.")
    ] = 1,
    list_all: Annotated[
        bool,
        typer.Option("--list", help="Alone: show the invitations that there are, and their use."),
    ] = False,
    revoke: Annotated[
        str | None, typer.Option("--revoke", metavar="ID", help="Alone: revoke the invitation.")
    ] = None,
    end_login: Annotated[
        bool,
        typer.Option("--end-login", help="With --revoke: cut off machines that used it."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print what a machine needs to join a job (a secret).

    It holds a secret: pass it over a pipe or a file. By default it serves one machine, which may
    come back with it. Its first use has to be before it expires. The job has places for machines
    from elsewhere if it was started with --remote.
    """
    from perdure.model.codec import encode
    from perdure.service.access.joining import make_invitation
    from perdure.service.jobfiles import write_atomic

    found = find_job(job)
    if list_all:
        _list(found, as_json)
        return
    if revoke is not None:
        _revoke(found, revoke, end_login, as_json)
        return
    register = partial(send_command, found, "invite", timeout_s=_ANSWER_S)
    expires_s = parse_time(expires)
    invitation = make_invitation(job, resolve_home(), register, expires_s=expires_s, uses=uses)
    text = encode(invitation) + b"\n"
    if out is None:
        print(text.decode(), end="")
        return
    out = os.path.abspath(out)
    write_atomic(out, text, mode=0o600)
    document = {"job": job, "file": out, "id": invitation.id, "until_s": invitation.until_s}
    answer(document, f"{job}: invitation {invitation.id} is in {out}", as_json=as_json)


def parse_time(text: str) -> float:
    """Return seconds: of `10m`, `24h`, `7d`, `90`; 0 of `never`.

    Raises:
        ConfigError: it is none of these, or not above 0.
    """
    from perdure.cli.looking.chosen import UNITS_S

    if text == "never":
        return 0.0
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS_S else (text, "s")
    try:
        time_s = float(number) * UNITS_S[unit]
    except ValueError:
        time_s = 0.0
    if not 0 < time_s < 1e10:
        raise ConfigError(f"--expires {text}: not a time", hint="such as 10m, 24h, 7d, or never")
    return time_s


def _list(found: Job, as_json: bool) -> None:
    rows = send_command(found, "invite", {"list": True}, timeout_s=_ANSWER_S)["invitations"]
    cells = [
        (
            row["id"],
            row["state"],
            time.strftime("%F %T", time.localtime(row["until_s"])) if row["until_s"] else "never",
            f"{len(row['machines'])} of {row['uses'] or 'any'}",
            ", ".join(row["machines"].values()) or "-",
            ", ".join(map(str, row["nodes"])) or "-",
            row["who"],
        )
        for row in rows
    ]
    table = render_table(("id", "state", "until", "uses", "machines", "nodes", "by"), cells)
    text = table if rows else f"{found.name}: nobody is invited"
    answer({"job": found.name, "invitations": rows}, text, as_json=as_json)


def _revoke(found: Job, id_: str, end_login: bool, as_json: bool) -> None:
    from perdure.service.access.credentials import end_logins

    asked = keep_given(id=id_, end_login=end_login)
    result = send_command(found, "revoke", asked, timeout_s=_ANSWER_S)
    ended = result["served"] if end_login else []
    if ended:
        end_logins(found.paths, ended)
    late = "; a machine that came to it later asks for its place again"
    lines = [f"{found.name}: nobody comes by invitation {id_} any more"]
    lines += [
        f"{found.name}: the login of node {node} was ended"
        + ("" if node in result["nodes"] else late)
        for node in ended
    ]
    document = {"job": found.name, **result, "logins_ended": ended}
    answer(document, "\n".join(lines), as_json=as_json)
    moves = "" if found.spec.served else f"perdure node evict {found.name} {{0}} moves its ranks; "
    for node in () if as_json or end_login else result["nodes"]:
        note(
            f"node {node} came by it and is there, with its login: {moves.format(node)}"
            f"--revoke {id_} --end-login cuts it off"
        )


def join(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="The invitation; - is standard input.")
    ] = "-",
    address: Annotated[
        str,
        typer.Option(
            "--address", metavar="IP", help="Address at which other nodes reach this one."
        ),
    ] = "127.0.0.1",
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="What SIGTERM and SIGUSR1 leave, in seconds.")
    ] = 30.0,
    cwd: Annotated[
        str | None, typer.Option("--cwd", help="Working directory of the script on this machine.")
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="For the job and a free place, in seconds.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Make this machine a node of a running job.

    It stays until the job ends or the node is left. SIGTERM, SIGINT and SIGUSR1 are notices: the
    node is left within the grace.
    """
    from perdure.service.access.joining import join as join_job
    from perdure.service.access.joining import read_invitation, read_source

    invitation = read_invitation(read_source(source))
    home = resolve_home()

    def say(line: str) -> None:
        if as_json:
            print_json({"job": invitation.job, "event": line})
        else:
            note(line)

    if cwd is not None and not os.path.isdir(cwd):
        raise ConfigError(f"--cwd {cwd}: no such directory")
    left = join_job(
        invitation,
        home=home,
        address=address,
        grace_s=grace_s,
        cwd=os.path.abspath(cwd) if cwd else None,
        wait_s=wait_s,
        on_line=say,
    )
    raise typer.Exit(left.code)
