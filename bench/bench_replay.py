"""Live replays whose costs are put to the test: trace B predicted from the costs of trace A.

    python bench/bench_replay.py TRACES... --out replays.jsonl [--minutes 30] [--repeat 2]
    python bench/bench_replay.py --table replays.jsonl

Each of TRACES is `FILE` or `FILE:OPTIONS`, options as of `perdure trace replay`, such as
`p3-trace.csv:--speed 10 --until 2400` or `trace_hh_55_65.txt:--speed 20`. All are played against
perdure, torchrun, torchft with tuned time-outs and torchft at its defaults, in turns with plain
DDP, which is the reference: samples are told as shares of what DDP's own pace would have made of
the nodes that were there (U1). OUT gets a line a replay and is resumed (at another commit all are
played again); a call begins no replay
that it does not expect to end within `--minutes`.

A replay's own medians make its own simulation nearly right, which proves little. So what each
trace cost is put into the simulation of every other one, whose live run it has not seen:
*predicted* is that simulation's share of U1, *off* how far the live run is from it.
"""

import argparse
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from stamp import ROOT, name_commit, stamp
from sweep import sweep_after_me

from perdure_lab.cli.trace import load_trace, prepare
from perdure_lab.policies.policies import POLICIES, apply_costs
from perdure_lab.policies.throughput import Shape, Throughput
from perdure_lab.report import MeasuredCosts, Physics, ReplayResult
from perdure_lab.simulation.compare import compare
from perdure_lab.traces.transform import cut

STATE_BYTES = 3.2e6
TRIES = 2
"""Of a replay that fails, as where the machine is too busy for it."""
DEFAULTS = ("--nodes-max", "5", "--pace-ms", "40", "--policy", "all")


def play(words: str, home: Path, rep: int) -> dict[str, Any]:
    """Return a replay of `FILE:OPTIONS`, as it answers, with what it was made with."""
    file, _, options = words.partition(":")
    command = [sys.executable, "-m", "perdure", "trace", "replay", file, *DEFAULTS]
    row = {"trace": words, "rep": rep} | stamp()
    begun = time.monotonic()
    done = subprocess.run(
        [*command, *shlex.split(options), "--json"],
        env=dict(os.environ, PERDURE_HOME=str(home)),
        stdout=subprocess.PIPE,
        text=True,
        timeout=3600,
        check=False,
    )
    row["took_s"] = round(time.monotonic() - begun)
    if done.returncode:
        return row | {"error": done.stdout.strip()[-400:] or f"rc {done.returncode}"}
    return row | {"result": json.loads(done.stdout)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return what was played so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def predict(costs: MeasuredCosts, row: dict[str, Any]) -> float:
    """Return the share of U1 that perdure has in the simulation of `row`'s trace with `costs`."""
    result = msgspec.convert(row["result"], ReplayResult)
    file, _, options = row["trace"].partition(":")
    asked = argparse.ArgumentParser()
    known = {
        "--speed": 1.0,
        "--until": None,
        "--notice": 0.0,
        "--coalesce": 0.5,
        "--duration": None,
    }
    for name, default in known.items():
        asked.add_argument(name, type=float, default=default)
    wish, _ = asked.parse_known_args(shlex.split(options))
    trace = load_trace(Path(file), None, wish.duration)
    trace = cut(trace, wish.until) if wish.until else trace
    drawn = result.seed
    trace = prepare(trace, result.nodes_max, wish.speed, wish.notice, wish.coalesce, drawn)
    rates = {Shape(int(n), 1): rate for n, rate in result.throughput.items()}
    batch = 56 * 4.0
    table = Throughput(
        "replay", rates, global_batch=batch, state_bytes=STATE_BYTES, source="plain DDP"
    )
    policy = apply_costs(POLICIES["perdure"], costs)
    found, _ = compare(cut(trace, result.duration_s), table, [policy], Physics())
    return found.policies[0].fraction_of_u1


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print every replay, then every prediction."""
    good = [row for row in rows if "result" in row]
    print("| trace | system | of U1 | pace | lost work | reconfiguration | longest gap | load |")
    print("|---|---|---|---|---|---|---|---|")
    for row in good:
        for system in row["result"]["systems"]:
            ledger = system["ledger"]
            moved = sum(v for k, v in ledger.items() if k.startswith("reconfiguration"))
            cells = [f"{system['fraction_of_u1']:.3f}", f"{system.get('pace', 0.0):.3f}"]
            cells += [f"{ledger['lost_work']:.2%}", f"{moved:.2%}"]
            cells += [f"{system['longest_gap_s']:.1f} s", str(system["load"])]
            print("| " + " | ".join([row["trace"], system["system"], *cells]) + " |")
    told = [row for row in good if row["result"]["costs"] is not None]
    for row in told:  # What it is told of a trace is what the replay itself has played.
        own = predict(msgspec.convert(row["result"]["costs"], MeasuredCosts), row)
        simulated = row["result"]["simulated"]["fraction_of_u1"]
        if not math.isclose(own, simulated, rel_tol=1e-6):
            raise SystemExit(f"{row['trace']} was not played so, or with an option unknown here")
    print("\n| costs of | predict | predicted | live | off |\n|---|---|---|---|---|")
    off = []
    for a, b in itertools.permutations(told, 2):
        if a["trace"] == b["trace"]:
            continue
        live = next(s for s in b["result"]["systems"] if s["system"] == "perdure")
        costs = msgspec.convert(a["result"]["costs"], MeasuredCosts)
        share = predict(costs, b)
        off.append(abs(live["fraction_of_u1"] / share - 1))
        cells = [a["trace"], b["trace"], f"{share:.4f}", f"{live['fraction_of_u1']:.4f}"]
        print("| " + " | ".join([*cells, f"{live['fraction_of_u1'] / share - 1:+.2%}"]) + " |")
    if off:
        print(f"\nmean of how far off: {sum(off) / len(off):.2%}, most {max(off):.2%}")
    for row in rows:
        kept = {k: v for k, v in row.items() if k not in ("result",)}
        print(json.dumps(kept | {"spread": row.get("result", {}).get("reference_spread")}))


def main() -> None:
    """Play what is not played yet, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", metavar="FILE[:OPTIONS]")
    parser.add_argument("--out", type=Path, default=Path("replays.jsonl"))
    parser.add_argument("--home", type=Path, default=ROOT / ".bench-replay")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.table:
        print_tables(read_rows(args.table))
        return
    rows, begun = read_rows(args.out), time.monotonic()
    now = name_commit()
    done = {(r["trace"], r["rep"]) for r in rows if "result" in r and r["commit"] == now}
    args.home.mkdir(exist_ok=True)
    tries = Counter((r["trace"], r["rep"]) for r in rows if "error" in r and r["commit"] == now)
    done |= {cell for cell, count in tries.items() if count >= TRIES}
    left = [(t, rep) for rep in range(args.repeat) for t in args.traces if (t, rep) not in done]
    while left:
        words, rep = left[0]
        known = [row["took_s"] for row in rows if row["trace"] == words]
        if time.monotonic() - begun + max(known, default=900.0) > args.minutes * 60:
            break
        rows.append(play(words, args.home.resolve(), rep))
        with open(args.out, "a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "result"}), flush=True)
        left.pop(0)
    print(f"{len(left)} replays are left" if left else "nothing is left", flush=True)


if __name__ == "__main__":
    sweep_after_me()
    main()
