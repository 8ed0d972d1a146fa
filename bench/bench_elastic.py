"""Elastic depth: SIGKILL to the survivors' next committed step, and the cost of being elastic.

    python bench/bench_elastic.py [--kills 40] [--ranks 4] [--blocks 12]
    python bench/bench_elastic.py --spares 1 [--kills 40] [--ranks 4]
    python bench/bench_elastic.py --spares 1 --state-mb 300 [--kills 4] [--ranks 3]

Kills: real jobs of `perdure run`; a rank is killed at a random instant, then another one of those
left while there are three or more. Printed beside it: the phases by the journal, and what bare
gloo needs for a new group of the survivors (store, connections, one all-reduce). Overhead: plain
DistributedDataParallel and the elastic trainer take turns within the same two processes.

With `--spares`, one job: each kill is followed by a spare that stands in, and by the next kill
once the next spare is ready. Full strength is the first step that the whole world has committed
with it. Of a large state the spare takes most while the others train: the join's stall is
that of the epoch in which it comes in, and the slowest step beside it that of the copy.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ELASTIC = HERE / "scripts" / "elastic_paced.py"
OVERHEAD = HERE / "scripts" / "elastic_overhead.py"


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rows_of(trail: Path, rank: int) -> list[dict[str, Any]]:
    path = trail / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(condition: Any, process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no {what}")
        time.sleep(0.01)


def kill_in_job(ranks: int, chance: random.Random) -> list[dict[str, float]]:
    """Run one job; return each kill's figures."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trail, env = Path(folder, "trail"), dict(os.environ, PERDURE_HOME=f"{folder}/state")
        config = Path(folder, "job.toml")
        config.write_text("[restart]\nreplace = false\n")
        command = [sys.executable, "-m", "perdure", "run", "--name", "el", "-n", str(ranks)]
        command += ["-c", str(config)]
        with open(Path(folder, "out"), "wb") as out:
            process = subprocess.Popen(
                [*command, str(ELASTIC), str(trail)], env=env, stdout=out, stderr=out
            )
        try:
            alive = list(range(ranks))
            wait_for(lambda: len(rows_of(trail, 0)) > 20, process, "twenty steps")
            while len(alive) >= 3:
                found.append(kill_one(process, trail, alive, chance))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        journal = Path(folder, "state", "jobs", "el", "journal.jsonl").read_text().splitlines()
        endpoint = json.loads(Path(folder, "state", "jobs", "el", "endpoint.json").read_text())
        for kill in found:
            kill["killed_s"] += endpoint["clock_offset_s"]
        add_phases(found, [json.loads(line) for line in journal])
    return found


def kill_one(
    process: subprocess.Popen[bytes], trail: Path, alive: list[int], chance: random.Random
) -> dict[str, float]:
    time.sleep(0.5 + 0.2 * chance.random())
    victim = chance.choice(alive)
    alive.remove(victim)
    title = f"perdure rank el g0 r{victim}"
    children = psutil.Process(process.pid).children(recursive=True)
    pid = next(c.pid for c in children if title in " ".join(c.cmdline()))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()

    def firsts() -> list[float]:
        rows = [[r for r in rows_of(trail, k) if r["world"] == alive] for k in alive]
        return [mine[0]["at"] for mine in rows if mine]

    wait_for(lambda: len(firsts()) == len(alive), process, "step of the survivors")
    usual = [r["at"] for r in rows_of(trail, alive[0]) if r["at"] < killed]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(usual))
    total_s = max(firsts()) - killed
    return {"victim": victim, "total_s": total_s, "step_s": step_s, "killed_s": killed}


