"""SIGTERM and SIGUSR1 in a rank: noted in the handler, acted upon at a step all ranks agree on.

A rank that stopped by itself would leave the others waiting in a collective. So the handler only
passes the signal on to the agent; the controller makes an agreement of it. Before there is a
loop and after its end there is nothing to agree on, and the signal does what it did before.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)


class SignalForwarding:
    """Handlers that chain to whatever the script had installed."""

    def __init__(self, forward: Callable[[int], None]) -> None:
        """Pass signal numbers to `forward`, which must take no lock."""
        self._forward = forward
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self.active = False
        """Whether a loop is there to end in good order."""

    def install(self) -> None:
        """Take the signals over, also again after the script has set its own handlers.

        Only the main thread may; elsewhere nothing is installed.
        """
        for number in FORWARDED:
            current = signal.getsignal(number)
            if current == self._handle:
                continue
            with contextlib.suppress(ValueError):
                self._before[number] = current
                signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number, signal.SIG_DFL)
        if self.active and os.getpid() == self._pid:
            self._forward(number)
            if callable(before):
                before(number, frame)
        elif callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:
            # A data loader's child, or no loop: as if perdure were not there.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
