"""Waits for facts. A limit here only ends a test that hangs; it says nothing about speed."""

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
