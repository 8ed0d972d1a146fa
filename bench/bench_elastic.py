"""Elastic depth: SIGKILL to the survivors' next committed step, by phase, and what it costs to be.

    python bench/bench_elastic.py kills [--ranks 4] [--kills 40] [--spares 0] [--state-mb 0]
    python bench/bench_elastic.py floor [--ranks 4] [--kills 40] [--state-mb 0]
    python bench/bench_elastic.py overhead [--ranks 2] [--pairs 400]
    python bench/bench_elastic.py show FILE...

`kills`: one real job of `perdure run`; a random rank is killed at a random instant, and the next
one once the world is at full strength again, by a spare (`--spares`) or by the process that its
node starts in the slot. `floor`: what bare gloo needs for the same, without a controller, beside
it. `overhead`: plain DistributedDataParallel and the elastic loop take turns within the same two
processes. Each kill is a line of JSON in `--save FILE`, which portions of a measurement are added
to, and `show` prints together.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sweep import sweep_after_me

sys.path.insert(0, str(Path(__file__).resolve().parent))
from elastic_job import Job

SCRIPTS = Path(__file__).resolve().parent / "scripts"
PHASES = (
    "die_s", "reap_s", "decide_s", "abort_s", "communicator_s", "state_s", "commit_s",
)  # fmt: skip
NAMES = {
    "total_s": "to the survivors' next step",
    "full_s": "to full strength",
    "step_s": "an undisturbed step",
    "stall_s": "stall of the join",
    "slowest_s": "slowest step until then",
    "follow_s": "following, to the call",
}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def kill(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one job; return each kill's figures."""
    chance, found = random.Random(args.seed), list[dict[str, Any]]()
    deadline = time.monotonic() + args.limit_s
    steps = 20 if args.state_mb < 50 else 4
    with Job(args.ranks, spares=args.spares, state_mb=args.state_mb) as job:
        job.wait(lambda: len(job.rows(0)) > steps, "steps")
        while len(found) < args.kills and time.monotonic() < deadline:
            if args.spares:
                job.wait(job.ready_spares, "a spare")
            time.sleep(0.5 + 0.2 * chance.random())
            found.append(job.kill_one(chance.choice(job.world)))
            print(f"... {len(found)} kills", file=sys.stderr, flush=True)
    return found


def run_script(name: str, *words: object, timeout_s: float = 600.0) -> Any:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), *map(str, words)],
        stdout=subprocess.PIPE, text=True, timeout=timeout_s,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, values: list[float]) -> None:
    middle, high = 1e3 * statistics.median(values), 1e3 * percentile(values, 0.99)
    print(f"{name:30} median {middle:8.1f}   p99 {high:8.1f}   max {1e3 * max(values):8.1f} ms")


def show(rows: list[dict[str, Any]]) -> None:
    """Print what kills of one kind came to, kind by kind."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        loads = [row["load"] for row in mine]
        print(f"\n{kind}: {len(mine)} kills, load {min(loads):.1f} to {max(loads):.1f}")
        for key, name in NAMES.items():
            values = [row[key] for row in mine if key in row]
            if values:
                line(name, values)
        for key in PHASES:
            values = [row[key] for row in mine if key in row]
            if values:
                line(f"  {key}", values)
        moved = [row for row in mine if row.get("bytes") and row.get("follow_s")]
        if moved:
            rate = statistics.median(row["bytes"] / row["follow_s"] / 1e6 for row in moved)
            size = statistics.median(row["bytes"] / 1e6 for row in moved)
            print(f"sent {size:.0f} MB of state and steps at {rate:.0f} MB/s, waits included")
            print(f"joined without having followed: {sum(row['fresh'] for row in moved):.0f}")


def overhead(ranks: int, pairs: int) -> None:
    load = os.getloadavg()[0]
    found = run_script("elastic_overhead.py", ranks, pairs)
    print(f"{ranks} ranks, {pairs} turns of each; load {load:.1f}")
    for kind, cost in found.items():
        print(f"{kind}: a step of DDP {cost['ddp_ms']:.3f} ms, elastic {cost['elastic_ms']:.3f} ms")
        for key, label in (("ratio", "elastic to DDP"), ("same", "DDP to DDP")):
            low, middle, high = cost[key]
            print(f"  {label}: {middle:.4f} (95 %: {low:.4f} to {high:.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("kills", "floor", "overhead", "show"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--state-mb", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=200.0, help="no kill begins after it")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.what == "overhead":
        return overhead(args.ranks, args.pairs)
    if args.what == "show":
        return show([json.loads(x) for f in args.files for x in f.read_text().splitlines()])
    kind = f"{args.ranks} ranks, {args.spares} spares, {args.state_mb:g} MB"
    load = os.getloadavg()[0]
    if args.what == "kills":
        rows = kill(args)
    else:
        kind = f"bare gloo, {args.ranks} ranks, {args.state_mb:g} MB"
        rows = run_script("elastic_floor.py", args.ranks, args.kills, args.state_mb)
    rows = [{"kind": kind, "load": load} | row for row in rows]
    if args.save:
        with open(args.save, "a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    show(rows)


if __name__ == "__main__":
    sweep_after_me()
    main()
