"""Lines of a program's own output, such as a rank's, on standard output: with their colours."""

import sys

from perdure.model.plain import show_controls, show_output


def print_output(line: str, prefix: str = "") -> None:
    """Print one line past a stream that has no colours; whole, also between threads."""
    stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    print(f"{show_controls(prefix)}{show_output(line)}\n", end="", flush=True, file=stream)
