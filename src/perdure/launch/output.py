"""Lines of a program's own output, such as a rank's, on standard output: with their colours, once.

What is followed comes over as many connections as it takes, each of which tells it from the
beginning; whoever shows its lines knows which were shown.
"""

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from perdure.launch.exchange import UnfinishedError, listen, read_lines
from perdure.model.plain import show_controls, show_output

FOLLOWS = {"-f", "--follow", "--watch"}
SILENCE_S = 60.0
"""Without a byte for so long, a place that has all it is asked for by now is given up."""
_LEFT_OUT = 60
"""Characters that are shown of a line that cannot be read."""


def print_output(line: str, prefix: str = "") -> None:
    """Print one line past a stream that has no colours; whole, also between threads."""
    stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    print(f"{show_controls(prefix)}{show_output(line)}\n", end="", flush=True, file=stream)


def name_first(names: Sequence[str], count: int = 3, between: str = ", ") -> str:
    """Return the first of some names, and how many more there are.

    >>> name_first(["a", "b", "c", "d", "e"]), name_first(["a"])
    ('a, b, c and 2 more', 'a')
    """
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{between.join(names[:count])}{more}"


def show_lines(
    command: Sequence[str], silence_s: float | None, env: Mapping[str, str] | None = None
) -> int:
    """Run a command of this machine, show its lines as they come, and return its exit code.

    Raises:
        UnfinishedError: for `silence_s` nothing came, neither a byte nor the end.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    try:
        for data in read_lines(listen(process.stdout, silence_s)):
            print_output(data.decode(errors="replace").removesuffix("\n"))
        return process.wait(silence_s)
    except subprocess.TimeoutExpired:
        raise UnfinishedError(
            f"{command[0]} says nothing, and does not end, for {silence_s:g} s",
            hint="this says nothing about the job; kubectl cluster-info says how the cluster is",
        ) from None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def make_lines(argv: Sequence[str], turn: threading.Event | None = None) -> "Lines":
    """Return what shows the lines of a command that follows; those of ranks not before `turn`."""
    one = any(word.split("=")[0] == "--rank" for word in argv)
    return _LogLines("--json" in argv, one, turn) if argv[0] == "logs" else _Numbered()


class _LogLines:
    """Lines of ranks, each shown once: the n-th of a stream is the same on every connection."""

    def __init__(self, as_json: bool, one: bool, turn: threading.Event | None) -> None:
        self.shown = 0
        self._as_json, self._one, self._turn = as_json, one, turn
        self._seen: Counter[tuple[int, int, str]] = Counter()
        self._now: Counter[tuple[int, int, str]] = Counter()

    def begin(self) -> None:
        """A new connection tells everything from the beginning."""
        self._now.clear()

    def __call__(self, line: str) -> None:
        if self._turn is not None:
            self._turn.wait()
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError:  # Of a line that is too long to be one; or none of ours.
            print(f"left out: {line[:_LEFT_OUT]!r}", file=sys.stderr, flush=True)
            return
        if "generation" not in row:  # The command's own error: there is no such job there.
            if self._as_json:
                print(line, end="", flush=True)
                return
            hint = f"\nhint: {row['hint']}" if row.get("hint") else ""
            print(f"perdure: error: {row.get('error')}{hint}", file=sys.stderr, flush=True)
            return
        stream = (row["generation"], row["rank"], row["stream"])
        self._now[stream] += 1
        if self._now[stream] <= self._seen[stream]:
            return
        self._seen[stream] += 1
        self.shown += 1
        if self._as_json:
            print(line, end="", flush=True)
        else:
            prefix = "" if self._one or row["rank"] < 0 else f"[rank {row['rank']}] "
            print_output(row["text"], prefix)  # Whole, also between threads.


class _Numbered:
    """Lines that begin with a sequence number, each shown once; others as they come."""

    _NUMBER = re.compile(r'\s*(?:\{"seq":)?(\d+)\b')

    def __init__(self) -> None:
        self.shown = 0
        self._last = 0

    def begin(self) -> None:
        """Numbers go on."""

    def __call__(self, line: str) -> None:
        match = self._NUMBER.match(line)
        if match:
            if int(match[1]) <= self._last:
                return
            self._last = int(match[1])
        self.shown += 1
        print(line, end="", flush=True)


Lines = _LogLines | _Numbered
"""What shows the lines of a stream, each once."""
