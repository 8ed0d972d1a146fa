"""`perdure schema`: what goes over the bus, for programs that perdure did not write."""

from typing import Annotated

import msgspec
import typer

import perdure
from perdure.cli.speech.say import Json
from perdure.model.bus.access import ROLES, build_access
from perdure.model.bus.asyncapi import make_asyncapi


def schema(
    permissions: Annotated[
        str | None,
        typer.Option(
            "--permissions", metavar="JOB", help="Instead: permissions by role, for your own NATS."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the AsyncAPI document of all messages, or the permissions that each role needs.

    Both are JSON, with or without --json.
    """
    if permissions is None:
        document = make_asyncapi(perdure.__version__)
    else:
        document = {role: msgspec.to_builtins(build_access(role, permissions)) for role in ROLES}
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
