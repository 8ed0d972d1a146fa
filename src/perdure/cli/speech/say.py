"""How the command line speaks: errors in two lines or as JSON, documents, and perdure's notes.

The options that many commands share are here as well, since they choose how is spoken.
What a person asked for goes to standard output; what perdure has to add goes to standard error.
"""

import ast
import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.speech.pages import point_to_pages
from perdure.model.codec import encode
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.input.plain import shorten_line, show_controls


def complete_jobs(incomplete: str) -> list[str]:
    """Return the names of jobs that begin like this, the newest first."""
    from perdure.service.jobfolders import list_jobs, resolve_home

    return [name for name in reversed(list_jobs(resolve_home())) if name.startswith(incomplete)]


def choose_newest_job() -> str:
    """Return the newest job's name, for a command that only looks and was given none.

    Raises:
        ConfigError: there is no job.
    """
    from perdure.service.jobfolders import list_jobs, resolve_home

    home = resolve_home()
    names = list_jobs(home)
    if not names:
        raise ConfigError(f"there are no jobs under {home}", hint="perdure run SCRIPT starts one")
    return names[-1]


JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's name.", autocompletion=complete_jobs)
]
AnyJob = Annotated[
    str,
    typer.Argument(
        metavar="[JOB]",
        help="The job's name; else the newest.",
        default_factory=choose_newest_job,
        show_default=False,
        autocompletion=complete_jobs,
    ),
]
"""Of a command that only looks."""
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without a question.")]
Json = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]
Timeout = Annotated[
    float, typer.Option("--timeout-s", min=0.1, help="How long to wait for the answer.")
]
Width = Annotated[int, typer.Option("--width", min=40, help="Columns of the text.")]

_ERROR_MAX = 2000
"""Characters of an error in words."""


def print_error(message: str, hint: str, exit_code: int, *, as_json: bool) -> int:
    """Print one error as `perdure: error: ...` and `hint: ...`, or as JSON; return its code.

    Where standard output takes no JSON (its disk is full), standard error has the two lines. What
    quotes a value of kilobytes is shown with both its ends; JSON has all of it.
    """
    message, hint = point_to_pages(message), point_to_pages(hint)
    with contextlib.suppress(OSError):
        if as_json:
            document = {"error": message, "hint": hint, "exit_code": exit_code}
            print(json.dumps(document), flush=True)
            return exit_code
    with contextlib.suppress(OSError):  # Then the code says it alone.
        print(f"perdure: error: {shorten_line(message, _ERROR_MAX)}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr, flush=True)
    return exit_code


def note(text: str) -> None:
    """Say something beside the answer."""
    print(f"perdure: {point_to_pages(text)}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print one document on one line; structs become objects."""
    print(encode(value).decode(), flush=True)


def answer(document: Any, text: str, *, as_json: bool) -> None:
    """Print what a command was asked for: as one document, or in words."""
    if as_json:
        print_json(document)
    else:
        print(text, flush=True)


def keep_given(**options: Any) -> dict[str, Any]:
    """Return the options that were given: None, False and an empty text say nothing."""
    return {k: v for k, v in options.items() if v is not None and v is not False and v != ""}


@cache
def read_meanings(type_: type) -> dict[str, str]:
    """Return field -> what its docstring says, where it is defined."""
    (class_,) = ast.parse(inspect.getsource(type_)).body
    assert isinstance(class_, ast.ClassDef)
    found: dict[str, str] = {}
    for pair in pairwise(class_.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = " ".join(str(text).split())
    return found


def check_writable(*asked: Path | None) -> None:
    """Refuse files that could not be written once all was played.

    Raises:
        ConfigError: the folder of one of them cannot be written.
    """
    for path in asked:
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            raise ConfigError(f"{path}: its folder cannot be written", hint="another FILE")


def write_asked(path: Path, text: str, *, hint: str = "another FILE") -> None:
    """Write what was asked for beside the answer, and say so.

    Raises:
        PlatformError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    note(f"wrote {path}")


def hear_stop() -> None:
    """Have SIGTERM end a play as Ctrl-C does, and the hang-up of its terminal, but under nohup."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


@contextlib.contextmanager
def show_play(name: str) -> Iterator[Any]:
    """Give the bar of a play, which waits for no reader, and ends by Ctrl-C and SIGTERM."""
    from perdure.cli.speech.bar import Bar
    from perdure.cli.speech.unread import unread_streams

    hear_stop()
    with unread_streams(), Bar(name) as bar:
        yield bar


def render_table(head: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> str:
    """Return a table with columns as wide as their widest cell; numbers lean to the right."""
    # On one line each, and as wide as it is counted.
    from perdure.dash.shape import align

    shown = [[show_controls(str(cell)).replace("\n", "\\n") for cell in row] for row in rows]
    right = [
        column
        for column in range(len(head))
        if rows and all(isinstance(r[column], int | float) or r[column] == "-" for r in rows)
    ]
    return "\n".join(align([head, *shown], right))
