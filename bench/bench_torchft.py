"""Failures of torchft replica groups: perdure beside torchft as it is, in one run.

    python bench/bench_torchft.py [--trials 10] [--kills 0] [--only perdure,tuned] [--replicas 3]

*Stall*: from the failure to the first step committed without the victim, on the slowest survivor.
*Full*: until a group in the victim's place has committed a step with all the others. Hashes of
parameters and moments of all groups are compared at every tenth step. Prints JSON lines, then a
table. `--kills N` adds N kills of perdure's groups for the tail; with `--rounds` the systems take
turns, so that all of them meet the same load. `torchrun` restarts the whole world instead, a
plain script that saves every 50 steps: its stall is the time to the next step, its full strength
that to the step which was lost.
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_restart import measure
from sweep import sweep_after_me
from torchft_systems import Groups, Mended, Perdure, PerdureSpare, PerdureStock, Stock, Tuned

SYSTEMS: dict[str, type[Groups]] = {
    "perdure": Perdure,
    "perdure + spare": PerdureSpare,
    "perdure + stock lighthouse": PerdureStock,
    "torchft": Stock,
    "torchft mended": Mended,
    "torchft mended + tuned": Tuned,
}
TIMEOUT_S = 100.0


def commits(groups: Groups, group: int, since: float) -> list[dict[str, Any]]:
    return [r for r in groups.poll()[group] if r["t"] > since and "failed" not in r]


def fail_one(groups: Groups, victim: int, harm: Callable[[Groups, int], float]) -> dict[str, Any]:
    """Harm one group; return the survivors' stall and the time to full strength."""
    before = groups.live()
    quorum = max(groups.rows[g][-1]["q"] for g in before)
    pids = {g: groups.rows[g][-1]["pid"] for g in before}
    at = harm(groups, victim)
    survivors = [g for g in before if g != victim]

    def stalled() -> list[float] | None:
        ends = []
        for group in survivors:
            new = [r for r in commits(groups, group, at) if r["q"] > quorum]
            if not new:
                return None
            ends.append(new[0]["t"] - at)
        return ends

    result: dict[str, Any] = {}
    ends = groups.wait(stalled, TIMEOUT_S)
    result["stall_s"] = round(max(ends), 4) if ends else None
    groups.poll()
    crashed = [g for g in survivors if groups.rows[g][-1]["pid"] != pids[g]]
    result["crashed"] = len(crashed)

    def full() -> float | None:
        for group in groups.rows:
            fresh = group not in before or group == victim
            rows = commits(groups, group, at) if fresh else []
            new = [r for r in rows if r["n"] == groups.count and r["q"] > quorum]
            if new:
                return float(new[0]["t"] - at)
        return None

    back = groups.wait(full, TIMEOUT_S)
    result["full_s"] = round(back, 4) if back else None
    return result


def kill(groups: Groups, victim: int) -> float:
    at = time.time()
    os.kill(groups.rows[victim][-1]["pid"], signal.SIGKILL)
    return at


def stop(groups: Groups, victim: int) -> float:
    at = time.time()
    os.kill(groups.rows[victim][-1]["pid"], signal.SIGSTOP)
    return at


def hang(groups: Groups, victim: int) -> float:
    (groups.log / f"hang-{victim}").touch()
    groups.wait(lambda: (groups.log / f"hung-{victim}").exists(), 10)
    return time.time()


def gap_after(groups: Groups, harm: Callable[[], None]) -> dict[str, Any]:
    """Return the longest time without a commit on any group around `harm`, and before it."""
    time.sleep(3.0)
    at = time.time()
    harm()
    time.sleep(6.0)
    alive = groups.wait(lambda: len(groups.live()) == groups.count, TIMEOUT_S)
    gaps, usual = [], []
    for rows in groups.poll().values():
        times = [r["t"] for r in rows if "failed" not in r]
        pairs = list(itertools.pairwise(times))
        gaps += [b - a for a, b in pairs if b > at and a < at + 6.0]
        usual += [b - a for a, b in pairs if at - 3.0 < b < at]
    found = {"gap_s": round(max(gaps, default=0.0), 4), "usual_s": round(max(usual, default=0), 4)}
    return found | {"survived": bool(alive)}


def kill_part(groups: Groups, words: str) -> Callable[[], None]:
    def harm() -> None:
        groups.find(words)[-1].kill()

    return harm


def restart_stock_lighthouse(groups: Groups) -> Callable[[], None]:
    def harm() -> None:
        assert isinstance(groups, Stock)
        groups.lighthouse.kill()
        groups.lighthouse.wait()
        time.sleep(0.5)
        groups.start_lighthouse()

    return harm


