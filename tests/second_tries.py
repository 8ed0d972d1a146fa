"""A budget for second tries: a test that passes at its second try is a defect that hides.

`make test` is several runs of pytest; those that name the same file in PERDURE_SECOND_TRIES share
one budget, above which the run fails and lists them. Under xdist the reports are counted where
they come together.
"""

import os
from pathlib import Path

import pytest

BUDGET = 2
WHY_MAX = 2_000
"""Characters of why a first try failed."""
VARIABLE = "PERDURE_SECOND_TRIES"


class SecondTries:
    """Counts them, and fails the run that has used up the budget."""

    def __init__(self, path: Path) -> None:
        """Go on with what earlier runs have written to `path`."""
        self._path = path
        self._tries = path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    @property
    def over(self) -> bool:
        """Whether there were more than the budget allows."""
        return len(self._tries) > BUDGET

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a try that is made again; at once, since a run may be ended early."""
        if report.outcome == "rerun":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = " ".join(str(getattr(crash, "message", report.longrepr)).split())
            self._tries.append(f"{report.nodeid}: {why[:WHY_MAX]}")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{self._tries[-1]}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run."""
        if self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many there were, and why."""
        write = terminalreporter.write_line
        for test in self._tries:
            write(f"second try: {test}")
        text = f"second tries: {len(self._tries)}, of which {BUDGET} are allowed"
        write(text, red=self.over, bold=self.over)


def watch_second_tries(config: pytest.Config) -> None:
    """Count them in the process where the reports come together, if asked for."""
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTries(Path(path)), "second-tries")
