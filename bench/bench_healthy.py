"""The benchmark of harm: what perdure says of healthy jobs, and does to them.

    python bench/bench_healthy.py --hours 1000 --out healthy.jsonl
    python bench/bench_healthy.py --hours 50 --tree ../perdure-d36469f --out healthy.jsonl
    python bench/bench_healthy.py --reproduce 4 --out healthy.jsonl
    python bench/bench_healthy.py --real 3 --seconds 600 --out healthy.jsonl
    python bench/bench_healthy.py --resample healthy.jsonl
    python bench/bench_healthy.py --faults 1000 --out healthy.jsonl
    python bench/bench_healthy.py --table healthy.jsonl --picture harm.svg
    python bench/bench_healthy.py --workload "DDP, lognormal" --number 3 --explain

Workloads (`healthy/workloads.py`) are trained in virtual time, heartbeat by heartbeat, before the
real detector, controller and policy. Each run is a job of half an hour; its result is a line of
`--out`, and what is there is not run again: an interrupted benchmark goes on where it was.

A third of the workloads is held out: it runs with `--final` only, with seeds drawn then, which the
results have. `--tree` judges another checkout of perdure by the same runs.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN_S = 1800.0
LEAST_STEPS = 100
"""Of a real rank, to be resampled in blocks."""
BEGIN_S = 1_000_000.0
"""`healthy.judge.BEGIN_S`: job time at which each simulated job begins."""


def parse() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=0.0, help="simulated hours in all")
    parser.add_argument("--seed", default="tuning", help="of the runs; drawn anew with --final")
    parser.add_argument("--final", action="store_true", help="all workloads, those held out too")
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    parser.add_argument("--number", type=int, help="only this run of it")
    parser.add_argument("--ranks", type=int, nargs="*", help="only runs of so many ranks")
    parser.add_argument(
        "--work", action="store_true", help="packed sequences and hot experts declare their tokens"
    )
    parser.add_argument(
        "--devices", action="store_true", help="collectives run on devices, which alone tell times"
    )
    parser.add_argument("--seconds", type=float, default=RUN_S, help="simulated, of each run")
    parser.add_argument("--explain", action="store_true", help="print verdicts with their evidence")
    parser.add_argument("--tree", type=Path, help="another checkout of perdure to judge")
    parser.add_argument("--reproduce", type=int, metavar="RUNS", help="T4, T5, T7 and T9 instead")
    parser.add_argument(
        "--real", type=float, metavar="HOURS", help="real jobs instead, for so long"
    )
    parser.add_argument("--faults", type=int, metavar="N", help="so many simulated faults instead")
    parser.add_argument("--picture", type=Path, metavar="SVG", help="missed against false")
    parser.add_argument("--out", type=Path, default=Path("healthy.jsonl"))
    parser.add_argument("--resample", type=Path, metavar="FILE", help="keep its real step times")
    parser.add_argument("--table", type=Path, nargs="*", help="print the table of these results")
    return parser.parse_args()


def main() -> None:
    """Run what was asked for."""
    args = parse()
    if args.table is not None:
        from healthy.faults import render_calibration, render_faults
        from healthy.picture import render_picture
        from healthy.results import (
            read_rows,
            render_real,
            render_reproduced,
            render_table,
            render_trees,
        )

        rows = [row for path in args.table for row in read_rows(path)]
        print(render_table([row for row in rows if "number" in row]))
        print(render_trees([row for row in rows if "number" in row]))
        print(render_reproduced([row for row in rows if "row" in row]))
        print(render_real([row for row in rows if "real" in row]))
        if faults := [row for row in rows if "fault" in row]:
            print(render_faults(faults))
            print(render_calibration(faults, [row for row in rows if "number" in row]))
        if args.picture is not None:
            args.picture.write_text(render_picture(rows))
        return
    if args.resample is not None:
        resample(args.resample)
        return
    if args.tree is not None:
        sys.exit(run_in_tree(args.tree))
    from healthy import workloads

    workloads.everybody_declares, workloads.everybody_on_devices = args.work, args.devices
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # Heartbeats are many, and in no circles.
    if args.reproduce:
        reproduce(args)
    elif args.real:
        train_for_real(args)
    elif args.faults:
        break_things(args)
    else:
        run(args)


def train_for_real(args: argparse.Namespace) -> None:
    """Train real jobs of all kinds in turn until there are so many hours of them."""
    from healthy.real import KINDS, run_piece
    from healthy.results import append_row, read_rows
    from sweep import sweep_after_me

    sweep_after_me()
    commit = read_commit()
    rows = [r for r in read_rows(args.out) if "real" in r and r["tree"] == commit]
    hours, number = sum(r["seconds"] for r in rows) / 3600.0, len(rows)
    while hours < args.real:
        kind, seed = KINDS[number % len(KINDS)], int.from_bytes(os.urandom(4))
        append_row(args.out, {"tree": commit} | run_piece(kind, args.seconds, seed))
        number, hours = number + 1, hours + args.seconds / 3600.0


def break_things(args: argparse.Namespace) -> None:
    """Make faults under the workloads' noise, each once."""
    from healthy.faults import run_fault
    from healthy.results import append_row, read_rows

    commit, seed = read_commit(), args.seed
    rows = [row for row in read_rows(args.out) if "fault" in row]
    if args.final:
        seed = min({r["seed"] for r in rows if r["final"]}, default="") or os.urandom(8).hex()
    known = {
        (r["tree"], r["seed"], r["case"], r.get("work", False), r.get("devices", False))
        for r in rows
    }
    first = 0 if args.number is None else args.number
    for number in range(first, args.faults if args.number is None else first + 1):
        if (commit, seed, number, args.work, args.devices) in known and not args.explain:
            continue
        case, outcome, row = run_fault(number, seed, final=args.final, names=args.workload or ())
        if args.explain:
            print(case)
            explain(case.workload, number, case.shape, outcome)
            continue
        said = {"case": number, "seed": seed, "tree": commit, "final": args.final}
        said |= {"work": True} if args.work else {}
        said |= {"devices": True} if args.devices else {}
        append_row(args.out, said | row | {"load": os.getloadavg()[0]})


