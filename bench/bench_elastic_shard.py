"""Sharded elastic jobs: what a re-formation takes by phase, and what a snapshot stalls.

    python bench/bench_elastic_shard.py [--megabytes 100 400 1000] [--kills 2]

Real jobs of `perdure run`, three ranks with one copy of the state (`full`), and four with two
copies. Some steps are trained undisturbed, then a rank is killed; phases are the journal's.
`copy` is the time in which a snapshot is copied and hashed beside training, `stall` what training
waited for it, both a snapshot.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from sweep import sweep_after_me

SCRIPT = Path(__file__).resolve().parent / "scripts" / "elastic_sharded.py"
EVERY = 5
BEFORE_KILL = 12
"""Steps; two snapshots at least."""


def rows_of(trail: Path, member: int) -> list[dict[str, Any]]:
    path = trail / f"rank-{member}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(condition: Any, process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"no {what}")
        time.sleep(0.02)


def run_job(ranks: int, shard: str, megabytes: int) -> dict[str, float]:
    """Run one job in which rank 1 is killed; return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        trail, env = Path(folder, "trail"), dict(os.environ, PERDURE_HOME=f"{folder}/state")
        Path(folder, "job.toml").write_text("[restart]\nreplace = false\n")
        command = [sys.executable, "-m", "perdure", "run", "--name", "sh", "-n", str(ranks)]
        command += ["-c", f"{folder}/job.toml", str(SCRIPT), str(trail), "--shard", shard]
        command += ["--megabytes", str(megabytes), "--every", str(EVERY)]
        with open(Path(folder, "out"), "wb") as out:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            wait_for(lambda: len(rows_of(trail, 0)) > BEFORE_KILL, process, "steps")
            before = rows_of(trail, 0)
            children = psutil.Process(process.pid).children(recursive=True)
            title = "perdure rank sh g0 r1"
            os.kill(next(c.pid for c in children if title in " ".join(c.cmdline())), signal.SIGKILL)
            killed = time.monotonic()
            left = [m for m in range(ranks) if m != 1]

            def after() -> list[dict[str, Any]]:
                return [r for r in rows_of(trail, 0) if r["world"] == left]

            wait_for(after, process, "step of the survivors")
            total_s = after()[0]["at"] - killed
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        journal = Path(folder, "state", "jobs", "sh", "journal.jsonl").read_text().splitlines()
    return describe([json.loads(line)["body"] for line in journal], before, total_s)


def describe(
    events: list[dict[str, Any]], before: list[dict[str, Any]], total_s: float
) -> dict[str, float]:
    formed = [e for e in events if e["type"] == "WorldReformed" and e["epoch"] == 1]
    step_s = statistics.median(b["at"] - a["at"] for a, b in itertools.pairwise(before))
    snapshots = len(before) // EVERY
    ordered = max(e["ordered_s"] for e in formed)
    connected = max(e["connected_s"] for e in formed)
    return {
        "step": step_s,
        "stall": (before[-1]["stall"] - before[0]["stall"]) / snapshots,
        "copy": before[-1]["copied"],
        "communicator": connected - ordered,
        "state": max(e["formed_s"] for e in formed) - connected,
        "next step": total_s,
        "back": max(e.get("back", 0) for e in formed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 400, 1000])
    parser.add_argument("--kills", type=int, default=2)
    args = parser.parse_args()
    print(f"median of {args.kills} kills, seconds; load {os.getloadavg()[0]:.1f}")
    for ranks, shard in ((3, "full"), (4, "2")):
        for megabytes in args.megabytes:
            found = [run_job(ranks, shard, megabytes) for _ in range(args.kills)]
            middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
            text = "  ".join(f"{key} {value:.3f}" for key, value in middle.items())
            print(f"{ranks} ranks, shard {shard}, {megabytes} MB: {text}", flush=True)


if __name__ == "__main__":
    sweep_after_me()
    main()