def run_trials(
    name: str, kind: type[Groups], args: argparse.Namespace, harms: dict[str, int]
) -> list[dict[str, Any]]:
    """Run one system through its trials; return the results of each."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        groups = kind(Path(folder) / "run", args.replicas, {"STEP_PAUSE_S": str(args.pause_s)})
        try:
            for what, trials in harms.items():
                for trial in range(trials):
                    if not groups.wait_full():
                        results.append({"system": name, "failure": what, "down": True})
                        return results
                    time.sleep(0.5 + 0.037 * (trial % 20))
                    found = one_trial(groups, what, trial)
                    load = round(os.getloadavg()[0], 1)
                    results.append({"system": name, "failure": what, **found, "load": load})
                    print(json.dumps(results[-1]), flush=True)
            compared, wrong = groups.mismatches()
            hashes = {"system": name, "failure": "hashes", "compared": compared, "wrong": wrong}
            print(json.dumps(hashes), flush=True)
            results.append(hashes)
        finally:
            groups.end()
    return results


def one_trial(groups: Groups, what: str, trial: int) -> dict[str, Any]:
    victim = groups.live()[trial % groups.count]
    match what:
        case "kill -9":
            return fail_one(groups, victim, kill)
        case "SIGSTOP":
            found = fail_one(groups, victim, stop)
            for row in groups.rows[victim][-1:]:  # torchft by itself leaves it stopped
                with_cont = subprocess.run(["kill", "-CONT", str(row["pid"])], check=False)
                found["continued"] = with_cont.returncode == 0
            return found
        case "hung thread":
            return fail_one(groups, victim, hang)
        case "lighthouse killed":
            if isinstance(groups, Perdure):
                return gap_after(groups, kill_part(groups, "perdure lighthouse bench: serving"))
            return gap_after(groups, restart_stock_lighthouse(groups))
        case "controller killed":
            return gap_after(groups, kill_part(groups, "perdure controller"))
        case _:
            return gap_after(groups, kill_part(groups, "nats-server"))


def describe(values: list[float | None]) -> str:
    """Return median and maximum, from 100 trials on also the 99th percentile (nearest rank)."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return "never"
    text = f"{statistics.median(known):.3f} s ({known[-1]:.3f})"
    if len(known) >= 100:
        text += f", p99 {known[math.ceil(0.99 * len(known)) - 1]:.3f}"
    return text + (f", {len(values) - len(known)} never" if len(known) < len(values) else "")


def restart_torchrun(replicas: int) -> dict[str, Any]:
    """Kill one rank of a plain script under torchrun; return how long its restart takes."""
    found = measure("torchrun", replicas, 50, 120)
    result = {"system": "torchrun", "failure": "kill -9"}
    times = {"stall_s": found.get("first_step_s"), "full_s": found.get("same_step_s")}
    rounded = {key: None if value is None else round(value, 4) for key, value in times.items()}
    row = {**result, **rounded, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(row), flush=True)
    return row


def run_rounds(args: argparse.Namespace, wanted: list[str]) -> list[dict[str, Any]]:
    """Kill groups of each system in turn, again and again; return all results."""
    each, results = -(-args.trials // args.rounds), []
    for _ in range(args.rounds):
        for name in [n for n in SYSTEMS if n in wanted]:
            results += run_trials(name, SYSTEMS[name], args, {"kill -9": each})
        if "torchrun" in wanted:
            results += [restart_torchrun(args.replicas) for _ in range(each)]
    return results


def summarize(results: list[dict[str, Any]]) -> None:
    """Print the medians and maxima of every system and failure."""
    keys = list(dict.fromkeys((r["system"], r["failure"]) for r in results))
    print(
        "\n| failure | system | trials | stall median (max) | full strength median (max) | notes |"
    )
    print("|---|---|---|---|---|---|")
    for system, failure in sorted(keys, key=lambda key: (key[1], key[0])):
        mine = [r for r in results if (r["system"], r["failure"]) == (system, failure)]
        if failure == "hashes":
            compared, wrong = (sum(r[key] for r in mine) for key in ("compared", "wrong"))
            print(f"| {failure} | {system} | {compared} | wrong: {wrong} | | |")
            continue
        keys_of = ("gap_s", "usual_s") if "gap_s" in mine[0] else ("stall_s", "full_s")
        cells = [describe([r.get(key) for r in mine]) for key in keys_of]
        crashed = sum(r.get("crashed", 0) for r in mine)
        down = sum(bool(r.get("down")) for r in mine)
        note = f"{crashed} survivors crashed" if crashed else ""
        note += "; the job did not come back" if down else ""
        print(f"| {failure} | {system} | {len(mine)} | {cells[0]} | {cells[1]} | {note} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--slow-trials", type=int, default=2, help="of those that take a minute")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=1, help="kills only: each system again and again, in turn"
    )
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=0.02)
    parser.add_argument("--only", default=",".join([*SYSTEMS, "torchrun"]))
    args = parser.parse_args()
    wanted = [name.strip() for name in args.only.split(",")]
    results: list[dict[str, Any]] = []
    if args.rounds > 1:
        summarize(run_rounds(args, wanted))
        return
    for name, kind in SYSTEMS.items():
        if name not in wanted:
            continue
        ours = issubclass(kind, Perdure)
        harms = {"kill -9": args.trials}
        if name == "perdure":
            parts = ("lighthouse killed", "controller killed", "nats-server killed")
            harms |= {"SIGSTOP": args.trials, "hung thread": args.slow_trials + 1}
            harms |= dict.fromkeys(parts, max(1, args.trials // 2))
        elif not ours:
            harms |= {"SIGSTOP": args.slow_trials}
        results += run_trials(name, kind, args, harms)
        if name == "torchft mended":  # Each may end the job, so each has one of its own.
            for slow in ("hung thread", "lighthouse killed"):
                results += run_trials(name, kind, args, {slow: 1})
    if "torchrun" in wanted:
        results.append(restart_torchrun(args.replicas))
    if args.kills:
        results += run_trials("perdure: many kills", Perdure, args, {"kill -9": args.kills})
    summarize(results)


if __name__ == "__main__":
    sweep_after_me()
    main()
