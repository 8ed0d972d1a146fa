"""Makes `tests` importable from every test: pytest puts this file's parent on the path."""

import gc
import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from bench.sweep import sweep_after_me
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.environment import choose_plain_tmp, drop_foreign, skip_shim

drop_foreign(os.environ)
choose_plain_tmp(os.environ)
skip_shim(os.environ)
tempfile.tempdir = None  # It is read from TMPDIR again: pytest has read it already.

SEEDS = Path(__file__).resolve().parent.parent / ".seeds"
"""What exploration has found, which is tried first by the next one; `make clean` leaves it."""

# How long an example took says something of the machine and its other users, not of the code.
PATIENT = {"deadline": None, "suppress_health_check": (HealthCheck.too_slow,)}
# The same examples each time, so that a run says something of the change at hand; others, to look
# for what nobody has seen yet, with PERDURE_EXPLORE=1 (`make campaign`).
settings.register_profile("fixed", derandomize=True, **PATIENT)
SEED_FOLDER = os.environ.get("PERDURE_SEEDS") or str(SEEDS)
settings.register_profile("explore", database=DirectoryBasedExampleDatabase(SEED_FOLDER), **PATIENT)
settings.load_profile("explore" if os.environ.get("PERDURE_EXPLORE") else "fixed")


def hear_interrupts() -> None:
    """Hear Ctrl-C also where a shell has put the run into the background: children inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look again and again at what all test files have imported.

    That was a third of the CPU time in which each of four processes collects the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape bytes of odd file names in what a test wrote: else its worker could not send it."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Make sure that nothing outlives the run."""
    hear_interrupts()
    if not hasattr(config, "workerinput"):
        sweep_after_me()
