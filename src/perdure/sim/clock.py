"""Virtual time: a queue of callbacks, taken in order of time and then of arrival."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Time that stands still while somebody thinks, and jumps to what is next."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        """Begin at `start_s`, a job time."""
        self.now = start_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` made `delay_s` from now."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._count, call))

    def step(self) -> bool:
        """Make the next call; False where nothing is left."""
        if not self._queue:
            return False
        at_s, _, call = heapq.heappop(self._queue)
        self.now = max(self.now, at_s)
        call()
        return True
