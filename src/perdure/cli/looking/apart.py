"""Work that a disk or a controller may keep for ever, beside a loop that goes on and may end."""

import asyncio
import contextlib
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


async def run_apart(function: Callable[..., T], *args: Any) -> T:
    """Return what `function` returns, from a thread that nobody waits for as the command ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody wants to know.
            loop.call_soon_threadsafe(settle, result, error)

    Thread(target=run, name="perdure looks", daemon=True).start()
    return await done
