"""How long a person waits for a command that needs no job, beside another tree's.

usage: bench_cli.py [--before SRC] [--repeat 5]

Each command is a process of its own, with bytecode that is compiled already; trees take turns, and
the tree that is measured takes two of them, so that the spread of one against itself is known.
SRC is the `src` of the other tree. Printed are medians of wall time in seconds and the number of
modules that a command imports.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stamp import ROOT, stamp
from sweep import sweep_after_me

COMMANDS = (
    "--version",
    "--help",
    "status",
    "status nosuch",
    "logs nosuch",
    "set nosuch lr=1",
    "profiles",
    "queue ls",
    "run --help",
    "launch --help",
    "doctor --help",
    "trace --help",
)


def run(src: str, command: str, home: str, *options: str) -> tuple[float, str]:
    """Run a command of the tree at `src`; return the seconds it took, and its standard error."""
    env = os.environ | {"PYTHONPATH": src, "PERDURE_HOME": home}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # An installed one has its bytecode.
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *options, "-m", "perdure", *command.split()],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return time.perf_counter() - began, done.stderr


def main() -> None:
    """Measure all commands, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="the src of another tree")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    own = str(ROOT / "src")
    trees = {"now": own, "again": own} | ({"before": options.before} if options.before else {})
    trees = {name: str(Path(src).resolve()) for name, src in trees.items()}
    print(json.dumps(stamp()))
    with tempfile.TemporaryDirectory() as home:
        for command in COMMANDS:
            for src in trees.values():
                run(src, command, home)  # Compiles what was not.
            took: dict[str, list[float]] = {name: [] for name in trees}
            for _ in range(options.repeat):
                for name, src in trees.items():
                    took[name].append(run(src, command, home)[0])
            row = {name: round(statistics.median(times), 3) for name, times in took.items()}
            err = run(own, command, home, "-X", "importtime")[1]
            modules = sum(line.startswith("import time:") for line in err.splitlines()) - 1
            print(json.dumps({"command": command, "modules": modules} | row), flush=True)


if __name__ == "__main__":
    sweep_after_me()
    main()
