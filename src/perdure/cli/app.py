"""The Typer app: every command a person can type, and the one place where errors become words.

A command's module is imported once the command is asked for: most of what it takes is importing.
"""

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

import perdure
from perdure.cli.commands import COMMANDS, FIRST_DAY, PANELS, RENAMED
from perdure.cli.plugins import list_plugins, load_plugin
from perdure.cli.running.torchrun import REFUSED
from perdure.cli.speech.say import note, print_error
from perdure.dash.terminal import STDOUT, plain_streams
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.input.values import find_bad_value

UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""The class of the click that Typer uses; newer versions of Typer carry their own."""

RULE = re.compile(r"(?:(With|Without) ((?:[^\s:]+, )*(?:[^\s:]+ or )?[^\s:,]+)|Alone): ")
"""How the help of an option begins that does nothing without another, with another, or with any.

`With` names what it needs one of, an option, an argument or a value, and `Without` what rules it
out. `Alone` lets JSON and those pass that need it.
"""


class Commands(typer.core.TyperGroup):
    """All commands: each is imported once it is asked for, and none of them for the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of those that are installed, in the order of the help."""
        return [n for n, entry in COMMANDS.items() if entry.module or n in list_plugins()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one of them, imported; None where there is none of that name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write what those of the first day are for, and the names of the others by panel."""
        with formatter.section("Begin with"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in FIRST_DAY])
        with formatter.section("All others (perdure COMMAND --help)"):
            rest = {p: " ".join(n for n in of if n not in FIRST_DAY) for p, of in PANELS.items()}
            formatter.write_dl(list(rest.items()))


def load_command(name: str) -> Any:
    """Return the command `name` of the table, which is imported for it."""
    app = _make_app(cls=None)
    try:
        below = COMMANDS[name].module
        module = import_module(f"perdure.cli.{below}") if below else load_plugin(name, name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("perdure."):
            raise
        hint = "it is where the job was launched from; a notebook carries what a session needs"
        raise PlatformError(f"perdure {name} is not part of this installation", hint=hint) from None
    if hasattr(module, "app"):
        app.add_typer(module.app, name=name)
    else:
        function = getattr(module, "set_" if name == "set" else name)
        app.command(name, context_settings=getattr(module, "CONTEXT", None))(function)
    app.callback()(_global)
    command = typer.main.get_group(app).commands[name]
    _check_options(command)
    return command


def _make_app(cls: Any = Commands) -> typer.Typer:
    return typer.Typer(
        name="perdure",
        cls=cls,
        help="Training that lasts: runs PyTorch jobs on machines that fail.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


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
    args = _rename(args)
    as_json = "--json" in _own_args(args)
    try:
        try:
            app = _make_app()
            app.callback()(_global)
            command = typer.main.get_command(app)
            if "_PERDURE_COMPLETE" in os.environ:
                from perdure.cli.completion import VARIABLE, complete

                return complete(command, os.environ[VARIABLE])
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

            named = error.record.job in args  # Else it was the newest one.
            result = run_there(
                error.record, args if named else [args[0], error.record.job, *args[1:]]
            )
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
        near = get_close_matches(args[0], COMMANDS) if args else []
        hint = f"did you mean `perdure {near[0]}`?" if near and place == "perdure" else ""
        message, hint = error.format_message(), hint or f"{place} --help"
        if message == "Missing argument 'JOB'.":
            from perdure.cli.jobs import name_running

            running = name_running()
            hint = f"{place} JOB; running here: {running}" if running else hint
        return print_error(message, hint, 2, as_json=as_json)
    return result if isinstance(result, int) else 0


def _rename(args: Sequence[str]) -> Sequence[str]:
    """Return a command line with today's name in the place of an old one, and say so."""
    if not args or args[0] not in RENAMED:
        return args
    import shlex

    words, names = RENAMED[args[0]]
    parts = (word.partition("=") for word in args[1:])
    now = [*words.split(), *("".join((names.get(n, n), *rest)) for n, *rest in parts)]
    note(f"`perdure {args[0]}` is now `perdure {' '.join(shlex.join(now).split())}`")
    return now


def _check_options(command: Any) -> None:
    """Have a command, or each of a group, refuse options that it cannot take as they are given.

    `min=0` lets both infinity and what is no number pass. What stands before a help's colon is a
    rule (`RULE`), and an option that breaks it would do nothing.
    """
    for inner in getattr(command, "commands", {}).values():
        _check_options(inner)
    invoke = command.invoke

    def check(context: Any) -> Any:
        given = [
            param
            for param in command.params
            if context.get_parameter_source(param.name).name == "COMMANDLINE"
        ]
        for param in command.params:
            _, why = find_bad_value(context.params.get(param.name))
            if why:
                raise typer.BadParameter(why, ctx=context, param=param)
        names = {name for param in given for name in name_param(param)}
        for param in given:
            own = name_param(param)
            how, others = read_rule(param)
            if how == "With" and not any(
                other in names or other in context.params.values() for other in others
            ):
                raise UsageError(f"{own[0]} goes with {' or '.join(others)}", ctx=context)
            if how == "Without" and (met := names.intersection(others)):
                raise UsageError(f"{own[0]} goes without {min(met)}", ctx=context)
            if how == "Alone" and any(
                {"--json", *own}.isdisjoint([*name_param(other), *read_rule(other)[1]])
                for other in given
                if other.param_type_name == "option"
            ):
                raise UsageError(f"{own[0]} goes alone", ctx=context)
        return invoke(context)

    command.invoke = check


def name_param(param: Any) -> list[str]:
    """Return the names of an option, or the one that an argument has in the help."""
    if param.param_type_name == "option":
        return [*param.opts, *param.secondary_opts]
    return [(param.metavar or param.name.upper()).strip("[].")]


def read_rule(param: Any) -> tuple[str, list[str]]:
    """Return how the rule of an option's help begins, and what it names; both may be empty."""
    found = RULE.match(getattr(param, "help", None) or "")
    return (found[1] or "Alone", re.split(", | or ", found[2] or "")) if found else ("", [])


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