def reproduce(args: argparse.Namespace) -> None:
    """Run again what the attack on d36469f found, each piece once."""
    from healthy.reproduce import list_pieces
    from healthy.results import append_row, read_rows

    commit = read_commit()
    known = {(r["tree"], r["row"], r["piece"]) for r in read_rows(args.out) if "row" in r}
    for row, piece, make in list_pieces(args.reproduce):
        if (commit, row, piece) not in known:
            said = {"row": row, "piece": piece, "tree": commit, "load": os.getloadavg()[0]}
            append_row(args.out, said | make())


def resample(path: Path) -> None:
    """Keep the step times of real jobs for `DDP, recorded steps`, each over its rank's median."""
    from healthy.results import read_rows
    from healthy.workloads import RECORDED

    series = []
    rows = [row for row in read_rows(path) if "real" in row]
    for row in rows:
        for times in row["own"].values():
            if len(times) >= LEAST_STEPS:
                median = sorted(times)[len(times) // 2]
                series.append([round(each / median, 3) for each in times])
    source = f"{len(rows)} jobs of {', '.join(sorted({row['real'] for row in rows}))}"
    RECORDED.write_text(json.dumps({"source": source, "series": series}) + "\n")
    print(f"{len(series)} series of {sum(map(len, series))} steps: {RECORDED}")


def run_in_tree(tree: Path) -> int:
    """Start this anew with another tree's code in the place of this one's."""
    words = sys.argv[1:]
    at = next(i for i, word in enumerate(words) if word.startswith("--tree"))
    del words[at : at + (1 if "=" in words[at] else 2)]
    source = tree.resolve() / "src"
    env = dict(os.environ, PYTHONPATH=f"{source}{os.pathsep}{HERE}")
    return subprocess.run([sys.executable, str(Path(__file__)), *words], env=env).returncode


def read_commit() -> str:
    """Return the newest commit of the perdure that is judged; `+`: it was changed since."""
    import perdure

    folder = Path(perdure.__file__).parent
    git = ["git", "-C", str(folder)]
    last = [*git, "log", "-1", "--format=%H", "--", "."]
    commit = subprocess.run(last, capture_output=True, text=True).stdout
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "."], capture_output=True, text=True
    ).stdout
    return commit.strip()[:12] + ("+" if changed.strip() else "")