def add_phases(found: list[dict[str, float]], entries: list[dict[str, Any]]) -> None:
    for kill in found:
        for index, entry in enumerate(entries):
            body = entry["body"]
            if body["type"] == "RankExited" and body["record"]["rank"] == kill["victim"]:
                died_s, decided_s = body["record"]["at_s"], entry["at_s"]
                after = [e["body"] for e in entries[index:] if e["body"]["type"] == "WorldReformed"]
                epoch = [e for e in after if e["epoch"] == after[0]["epoch"]]
                kill["die_s"] = died_s - kill["killed_s"]
                kill["reap_s"] = body["detected_s"] - died_s
                kill["decide_s"] = decided_s - body["detected_s"]
                kill["order_s"] = max(e["ordered_s"] for e in epoch) - decided_s
                kill["form_s"] = max(e["formed_s"] - e["ordered_s"] for e in epoch)
                formed_s = max(e["formed_s"] for e in epoch)
                kill["redo_s"] = kill["total_s"] - (formed_s - kill["killed_s"])
                kill["redo"] = sum(e.get("redo", 0) for e in epoch)
                break


def read_journal(folder: str) -> tuple[list[dict[str, Any]], float]:
    """Return the journal's entries, and job time less CLOCK_MONOTONIC."""
    job = Path(folder, "state", "jobs", "el")
    path = job / "journal.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    offset_s = json.loads((job / "endpoint.json").read_text())["clock_offset_s"]
    return [json.loads(line) for line in lines if line.endswith("}")], offset_s


