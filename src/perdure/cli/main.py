"""The program `perdure`: its own parts are started at once, everything else goes to the app.

The parts (controller, lighthouse, relay, agent, keeper, zygote) are started by perdure itself, live
as long as the job, and are paid for by it: they import neither Typer nor Rich. Nothing in this room
imports torch.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from perdure.cli.speech.unread import unread_streams
from perdure.model.errors import PerdureError

PARTS = {
    "controller": ("service.controller.process", "JOB"),
    "lighthouse": ("service.lighthouse.process", "JOB"),
    "relay": ("service.lighthouse.replica_relay", "JOB PLACE"),
    "agent": ("service.agent.shell", "JOB NODE"),
    "keeper": ("keeper.keeper", "JOB NODE"),
    "zygote": ("keeper.zygote", "JOB NODE FD"),
}
"""Hidden commands, started by perdure itself: the module of each, and its arguments."""

_COLLECT_EVERY = 100_000
"""Objects between two looks for cycles: at 700, a fifth of what reading a long journal takes."""

WATCHERS = (["run"], ["serve"], ["node", "join"], ["join"], ["queue", "run"])
"""Commands that watch over others, whom an unread terminal or pipe shall not stop."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line and leave with its exit code."""
    open_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        import_module("perdure.failpoints")  # Which refuses a variable that it cannot read.
        if args and args[0] in PARTS:
            sys.exit(run_part(args[0], args[1:]))
    except PerdureError as error:
        print(f"perdure: error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    gc.set_threshold(_COLLECT_EVERY)
    from perdure.cli.app import run_command

    watches = any(args[: len(words)] == words for words in WATCHERS)
    with unread_streams() if watches else contextlib.nullcontext():
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
    module, usage = PARTS[part]
    if len(args) != len(usage.split()) or not all(arg.isdigit() for arg in args[1:]):
        print(f"perdure: error: usage: perdure {part} {usage}", file=sys.stderr)
        print("hint: `perdure run` starts it; it is not meant for people", file=sys.stderr)
        return 2
    return import_module(f"perdure.{module}").main(args[0], *map(int, args[1:])) or 0
