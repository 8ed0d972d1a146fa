"""Waiting for what is about to be so, and no longer than that takes."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], what: str = "what was waited for", timeout_s: float = 90.0
) -> None:
    """Wait until `condition()` is true; fail with `what` was missed after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)