def run(args: argparse.Namespace) -> None:
    """Run workloads in turn until there are as many hours as asked for."""
    from healthy.judge import run_healthy
    from healthy.results import append_row, read_rows
    from healthy.workloads import RECORDED, TUNED, WORKLOADS, WORLDS

    commit = read_commit()
    rows = [row for row in read_rows(args.out) if "number" in row]
    known = {(r["workload"], r["number"], r["seed"], r["tree"]) for r in rows}
    seed = args.seed
    if args.final:
        seeds = {r["seed"] for r in rows if r["final"]}  # Each tree is judged by the same.
        seed = min(seeds, default="") or os.urandom(8).hex()
    names = list(WORKLOADS if args.final else TUNED)
    for name in args.workload or ():
        if name not in names:
            sys.exit(f"bench_healthy: no workload {name!r} here\nhint: {', '.join(names)}")
    names = args.workload or names
    hours, number = 0.0, 0 if args.number is None else args.number
    while hours < args.hours or args.number is not None:
        for name in names:
            if args.ranks and WORLDS[number % len(WORLDS)] not in args.ranks:
                continue
            if name == "DDP, recorded steps" and not RECORDED.exists():
                continue
            label = f"{name}, tokens declared" if args.work else name
            label += ", on devices" if args.devices else ""
            if (label, number, seed, commit) in known and not args.explain:
                hours += args.seconds / 3600.0
                continue
            shape, outcome = run_healthy(name, number, seed, args.seconds)
            hours += outcome.simulated_s / 3600.0
            if args.explain:
                explain(name, number, shape, outcome)
                continue
            row = {
                "workload": label, "number": number, "seed": seed, "tree": commit,
                "final": args.final, "ranks": shape.ranks, "nproc": shape.nproc,
                "step_s": shape.step_s, "declared": shape.declared,
                "simulated_s": round(outcome.simulated_s, 1), "wall_s": round(outcome.wall_s, 2),
                "load": os.getloadavg()[0], "at": time.strftime("%FT%TZ", time.gmtime()),
                "ended": outcome.ended,
                "told": [describe(told) for told in outcome.told],
                "actions": [describe(action) for action in outcome.actions],
            }  # fmt: skip
            append_row(args.out, row)
        number += 1
        if args.number is not None:
            break


def describe(told: Any) -> dict[str, object]:
    """Return what was said in the words of a row."""
    return {
        "at_s": round(told.at_s - BEGIN_S, 2),
        "kind": told.kind,
        "culprit": told.culprit,
        "right": told.right,
        "silent": told.silent,
        "confidence": round(told.confidence, 3),
        "lasted_s": round(told.withdrawn_s - told.at_s, 2) if told.withdrawn_s else None,
        "reason": told.reason[:200],
    }


def explain(name: str, number: int, shape: Any, outcome: Any) -> None:
    """Print what was said in one run, with its evidence."""
    print(f"{name}, run {number}: {shape}")
    print(f"{outcome.simulated_s:.0f} s simulated in {outcome.wall_s:.1f} s {outcome.ended}")
    for told in sorted([*outcome.told, *outcome.actions], key=lambda t: t.at_s):
        mark = "right" if told.right else "silent" if told.silent else "FALSE"
        lasted_s = told.withdrawn_s - told.at_s
        until = f", withdrawn after {lasted_s:.1f} s" if told.withdrawn_s else ""
        what = f"{told.kind} {told.culprit}: {told.reason}{until}"
        print(f"{told.at_s - BEGIN_S:9.2f} s  {mark}  {what}")
        for key, value in told.evidence.items():
            print(f"             {key}: {json.dumps(value)[:300]}")


if __name__ == "__main__":
    main()
