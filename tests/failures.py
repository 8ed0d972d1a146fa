"""A pytest plugin that writes each failed test to the file that PERDURE_FAILURES names.

The last line has the exit code and the number of passed tests. A run without it did not finish.
"""

import json
import os
from pathlib import Path

import pytest

VARIABLE = "PERDURE_FAILURES"
WHY_MAX = 2_000
"""Most characters of a failure that are kept."""


class Failures:
    """Writes one JSON line per failure at once, because a run may be ended early."""

    def __init__(self, path: Path) -> None:
        """Append to `path`."""
        self._path = path
        self._passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a passed test; write a failed set-up, test, or tear-down."""
        self._passed += report.when == "call" and report.passed
        if report.failed:
            self._write_failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a file that cannot be collected."""
        if report.failed:
            self._write_failure(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the exit code and the number of passed tests."""
        self._write({"code": int(exitstatus), "passed": self._passed})

    def _write_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = " ".join(str(getattr(crash, "message", report.longrepr)).split())
        self._write([report.nodeid, why[:WHY_MAX]])

    def _write(self, line: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in the process that collects all reports, if a file is named."""
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)), "failures")
