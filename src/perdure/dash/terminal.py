"""Standard output and standard error of a command: whatever is written there is plain text.

This is the one edge at which text becomes a screen, so that no command has to think of it. What is
exact (a rendered script) or acts on purpose (a progress bar, a rank's colours) goes around it, by
name. Rich draws past it by itself; what it is given was made plain before.
"""

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from perdure.model.input.plain import show_controls

STDOUT = "standard output"
"""What an error in writing there has for its file."""


class PlainStream:
    """A text stream on which nothing acts that is written to it."""

    def __init__(self, stream: TextIO, name: str = "") -> None:
        """Write to `stream`; errors of the disk behind it have `name` for their file."""
        self.rich_proxied_file = stream
        """The stream itself; Rich looks for it under this name."""
        self._place = name

    def write(self, text: str) -> int:
        """Write `text`, shown; return its own length."""
        with _placed(self._place):
            self.rich_proxied_file.write(show_controls(text))
        return len(text)

    def write_exact(self, text: str) -> int:
        """Write `text` as it is; return its length."""
        with _placed(self._place):
            return self.rich_proxied_file.write(text)

    def flush(self) -> None:
        """Write what is held back."""
        with _placed(self._place):
            self.rich_proxied_file.flush()

    def writelines(self, lines: Any) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return everything else as the stream has it."""
        return getattr(self.rich_proxied_file, name)


@contextmanager
def _placed(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = error.filename or name
        raise


_NEAR = {"…": "...", "·": "-", "▲": "!", "→": "->", "↔": "<->", "—": "-", "┊": "|"}
"""Characters of perdure's own texts -> what stands for them where a stream has only ASCII."""


def _replace(error: UnicodeError) -> tuple[str, int]:
    """Return what is printed for characters that the encoding of a stream lacks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    near = [_NEAR.get(c, "#" if "\u2580" <= c <= "\u259f" else "?") for c in lacking]
    return "".join(near), error.end


codecs.register_error("perdure", _replace)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Have both standard streams plain for as long as the context lasts.

    A character that a stream's encoding lacks (LC_ALL=C) is replaced, and stops no command.
    What one of them then still holds and cannot write (its disk is full, nobody reads on) is
    dropped: Python would try again as it ends, and leave with exit code 120.
    """
    before = sys.stdout, sys.stderr
    for stream in map(unwrap_stream, before):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="perdure")
    sys.stdout = cast(TextIO, PlainStream(unwrap_stream(sys.stdout), STDOUT))
    sys.stderr = cast(TextIO, PlainStream(unwrap_stream(sys.stderr), "standard error"))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in before:
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return the stream itself, for what acts on purpose or has to be exact."""
    found: TextIO = getattr(stream, "rich_proxied_file", stream)
    return found


def print_exact(text: str, end: str = "\n") -> None:
    """Print what may be kept as a file, such as a script, character by character."""
    with _placed(STDOUT):
        print(text, end=end, file=unwrap_stream(sys.stdout))
