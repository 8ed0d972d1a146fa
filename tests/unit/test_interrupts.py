"""A test run that was begun in a shell's background, where Ctrl-C is ignored."""

import signal
import subprocess

from tests.conftest import hear_interrupts


def test_what_a_run_in_the_background_starts_can_be_interrupted() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hear_interrupts()
        done = subprocess.run(["sh", "-c", "kill -INT $$"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == -signal.SIGINT
