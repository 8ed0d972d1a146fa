"""Standard output and standard error of a command: whatever is written there is plain text.

This is the one edge at which text becomes a screen, so that no command has to think of it. What is
exact (a rendered script) or acts on purpose (a progress bar, a rank's colours) goes around it, by
name. Rich draws past it by itself; what it is given was made plain before.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from perdure.model.plain import show_controls


class PlainStream:
    """A text stream on which nothing acts that is written to it."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self.rich_proxied_file = stream
        """The stream itself; Rich looks for it under this name."""

    def write(self, text: str) -> int:
        """Write `text`, shown; return its own length."""
        self.rich_proxied_file.write(show_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return everything else as the stream has it."""
        return getattr(self.rich_proxied_file, name)


@contextmanager
def plain_streams() -> Iterator[None]:
    """Have both standard streams plain for as long as the context lasts."""
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, PlainStream(unwrap_stream(sys.stdout)))
    sys.stderr = cast(TextIO, PlainStream(unwrap_stream(sys.stderr)))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return the stream itself, for what acts on purpose or has to be exact."""
    found: TextIO = getattr(stream, "rich_proxied_file", stream)
    return found


def print_exact(text: str, end: str = "\n") -> None:
    """Print what may be kept as a file, such as a script, character by character."""
    print(text, end=end, file=unwrap_stream(sys.stdout))
