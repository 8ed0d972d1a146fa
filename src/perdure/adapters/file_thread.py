"""Calls to a file system that may be away, and then keeps a call for ever."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class FileThread:
    """Makes one call after another, and is left behind where one does not return."""

    def __init__(self) -> None:
        """Start no thread before the first call."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = False

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function` returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if answer.done():  # Given up.
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def run() -> None:
            if answer.cancelled():
                return
            result: T | None = None
            error: Exception | None = None
            try:
                result = function(*args)
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # The loop has ended meanwhile.
                loop.call_soon_threadsafe(settle, result, error)

        if not self._started:
            self._started = True
            threading.Thread(target=self._serve, name="perdure-files", daemon=True).start()
        self._calls.put(run)
        return await answer

    def _serve(self) -> None:
        while (run := self._calls.get()) is not None:
            run()

    def close(self) -> None:
        """Let the thread end after the call that it makes."""
        self._calls.put(None)
