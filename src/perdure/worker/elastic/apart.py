"""What would block for long runs in a thread of its own, so that a newer order can leave it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

_LOOK_S = 0.005

Made = TypeVar("Made")


class Broken(Exception):
    """The group has lost a member, or its members were called into a newer epoch."""


@contextlib.contextmanager
def breaking(*kinds: type[RuntimeError], what: str = "") -> Iterator[None]:
    """Turn errors of these kinds into `Broken`: a member, or `what` it served, is lost."""
    try:
        yield
    except kinds as error:
        raise Broken(what + str(error).partition("\n")[0]) from None


def make_apart(
    make: Callable[[], Made],
    overtaken: Callable[[], bool],
    name: str,
    drop: Callable[[Made], object] = lambda made: None,
) -> Made:
    """Return what `make()` returns, which waits for others and hears of no order meanwhile.

    It runs in a thread, which a newer order leaves behind to its own time-out; that thread then
    calls `drop` with what it has made after all. The interpreter waits for it when it ends: a
    thread that came back from native code later would abort it.

    Raises:
        Broken: `overtaken()` became true first.
        Exception: what `make()` has raised.
    """
    made = start(make, name, daemon=False)
    while not wait([made], _LOOK_S).done:
        if overtaken():
            made.add_done_callback(lambda late: late.exception() or drop(late.result()))
            raise Broken("a newer epoch was ordered")
    return made.result()


def start(make: Callable[[], Made], name: str, *, daemon: bool = True) -> Future[Made]:
    """Begin `make()` in a thread of its own; the interpreter waits for none that is a `daemon`."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return made