def stand_in(args: argparse.Namespace, chance: random.Random) -> list[dict[str, float]]:
    """Run one job with spares; return each kill's figures."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trail, env = Path(folder, "trail"), dict(os.environ, PERDURE_HOME=f"{folder}/state")
        command = [sys.executable, "-m", "perdure", "run", "--name", "el"]
        command += ["-n", str(args.ranks), "--spares", str(args.spares)]
        with open(Path(folder, "out"), "wb") as out:
            process = subprocess.Popen(
                [*command, str(ELASTIC), str(trail), str(args.state_mb)],
                env=env, stdout=out, stderr=out,
            )  # fmt: skip
        world = list(range(args.ranks))
        try:
            steps = 20 if args.state_mb < 50 else 5
            wait_for(lambda: len(rows_of(trail, 0)) > steps, process, "steps")
            while len(found) < args.kills:
                world = replace_one(process, folder, trail, world, chance, found)
                print(f"... {len(found)} kills", file=sys.stderr, flush=True)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        entries, offset_s = read_journal(folder)
        for kill in found:
            kill["killed_s"] += offset_s
        add_phases(found, entries)
        add_joins(found, entries)
    return found


def replace_one(
    process: subprocess.Popen[bytes],
    folder: str,
    trail: Path,
    world: list[int],
    chance: random.Random,
    found: list[dict[str, float]],
) -> list[int]:
    """Kill one of `world` once a spare is ready; return the world that has the spare."""

    def spares() -> set[int]:
        joined = [e["body"] for e in read_journal(folder)[0] if e["body"]["type"] == "RankJoined"]
        return {body["rank"] for body in joined} - set(world) - {int(k["victim"]) for k in found}

    wait_for(lambda: spares(), process, "a spare")
    time.sleep(0.5 + 0.2 * chance.random())
    victim = chance.choice(world)
    title = f"perdure rank el g0 r{victim}:"
    children = psutil.Process(process.pid).children(recursive=True)
    pid = next(c.pid for c in children if title in " ".join(c.cmdline()))
    size, left = len(world), [rank for rank in world if rank != victim]
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()

    def first(rank: int, full: bool) -> dict[str, Any] | None:
        return next(
            (
                row
                for row in rows_of(trail, rank)
                if row["at"] > killed
                and victim not in row["world"]
                and (len(row["world"]) == size or not full)
            ),
            None,
        )

    wait_for(lambda: all(first(rank, True) for rank in left), process, "full strength")
    rows = [(first(rank, False), first(rank, True)) for rank in left]
    new = next(row for _, row in rows if row is not None)["world"]
    ats = [row["at"] for row in rows_of(trail, left[0])]
    usual = [b - a for a, b in itertools.pairwise(ats) if b < killed][-20:]
    full_at = max(row["at"] for _, row in rows if row is not None)
    beside = [b - a for a, b in itertools.pairwise(ats) if killed < a and b <= full_at]
    found.append(
        {
            "victim": victim,
            "killed_s": killed,
            "total_s": max(row["at"] for row, _ in rows if row is not None) - killed,
            "full_s": full_at - killed,
            "step_s": statistics.median(usual),
            "slowest_s": max(beside, default=0.0),
        }
    )
    return list(new)


def add_joins(found: list[dict[str, float]], entries: list[dict[str, Any]]) -> None:
    """Add what the journal says of ranks that followed before they joined."""
    for kill in found:
        later = [e["body"] for e in entries if e["at_s"] >= kill["killed_s"]]
        ready = next((e for e in later if e["type"] == "MemberReady"), None)
        if ready is None:
            continue
        reforms = [
            e for e in later if e["type"] == "WorldReformed" and e["formed_s"] > ready["at_s"]
        ]
        epoch = min((e["epoch"] for e in reforms), default=-1)
        members = [e for e in reforms if e["epoch"] == epoch and e["rank"] != ready["rank"]]
        if members:
            kill["stall_s"] = max(e["formed_s"] - e["began_s"] for e in members)
        kill["follow_s"], kill["bytes"] = ready["took_s"], float(ready["bytes"])
        kill["fresh"] = float(ready["step"] < 0)


def run_script(*args: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(OVERHEAD), *args], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def show(name: str, values: list[float]) -> None:
    middle, high = statistics.median(values), percentile(values, 0.99)
    print(f"{name:34} median {1e3 * middle:7.1f} ms   p99 {1e3 * high:7.1f} ms   n={len(values)}")


def report_spares(args: argparse.Namespace, kills: list[dict[str, float]]) -> None:
    load = os.getloadavg()[0]
    print(f"SIGKILL in a world of {args.ranks}, {args.spares} spare(s); load {load:.1f}")
    show("to the survivors' next step", [k["total_s"] for k in kills])
    show("to full strength", [k["full_s"] for k in kills])
    show("an undisturbed step", [k["step_s"] for k in kills])
    for phase in ("die_s", "reap_s", "decide_s", "order_s", "form_s", "redo_s"):
        show(f"  {phase}", [k[phase] for k in kills if phase in k])
    joins = [k for k in kills if "stall_s" in k]
    if joins:
        show("stall of the join", [k["stall_s"] for k in joins])
        show("slowest step beside it", [k["slowest_s"] for k in kills])
        show("following, to the call", [k["follow_s"] for k in joins])
        rate = statistics.median(k["bytes"] / k["follow_s"] / 1e6 for k in joins if k["follow_s"])
        size = statistics.median(k["bytes"] / 1e6 for k in joins)
        print(f"sent {size:.0f} MB of state and steps at {rate:.0f} MB/s, waits included")
        fresh = sum(int(k["fresh"]) for k in joins)
        print(f"joined without having followed: {fresh} of {len(joins)}")
    floor = run_script("floor", str(args.ranks), "20")
    show("bare gloo: a new group, one reduce", floor["new_group_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12, help="of each kind, for the overhead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--state-mb", type=float, default=0.0)
    args = parser.parse_args()
    chance, kills = random.Random(args.seed), list[dict[str, float]]()
    if args.spares:
        report_spares(args, stand_in(args, chance))
        return
    while len(kills) < args.kills:
        kills += kill_in_job(args.ranks, chance)
        print(f"... {len(kills)} kills", file=sys.stderr, flush=True)
    print(f"SIGKILL in worlds of {args.ranks} to 3 ranks; load {os.getloadavg()[0]:.1f}")
    show("to the survivors' next step", [k["total_s"] for k in kills])
    show("an undisturbed step", [k["step_s"] for k in kills])
    for phase in ("die_s", "reap_s", "decide_s", "order_s", "form_s", "redo_s"):
        show(f"  {phase}", [k[phase] for k in kills if phase in k])
    floor = run_script("floor", str(args.ranks - 1), "20")
    show("bare gloo: a new group, one reduce", floor["new_group_s"])
    cost = run_script("overhead", "2", str(args.blocks))
    print(f"steady step: DDP {cost['ddp_ms']:.2f} ms, elastic {cost['elastic_ms']:.2f} ms")
    low, high = cost["ratio_low"], cost["ratio_high"]
    print(f"ratio of neighbours {cost['ratio']:.3f} (95 %: {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
