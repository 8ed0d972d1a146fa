"""Measure every gate alone, in pairs, and print a line for each: figure, interval, bound.

usage: python -m bench.gates [--old REVISION] [--pairs NUM] [--only NAME ...] [--list]

A gate is `ok` if its interval ends at or below the bound, and `FAILED` if its interval begins above
the bound. If the interval includes the bound, the gate is `not resolved`, which is no failure.
With --old, each pair also measures the tree at REVISION, with the gates of that tree. A gate then
also fails if it is slower than that tree by more than 10 % with 95 % confidence.

Exit code 1 if a gate failed or could not be measured, 2 if the arguments are wrong.
"""

import argparse
import contextlib
import importlib
import json
import math
import os
import pkgutil
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import bench.gates
from bench.gates.gate import Gate
from bench.stamp import ROOT, stamp
from bench.sweep import sweep_after_me

SAMPLE_LIMIT_S = 300.0
RESAMPLES = 2_000
SLOWER = 1.10


def find_gates() -> dict[str, Gate]:
    """Return the gates of all modules beside this one, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(bench.gates.__path__))
    modules = [
        importlib.import_module(f"bench.gates.{name}") for name in names if name != "__main__"
    ]
    gates = [gate for module in modules for gate in getattr(module, "GATES", ())]
    assert len({gate.name for gate in gates}) == len(gates), "two gates have one name"
    return {gate.name: gate for gate in gates}


def take_sample(name: str, tree: Path) -> float:
    """Return one figure of gate `name` of the perdure in `tree`, from a new process.

    Raises RuntimeError with the end of the process's output if it fails.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}
    command = [sys.executable, "-m", "bench.gates", "--sample", name]
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=SAMPLE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no figure within {SAMPLE_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip()[-2_000:])
    figure = float(json.loads((done.stdout.splitlines() or ["{}"])[-1]).get("figure", math.nan))
    if not math.isfinite(figure):
        raise RuntimeError(f"the figure is {figure}")
    return figure


def print_sample(gate: Gate) -> None:
    """Measure once, and print the figure as JSON on the last line."""
    figure = gate.measure()
    if gate.yardstick is not None:
        figure /= gate.yardstick()
    print(json.dumps({"figure": figure}))


def find_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by a bootstrap with a fixed seed."""
    draw = random.Random(1)
    medians = sorted(
        statistics.median(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES)
    )
    return medians[math.floor(0.025 * RESAMPLES)], medians[math.ceil(0.975 * RESAMPLES) - 1]


def judge(interval: tuple[float, float], bound: float) -> str:
    """Return the verdict on a figure whose interval is known."""
    low, high = interval
    return "ok" if high <= bound else "FAILED" if low > bound else "not resolved"


@contextlib.contextmanager
def check_out(revision: str) -> Iterator[Path]:
    """Yield a work tree of `revision`, and remove it afterwards."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # The work tree has to be removed.
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        try:
            yield tree
        finally:
            remove = ["git", "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, cwd=ROOT, check=True, capture_output=True)


def run_gate(gate: Gate, old: Path | None, pairs: int) -> bool:
    """Measure `gate`, print its line, and return whether it may pass."""
    samples, ratios = [], []
    try:
        for _ in range(pairs):
            samples.append(take_sample(gate.name, ROOT))
            if old is not None:
                ratios.append(samples[-1] / take_sample(gate.name, old))
    except RuntimeError as error:
        print(f"{gate.name}: FAILED, not measured: {error}", flush=True)
        return False
    low, high = find_interval(samples)
    verdict = judge((low, high), gate.bound)
    line = (
        f"{gate.name}: {statistics.median(samples):.4g} {gate.unit}"
        f" (95 % {low:.4g} to {high:.4g}, {len(samples)} samples), bound {gate.bound:g}: {verdict}"
    )
    slower = ""
    if ratios:
        low, high = find_interval(ratios)
        slower = judge((low, high), SLOWER)
        line += f"; {statistics.median(ratios):.3f} of the old tree ({low:.3f} to {high:.3f})"
        line += f": {slower}"
    print(line, flush=True)
    return "FAILED" not in (verdict, slower)


def main() -> int:
    """Measure what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", metavar="REVISION", help="measure this revision in each pair")
    parser.add_argument("--pairs", type=int, metavar="NUM", help="measure NUM pairs of each gate")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure these gates")
    parser.add_argument("--list", action="store_true", help="print the names of all gates")
    parser.add_argument("--sample", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    gates = find_gates()
    for name in (*(options.only or ()), *((options.sample,) if options.sample else ())):
        if name not in gates:
            parser.error(f"unknown gate {name}; --list prints all names")
    if options.old:
        verify = ["git", "rev-parse", "--verify", "--quiet", f"{options.old}^{{commit}}"]
        if subprocess.run(verify, cwd=ROOT, capture_output=True).returncode != 0:
            parser.error(f"unknown revision {options.old}")
    if options.sample:
        print_sample(gates[options.sample])
        return 0
    if options.list:
        print("\n".join(gates))
        return 0
    sweep_after_me()
    print(json.dumps(stamp()))
    chosen = [gates[name] for name in options.only or gates]
    with check_out(options.old) if options.old else contextlib.nullcontext() as old:
        passed = [run_gate(gate, old, options.pairs or gate.pairs) for gate in chosen]
    print(f"gates: {sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
