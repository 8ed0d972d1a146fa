"""Stacks of a rank's threads, read from py-spy's text.

The text is `Thread ID (state): "name"`, then indented frames, innermost first.
"""

import re
from typing import NamedTuple

from perdure.model.fitting import CUT

_THREAD = re.compile(r'^Thread (\S+) \(([^)]*)\)(?:: "(.*)")?$')
_IDLE_LOOP = re.compile(
    r"\b(?:_worker \(concurrent/futures/thread|_feed \(multiprocessing/queues"
    r"|_pin_memory_loop \(torch/utils/data/_utils/pin_memory|run \(tqdm/_monitor"
    r"|_read_thread \(torch/_inductor/compile_worker/subproc_pool)\.py:"
)
"""What runs in a background thread of Python's, torch's or tqdm's own."""
_WAIT = re.compile(
    r"\b(?:wait \(threading|select \(selectors)\.py:"
    r"| \((?:multiprocessing|torch/utils/data|torch/multiprocessing|torch/_inductor/compile_worker"
    r"|tqdm)/"
)
"""Frames inside such a loop while it waits. Files are named by their package, so that a file of
the script's own may have the name of one of Python's."""
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

        Only what is known to wait for work that somebody else hands on is not: a timer, or a loop
        that waits for an event, may call any of the script's functions next.
        """
        for frame in self.frames:
            if _IDLE_LOOP.search(frame):
                return False
            if not _WAIT.search(frame):
                return True
        return bool(self.frames)


def parse_threads(text: str) -> tuple[ThreadStack, ...]:
    """Return the script's threads, without perdure's own; none where `text` shows no stack.

    What was cut out of a text is shown as one more thread: anything may be at work in it.
    """
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
    if threads and CUT in text:
        threads.append(ThreadStack("others", "cut", ("the text was too long",)))
    return tuple(t for t in threads if not t.name.startswith(_OWN))
