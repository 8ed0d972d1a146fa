"""What watching costs: perdure's recorders beside nothing and beside what others offer.

Per collective (an all-reduce of one number) with one rank, where only its own work counts, and
with two; per step of a small DDP model. With and without alternate in blocks inside one process;
where an environment variable decides (Flight Recorder, DETAIL), processes alternate. A figure is
the lower quartile of blocks with less that of blocks without, its spread the same between blocks
without; the median over runs is printed. Prints one JSON document.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sweep import sweep_after_me

from perdure.worker.ring import RingWriter

CHILD = Path(__file__).parent / "scripts" / "recorder_cost.py"
MODES = {
    "nothing": {},
    "compiled": {"PERDURE_RECORDER": "compiled"},
    "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "torchft": {},
    "flight off": {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
}
CALLS, STEPS = 50, 10


def run_ranks(mode: str, ranks: int, rounds: int) -> dict[str, object]:
    """Run `ranks` of the child; return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            env = {k: v for k, v in os.environ.items() if not k.startswith("PERDURE_")}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
            env |= MODES[mode]
            if "PERDURE_RECORDER" in env:
                env["PERDURE_RING"] = os.path.join(folder, f"{rank}.ring")
                RingWriter.create(env["PERDURE_RING"], rank=rank, generation=0).close()
            command = [sys.executable, str(CHILD), mode, folder + "/store", str(rounds)]
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not outputs[0]:
            codes = [process.returncode for process in processes]
            raise SystemExit(f"{mode}, {ranks} ranks: nothing measured, exit codes {codes}")
        document: dict[str, object] = json.loads(outputs[0].splitlines()[-1])
        return document


def quartile(values: list[float]) -> float:
    """Return the lower quartile."""
    return statistics.quantiles(values, n=4)[0]


def summarize(rows: list[list[float]], each: int) -> tuple[float, float, float]:
    """Return the bare time, what was added, and the spread, in microseconds of one."""
    before, during, after = (
        quartile(list(column)) / each * 1e6 for column in zip(*rows, strict=True)
    )
    return (before + after) / 2, during - (before + after) / 2, abs(before - after)


def combine(runs: list[tuple[float, float, float]]) -> dict[str, object]:
    """Return medians over runs; a figure is resolved where it is above the worst spread."""
    bare, added, spread = (statistics.median(column) for column in zip(*runs, strict=True))
    worst = max(*(run[2] for run in runs), spread)
    return {
        "bare_us": round(bare, 1),
        "added_us": round(added, 2),
        "spread_us": round(worst, 2),
        "share": round(added / bare, 4),
        "resolved": abs(added) > worst,
    }


def compare_processes(without: list[float], with_it: list[float]) -> dict[str, object]:
    """Return the same of processes that alternated; the spread is that of their figures."""
    bare, added = (
        statistics.median(without),
        statistics.median(with_it) - statistics.median(without),
    )
    spread = max(statistics.stdev(without), statistics.stdev(with_it))
    return {
        "bare_us": round(bare, 1),
        "added_us": round(added, 2),
        "spread_us": round(spread, 2),
        "share": round(added / bare, 4),
        "resolved": abs(added) > spread,
    }


def main() -> None:
    """Measure everything, modes in turn, `--runs` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {}
    bare: dict[str, list[float]] = {}
    spans: dict[str, object] = {}
    for _ in range(args.runs):
        for ranks in (1, 2):
            for mode in MODES:
                document = run_ranks(mode, ranks, args.rounds)
                spans[f"{mode}, {ranks} ranks"] = document.pop("spans")
                for what, each in (("calls", CALLS), ("steps", STEPS)):
                    rows = document.get(what)
                    if not isinstance(rows, list):
                        continue
                    key = f"{what}, {ranks} ranks"
                    if mode in ("nothing", "detail", "flight off"):
                        flat = [x for a, b, c in rows for x in (a, b, c)]
                        bare.setdefault(f"{key}, {mode}", []).append(quartile(flat) / each * 1e6)
                    else:
                        found.setdefault(f"{key}, {mode}", []).append(summarize(rows, each))
    result: dict[str, object] = {name: combine(runs) for name, runs in sorted(found.items())}
    for what, ranks in (("calls", 1), ("calls", 2), ("steps", 1), ("steps", 2)):
        plain = f"{what}, {ranks} ranks"
        result[f"{plain}, Flight Recorder, processes"] = compare_processes(
            bare[f"{plain}, flight off"], bare[f"{plain}, nothing"]
        )
        if what == "calls":  # DDP under DETAIL dies of SIGSEGV in torch 2.13.
            result[f"{plain}, detail, processes"] = compare_processes(
                bare[f"{plain}, nothing"], bare[f"{plain}, detail"]
            )
    print(json.dumps({"runs": args.runs, "spans": spans, **result}, indent=1))


if __name__ == "__main__":
    sweep_after_me()
    main()
