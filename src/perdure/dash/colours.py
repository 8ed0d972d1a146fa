"""Colours of a terminal for words of perdure's own; what else a text has is shown as it is.

There are none where standard output is no terminal, where NO_COLOR is set to anything, or where
TERM is `dumb`: https://no-color.org.
"""

import os
import re
import sys

from perdure.dash.terminal import print_exact, unwrap_stream
from perdure.model.input.plain import show_controls

_STATES = {
    "running": "32", "training": "32", "done": "32", "failed": "31", "lost": "31", "gone": "31",
    "stopped": "33", "paused": "33", "forming": "33", "draining": "33", "pending": "33",
}  # fmt: skip
"""State -> what SGR calls its colour: green, red, yellow."""
_STATE = re.compile(rf"(?<=[ :] )(?:{'|'.join(_STATES)})\b|(?<=^)over, .*$")


def wants_colour() -> bool:
    """Return whether a person looks at standard output, and wants colours."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and unwrap_stream(sys.stdout).isatty()


def paint(text: str) -> str:
    """Return `text`, shown, with the first state of each line in its colour; the past is dim."""
    return "\n".join(_STATE.sub(_colour, show_controls(line), count=1) for line in text.split("\n"))


def _colour(match: re.Match[str]) -> str:
    return f"\x1b[{_STATES.get(match[0], '2')}m{match[0]}\x1b[0m"


def print_painted(text: str) -> None:
    """Print `text`, in colours where they are wanted."""
    if wants_colour():
        print_exact(paint(text))
    else:
        print(text, flush=True)
