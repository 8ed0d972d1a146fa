"""Run parts of the test suite, then run each failed test again alone.

usage: python -m tests.suite [--strict] [--beside COMMAND] [PART ...]

A test that fails in its part runs again alone, up to twice. If it passes, the suite passes, and
the last lines name the test and its first failure. A test that fails three times fails the suite.
With --strict (`make test STRICT=1`), a second try fails the suite as well. COMMAND (`make check`)
runs beside the first part, which leaves a core idle. If it fails, the suite ends after that part.

Exit code 1 if the suite failed, 2 if the arguments are wrong.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.sweep import MARK, sweep_after_me

from tests.failures import VARIABLE

ROOT = Path(__file__).resolve().parent.parent
TRIES_ALONE = 2
MOST_TRIED_AGAIN = 30
"""If more tests fail, none is tried again: the code is wrong, or the machine is."""
TEAR_DOWN_S = 60.0
"""Longest wait for pytest after Ctrl-C; then it is killed."""
INTERRUPTED = 130

CORE = tuple(f"tests/{room}" for room in ("unit", "properties", "sim", "contract", "golden"))
SHORT = ("-m", "not serial and not long")
AT_ONCE = ("-n", "4", "--dist", "worksteal")
"""Four at once, also on two cores: a test of a whole job waits for most of its time."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "core": (*SHORT, *AT_ONCE, *CORE),
    "parallel": (*SHORT, *AT_ONCE, "--ignore", "tests/platforms", "tests"),
    "serial": ("-m", "serial and not long", "--ignore", "tests/platforms"),
    "long": ("-m", "long", "--ignore", "tests/platforms", "tests"),
    "platforms": ("tests/platforms",),
    "k8s": ("tests/platforms/k8s",),
}


@dataclass(frozen=True, slots=True)
class Run:
    """How one run of pytest ended."""

    finished: bool
    """Whether pytest ran tests and ended by itself."""
    passed: int
    """Tests that passed; a skipped test is not one of them."""
    failures: dict[str, str]
    """Why each failed test failed, by node id."""


def list_words(part: str) -> list[str]:
    """Return the arguments of pytest for `part`."""
    # Importing the other files would take half a minute.
    return [*PARTS[part], *(find_serial_files() if part == "serial" else ())]


def find_serial_files() -> list[str]:
    """Return the test files in which the marker `serial` stands."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in files
        if "platforms" not in file.parts and "mark.serial" in file.read_text(encoding="utf-8")
    ]


def run_pytest(words: Sequence[str], root: Path) -> Run:
    """Run pytest with `words` in `root`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failures.jsonl"
        env = os.environ | {VARIABLE: str(path)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH", ""))))
        env.pop(MARK, None)  # pytest ends its own processes, also if it is killed.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.failures", *words]
        with subprocess.Popen(command, cwd=root, env=env) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.wait(TEAR_DOWN_S)  # The terminal has interrupted pytest as well.
                raise
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    ending = found.pop() if found and isinstance(found[-1], dict) else {"code": None, "passed": 0}
    failures: dict[str, str] = {}
    for name, why in found:
        failures.setdefault(name, why)
    # 0: all passed. 1: some failed. Python may still end with another code after pytest's end.
    finished = ending["code"] == code and (code == 0 or (code == 1 and bool(failures)))
    return Run(finished and bool(ending["passed"] or failures), ending["passed"], failures)


def try_alone(name: str, root: Path) -> int | None:
    """Run a failed test again, alone; return the number of the try that passed, or None."""
    for number in range(2, 2 + TRIES_ALONE):
        print(f"suite: try {number}, alone: {name}", flush=True)
        run = run_pytest(["-p", "no:xdist", name], root)
        if run.finished and run.passed and not run.failures:
            return number
    return None


def run_suite(
    runs: Mapping[str, Sequence[str]], strict: bool, root: Path = ROOT, beside: str = ""
) -> int:
    """Run pytest with each of `runs`, try failed tests again, and print the verdict.

    The command `beside` runs beside the first of `runs`. Return the exit code.
    """
    began_s = time.monotonic()
    failed: dict[str, str] = {}
    broken = []
    running = subprocess.Popen(shlex.split(beside), cwd=root) if beside else None
    for part, words in runs.items():
        print(f"suite: {part}", flush=True)
        run = run_pytest(words, root)
        failed |= run.failures
        if not run.finished:
            broken.append(part)
        if running and running.wait():
            print(f"suite: FAILED: `{beside}` ended with exit code {running.returncode}")
            return 1
    again = len(failed) <= MOST_TRIED_AGAIN and not broken
    passed_at = {name: try_alone(name, root) if again else None for name in failed}
    lost = [name for name, number in passed_at.items() if number is None]
    for part in broken:
        print(f"suite: pytest did not finish, or ran no test: {part}")
    if failed and not again:
        print(f"suite: {len(failed)} tests failed; none was tried again")
    for name, number in passed_at.items():
        what = f"passed at try {number}, alone" if number else "FAILED"
        print(f"suite: {name} {what}; first failure: {failed[name]}")
    wrong = bool(lost or broken or (strict and failed))
    minutes = (time.monotonic() - began_s) / 60
    print(
        f"suite: {'FAILED' if wrong else 'passed'} after {minutes:.1f} min;"
        f" {len(failed) - len(lost)} second tries, {len(lost)} failed"
        f"{' (strict: a second try fails)' if strict and failed else ''}"
    )
    return 1 if wrong else 0


def main() -> int:
    """Read the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strict", action="store_true", help="fail at any second try")
    parser.add_argument("--beside", default="", metavar="COMMAND", help="run it beside PART 1")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}")
    options = parser.parse_args()
    parts = options.parts or ["serial", "parallel"]
    for part in parts:
        if part not in PARTS:
            parser.error(f"unknown part {part}; parts are {', '.join(PARTS)}")
    sweep_after_me()
    try:
        runs = {part: list_words(part) for part in parts}
        return run_suite(runs, options.strict, beside=options.beside)
    except KeyboardInterrupt:
        print("suite: interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
