"""The program `perdure`: its own parts are started at once, everything else goes to the app.

The parts (controller, lighthouse, agent, keeper, zygote) are started by perdure itself, live as
long as the job, and are paid for by it: they import neither Typer nor Rich. Nothing in this room
imports torch.
"""

import contextlib
import os
import sys
from collections.abc import Sequence

from perdure.cli.speech.unread import unread_streams
from perdure.model.errors import PerdureError

PARTS = {
    "controller": "JOB [NODE]",
    "lighthouse": "JOB",
    "agent": "JOB NODE",
    "keeper": "JOB NODE",
    "zygote": "JOB NODE FD",
}
"""Hidden commands, started by perdure itself, and their arguments."""

WATCHERS = (["run"], ["join"], ["queue"])
"""Commands that watch over others, whom an unread terminal or pipe shall not stop."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and leave with its exit code."""
    open_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0] in PARTS:
        try:
            sys.exit(run_part(args[0], args[1:]))
        except PerdureError as error:
            print(f"perdure: error: {error}\nhint: {error.hint}", file=sys.stderr)
            sys.exit(error.exit_code)
    from perdure.cli.app import run_command

    with unread_streams() if args[:1] in WATCHERS else contextlib.nullcontext():
        code = run_command(args)
    sys.exit(code)


def open_streams() -> None:
    """Open those standard streams that were closed, so that no other file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # The lowest number that is free: its own.
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def run_part(part: str, args: Sequence[str]) -> int:
    """Be a part of a job; return its exit code."""
    want = PARTS[part].split()
    least = sum(not word.startswith("[") for word in want)
    if not least <= len(args) <= len(want) or not all(arg.isdigit() for arg in args[1:]):
        print(f"perdure: error: usage: perdure {part} {PARTS[part]}", file=sys.stderr)
        print("hint: `perdure run` starts it; it is not meant for people", file=sys.stderr)
        return 2
    job, numbers = args[0], [int(arg) for arg in args[1:]]
    match part:
        case "controller":
            from perdure.service.controller.process import main as controller

            return controller(job, *numbers)
        case "lighthouse":
            from perdure.service.lighthouse import main as lighthouse

            return lighthouse(job)
        case "agent":
            from perdure.service.agent.shell import main as agent

            return agent(job, numbers[0])
        case "keeper":
            from perdure.keeper.keeper import main as keeper

            keeper(job, numbers[0])
        case _:
            from perdure.keeper.zygote import main as zygote

            zygote(job, numbers[0], numbers[1])
    return 0
