"""Waits for facts. A limit here only ends a test that hangs; it says nothing about speed."""

import select
import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Seconds that a test waits for a fact before it fails, also on a machine with other work."""


def wait_until(
    condition: Callable[[], object],
    what: str = "what was waited for",
    timeout_s: float = PATIENCE_S,
) -> None:
    """Wait until `condition()` is true; fail with `no {what}` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def is_readable(file: object, timeout_s: float = PATIENCE_S) -> bool:
    """Return whether a file or descriptor has something to read, or has ended, in time.

    select.select would refuse a descriptor above 1023, which a process of many tests may have.
    """
    poller = select.poll()
    poller.register(file, select.POLLIN)  # type: ignore[arg-type]
    return bool(poller.poll(timeout_s * 1000.0))
