"""The Typer app: every command a person can type, and the one place where errors become words.

A command's module is imported once the command is asked for, and all of them only for the help:
most of what a command takes is importing.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import perdure
from perdure.cli.running.torchrun import REFUSED
from perdure.cli.speech.say import print_error
from perdure.dash.terminal import STDOUT, plain_streams
from perdure.model.errors import PerdureError
from perdure.model.values import find_bad_value

UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""The class of the click that Typer uses; newer versions of Typer carry their own."""

COMMANDS = {
    "ps": "looking.look",
    "status": "looking.look",
    "watch": "looking.watch",
    "logs": "looking.output",
    "events": "looking.output",
    "map": "looking.look",
    "diagnose": "looking.look",
    "report": "looking.look",
    "bundle": "looking.bundle",
    "metrics": "looking.metrics",
    "inject": "steering.act",
    "checkpoint": "steering.act",
    "stop": "steering.act",
    "note": "steering.act",
    "set": "steering.act",
    "pause": "steering.act",
    "resume": "steering.act",
    "drain": "steering.act",
    "cordon": "steering.act",
    "evict": "steering.act",
    "restore": "steering.act",
    "notify": "steering.act",
    "invite": "steering.join",
    "join": "steering.join",
    "scale": "platforms.remote",
    "schema": "looking.schema",
    "verify": "checkpoints",
    "doctor": "looking.doctor",
    "plan": "plan",
    "prune": "checkpoints",
    "launch": "platforms.launch",
    "render": "platforms.launch",
    "image": "platforms.image",
    "profiles": "platforms.profiles",
    "attach": "platforms.remote",
    "tunnel": "platforms.remote",
    "pull": "platforms.pull",
    "teardown": "platforms.teardown",
    "forget": "platforms.teardown",
    "remind": "platforms.remote",
    "run": "running.run",
    "serve": "running.serve",
    "profile": "profile",
    "trace": "drive",  # Which adds its command to those of `trace`.
    "queue": "queue",
}
"""The module of each command, in the order of the help."""

_FUNCTIONS = {"map": "map_devices", "set": "set_"}
"""Names of the functions behind commands whose own name Python does not allow."""


def make_app(names: Sequence[str] = tuple(COMMANDS)) -> typer.Typer:
    """Return the app with these commands, whose modules are imported for it."""
    app = typer.Typer(
        name="perdure",
        help="Training that lasts: runs PyTorch jobs on machines that fail.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global)
    for name in names:
        module = import_module(f"perdure.cli.{COMMANDS[name]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            function = getattr(module, _FUNCTIONS.get(name, name))
            app.command(name, context_settings=getattr(module, "CONTEXT", None))(function)
    return app


def _show_version(value: bool) -> None:
    if value:
        print(f"perdure {perdure.__version__}")
        raise typer.Exit


def _global(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@plain_streams()
def run_command(args: Sequence[str]) -> int:
    """Run one command line, on plain streams; return the exit code. All errors are printed here."""
    as_json = "--json" in _own_args(args)
    try:
        try:
            known = args and args[0] in COMMANDS
            command = typer.main.get_command(make_app(args[:1]) if known else make_app())
            _check_numbers(command)
            # Its own `main` would leave with exit code 1 where nobody reads on.
            with command.make_context("perdure", list(args)) as context:
                result = command.invoke(context)
        except typer.Exit as done:
            result = done.exit_code
        except PerdureError as error:
            from perdure.cli.jobs import ElsewhereError

            if not isinstance(error, ElsewhereError):
                raise
            from perdure.cli.platforms.remote import run_there

            result = run_there(error.record, args)
        sys.stdout.flush()  # Here it is known whose fault it is that it cannot be written.
    except PerdureError as error:
        return print_error(error.message, error.hint, error.exit_code, as_json=as_json)
    except (typer.Abort, EOFError, KeyboardInterrupt):
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename == STDOUT:
            return 0  # `perdure logs JOB | head`: nobody reads on.
        place = f"{error.filename}: " if error.filename else ""
        return print_error(f"{place}{error.strerror or error}", "", 3, as_json=as_json)
    except Exception as error:
        if not isinstance(error, UsageError):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        name = str(getattr(error, "option_name", "")).split("=")[0].replace("_", "-")
        if name in REFUSED:
            text = f"{name} of torchrun is not taken by perdure run"
            return print_error(text, REFUSED[name], 2, as_json=as_json)
        place = error.ctx.command_path if error.ctx else "perdure"
        return print_error(error.format_message(), f"{place} --help", 2, as_json=as_json)
    return result if isinstance(result, int) else 0


def _check_numbers(command: Any) -> None:
    """Have a command, or each of a group, refuse options whose numbers cannot be taken.

    `min=0` lets both infinity and what is no number pass.
    """
    for inner in getattr(command, "commands", {}).values():
        _check_numbers(inner)
    invoke = command.invoke

    def check(context: Any) -> Any:
        for param in command.params:
            _, why = find_bad_value(context.params.get(param.name))
            if why:
                raise typer.BadParameter(why, ctx=context, param=param)
        return invoke(context)

    command.invoke = check


def _own_args(args: Sequence[str]) -> Sequence[str]:
    """Return the arguments that are perdure's own: of `run` and `profile`, those before the script.

    Whether a word is a script or an option's value is only known to the parser; here it is enough
    that a word after an option may be its value.
    """
    if not args or args[0] not in ("run", "profile"):
        return args
    for index, arg in enumerate(args[1:], start=1):
        if not arg.startswith("-") and not args[index - 1].startswith("-"):
            return args[:index]
    return args
