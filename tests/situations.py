"""`make exact` and `make agreed`: situations that end equal to a plain run, or are named.

    python -m tests.situations exact

The last line counts them. A situation is wrong if its test fails: it differed in silence.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

SUITES: dict[str, list[list[str]]] = {
    "exact": [
        ["tests/unit/worker/test_exact_loops.py", "tests/properties/test_exact_state.py"],
        ["-m", "", "tests/e2e/test_exact_resume.py", "-k", "2-ddp or 2-fsdp"],
        ["-m", "", "tests/third_party/test_exact_trainers.py", "-k", "kill"],
    ],
    "agreed": [
        ["tests/properties/test_gradients_plain.py", "tests/unit/worker/test_elastic_refused.py"],
        ["-m", "", "tests/e2e/test_agreed.py", "tests/e2e/test_elastic_plans.py"],
    ],
}
NAMED = re.compile("named|refused|by_name|in_no_checkpoint|is_found|says_what|compares_its_plan")
"""In the name of a test in which perdure says what is not equal."""
_FILE = "SITUATIONS_FILE"
"""Not PERDURE_: tests drop what a job has set."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a situation ended."""
    if report.when == "call" or not report.passed:
        with open(os.environ[_FILE], "a") as file:
            file.write(f"{report.outcome} {report.nodeid}\n")


def count(lines: list[str]) -> Counter[str]:
    """Return how many situations ended how, of lines with an outcome and a test."""
    ends = dict.fromkeys(("equal", "named", "wrong", "skipped"), 0)
    worst: dict[str, str] = {}
    for line in lines:
        outcome, _, test = line.partition(" ")
        if worst.get(test) != "failed":
            worst[test] = outcome
    for test, outcome in worst.items():
        said = "named" if NAMED.search(test.rpartition("::")[2].partition("[")[0]) else "equal"
        ends[{"failed": "wrong", "skipped": "skipped"}.get(outcome, said)] += 1
    return Counter(ends)


def main(suite: str) -> int:
    """Run a suite, and count; return 1 if a situation was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "situations"
        path.touch()
        more = {_FILE: str(path), "PERDURE_EXPLORE": "1" if suite == "agreed" else ""}
        codes = [
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "tests.situations", *words],
                env=os.environ | more,
                check=False,
            ).returncode
            for words in SUITES[suite]
        ]
        found = count(path.read_text().splitlines())
    skipped = f", {found['skipped']} skipped" if found["skipped"] else ""
    print(
        f"{suite}: {found.total() - found['skipped']} situations ran: {found['equal']} equal, "
        f"{found['named']} named, {found['wrong']} wrong{skipped}"
    )
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
