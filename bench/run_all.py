"""`make bench`: the benches behind bench/RESULTS.md, one after another, on a machine left alone.

    python bench/run_all.py [NAME ...] [--minutes 30] [--traces FOLDER] [--frozen COMMIT]
        [--out FOLDER] [--list]

Without names, all of them. What each prints is kept in `.bench/NAME.txt` (`--out`), with commit,
load and time above it, and is not done again at the same commit; those that are resumable (the
matrix, the replays) keep their rows beside it and go on from there. A call begins nothing that
would take it past `--minutes`, so that it can be given again until it says that nothing is left.
They never run side by side. TRACES are those that docs/traces.md names: without them, benches of
traces are left out. `--list` says how long each takes on two quiet cores.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from stamp import ROOT, name_commit, stamp
from sweep import sweep_after_me

HERE = Path(__file__).resolve().parent


class Bench(NamedTuple):
    """One bench; OUT, TRACES and FROZEN in `words` are put in."""

    words: str
    minutes: float
    piece: float = 0.0
    """Of a resumable one: minutes of one call; 0: it is done in one."""


TABLE = "TRACES/parcae/v100_throughput_and_costs.json:bert"
REPLAYED = "TRACES/bamboo/p3-trace.csv:--speed=10 --until=2400"
OTHER = "TRACES/parcae/trace_hh_55_65.txt:--speed=20"
BENCHES = {
    "restart": Bench("bench_restart.py", 4),
    "detect": Bench("bench_detect.py", 2),
    "overhead": Bench("bench_overhead.py", 3),
    "checkpoint": Bench("bench_checkpoint.py", 6),
    "sim": Bench("bench_sim.py", 3),
    "journal": Bench("bench_journal.py", 2),
    "growth": Bench("bench_growth.py", 6),
    "cli": Bench("bench_cli.py", 1),
    "trainers": Bench("bench_trainers.py", 6),
    "first-steps": Bench("bench_first_steps.py", 20),
    "set": Bench("bench_set.py", 3),
    "elastic": Bench("bench_elastic.py kills --ranks 4 --kills 40 --seed 1", 3),
    "elastic-overhead": Bench("bench_elastic.py overhead --ranks 2 --pairs 300", 5),
    "torchft": Bench("bench_torchft.py --trials 10 --only perdure --slow-trials 1", 6),
    "torchft-peers": Bench("bench_torchft.py --rounds 2 --trials 10", 25),
    "goodput": Bench(
        "bench_goodput.py --rounds 3 --window-s 30 --every 0 --only "
        "torchrun,perdure_elastic,perdure_torchft,torchft_tuned",
        15,
    ),
    "goodput-kills": Bench("bench_goodput.py --rounds 2 --window-s 30 --every 8", 20),
    "traces": Bench(f"bench_traces.py TRACES --tau {TABLE}", 2),
    "replay": Bench(f"bench_replay.py {REPLAYED!r} {OTHER!r} --repeat 2 --out OUT.jsonl", 85, 30),
    "matrix": Bench("bench_matrix.py --seed 7 FROZEN --out OUT.jsonl", 350, 30),
    "slow-links": Bench(
        "bench_matrix.py --seed 8 --worlds 8 --only slow-link FROZEN --out OUT.jsonl", 20, 30
    ),
}


def render_command(name: str, args: argparse.Namespace, minutes: float) -> list[str]:
    """Return the command of a bench, or of its next piece of `minutes`."""
    bench = BENCHES[name]
    words = [sys.executable, *split(bench.words)]
    words[1] = str(HERE / words[1])
    at = words.index("FROZEN") if "FROZEN" in words else -1
    if at > 0:
        words[at : at + 1] = ["--frozen", args.frozen] if args.frozen else []
    if bench.piece:
        words += ["--minutes", f"{minutes:g}"]
    places = {"OUT.": f"{args.out}/{name}.", "TRACES": args.traces}
    for word, place in places.items():
        words = [each.replace(word, place) for each in words]
    return words


def split(words: str) -> list[str]:
    """Return the words of a command; `_` in a system's name stands for a space."""
    return [w.replace("_", " ") if "," in w else w for w in shlex.split(words)]


def run(name: str, args: argparse.Namespace, minutes: float) -> bool | None:
    """Run a bench or a piece of it, and keep what it prints.

    Return whether it is done; None where it has failed, or a piece has brought nothing.
    """
    path, bench = args.out / f"{name}.txt", BENCHES[name]
    command = render_command(name, args, minutes)
    head = f"{stamp()} {' '.join(command[1:])}\n"
    print(f"bench: {name}: {head}", end="", file=sys.stderr, flush=True)
    limit_s = 60 * (max(minutes, bench.piece) if bench.piece else 3 * bench.minutes) + 600
    rows = args.out / f"{name}.jsonl"
    before = rows.stat().st_size if rows.exists() else 0
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    whole = done.returncode == 0 and (not bench.piece or "nothing is left" in done.stdout)
    if whole and bench.piece:
        table = [*command[:2], "--table", f"{args.out}/{name}.jsonl"]
        done.stdout += subprocess.run(table, stdout=subprocess.PIPE, text=True, check=True).stdout
    end = "whole" if whole else f"to be gone on with (rc {done.returncode})"
    path.write_text(f"{head}{done.stdout}{stamp()} {end}\n")
    print(done.stdout, flush=True)
    stuck = bench.piece and not whole and (not rows.exists() or rows.stat().st_size == before)
    return None if done.returncode or stuck else whole


def is_done(path: Path) -> bool:
    """Return whether the bench that was kept at `path` was done at this commit."""
    lines = path.read_text().splitlines() if path.exists() else []
    return bool(lines) and lines[-1].endswith("whole") and f"'{name_commit()}'" in lines[0]


def main() -> int:
    """Run what is left and fits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--traces", default="")
    parser.add_argument("--frozen", default="", metavar="COMMIT", help="of the thresholds")
    parser.add_argument("--out", type=Path, default=ROOT / ".bench")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        for name, bench in BENCHES.items():
            print(f"{name:18}{bench.minutes:5g} min  {bench.words}")
        return 0
    if unknown := set(args.names) - set(BENCHES):
        parser.error(f"no bench {', '.join(unknown)}: {', '.join(BENCHES)}")
    args.out.mkdir(exist_ok=True)
    begun, left, failed = time.monotonic(), [], False
    for name in args.names or BENCHES:
        bench = BENCHES[name]
        if "TRACES" in bench.words and not args.traces:
            print(f"bench: {name} is left out: no --traces", file=sys.stderr)
            continue
        whole = is_done(args.out / f"{name}.txt")
        while not whole:
            spare = args.minutes - (time.monotonic() - begun) / 60
            minutes = min(bench.piece or bench.minutes, spare)
            if minutes < (min(bench.piece, 10) or bench.minutes):
                break
            ended = run(name, args, minutes)
            if ended is None:
                failed = True
                break
            whole = ended
        left += [] if whole else [name]
    print(f"left: {', '.join(left)}" if left else "nothing is left", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
