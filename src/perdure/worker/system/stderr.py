"""What perdure has to say inside a rank: a line on its standard error, at no cost to anybody.

A script may have closed that stream, put anything in its place or filled its disk. None of that is
a reason to end a training, a thread of perdure's, or the fact that comes after the line.
"""

import contextlib
import sys


def say(text: str) -> None:
    """Print `text` as perdure's; where that cannot be done, do nothing."""
    with contextlib.suppress(Exception):
        print(f"perdure: {text}", file=sys.stderr, flush=True)
