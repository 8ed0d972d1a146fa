"""Stacks of a rank's threads, read from py-spy's text.

The text is `Thread ID (state): "name"`, then indented frames, innermost first.
"""

import re
import sys
from typing import NamedTuple

_THREAD = re.compile(r'^Thread (\S+) \(([^)]*)\)(?:: "(.*)")?$')
_FILE = re.compile(r"\(([^()]*):\d+\)$")
_OWN = "perdure-"
_DISTRIBUTED = "torch/distributed/"


class ThreadStack(NamedTuple):
    """One thread."""

    name: str
    state: str
    """`idle`, `active`, `active+gil`."""
    frames: tuple[str, ...]
    """Innermost first, such as `forward (model.py:30)`."""

    @property
    def is_main(self) -> bool:
        """Whether it is the thread that runs the script."""
        return self.name == "MainThread"

    @property
    def is_blocked(self) -> bool:
        """Whether its innermost frame is a call of torch.distributed.

        Who computes, or waits for a disk with a collective under way, is elsewhere.
        """
        return any(_DISTRIBUTED in frame for frame in self.frames[:1])

    @property
    def is_at_work(self) -> bool:
        """Whether it may yet enter a collective.

        It does, or it runs code that is neither Python's nor torch's.
        """
        return any(_DISTRIBUTED in frame or not _is_library(frame) for frame in self.frames)


def _is_library(frame: str) -> bool:
    """Return whether a frame is of Python itself, of torch, or of no file."""
    file = _FILE.search(frame)
    if file is None or file[1].startswith("<"):
        return True
    top = file[1].partition("/")[0].removesuffix(".py")
    return top in sys.stdlib_module_names or top == "torch"


def parse_threads(text: str) -> tuple[ThreadStack, ...]:
    """Return the script's threads, without perdure's own; none where `text` shows no stack."""
    threads: list[ThreadStack] = []
    name = state = ""
    frames: list[str] | None = None
    for line in [*text.splitlines(), ""]:
        head = _THREAD.match(line.strip())
        if frames is not None and (head or not line.startswith(" ")):
            threads.append(ThreadStack(name, state, tuple(frames)))
            frames = None
        if head:
            state, name, frames = head[2], head[3] or head[1], []
        elif frames is not None and line.strip():
            frames.append(line.strip())
    return tuple(t for t in threads if not t.name.startswith(_OWN))
