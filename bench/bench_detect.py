"""SIGSTOP of a rank in an unmodified script: seconds until the verdict names it.

Reported beyond the learned step time. torchrun has no verdict of its own: it waits for the
collective's time-out (1,800 s for gloo), so its figure is stated, not measured.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "e2e" / "scripts" / "allreduce.py"


def measure(ranks: int, pace_s: float, seed: int) -> dict[str, float | bool]:
    """Run, stop rank `seed % ranks` at a moment that depends on the seed, read the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, PERDURE_HOME=folder)
        state = Path(folder) / "jobs" / "bench" / "state.json"
        perdure = [sys.executable, "-m", "perdure"]
        process = subprocess.Popen(
            [*perdure, "run", "-n", str(ranks), "--name", "bench", str(SCRIPT)]
            + ["--steps", "100000", "--pace-s", str(pace_s)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 60
            row: dict[str, object] = {}
            while time.monotonic() < deadline and row.get("state") != "running":
                time.sleep(0.1)
                row = json.loads(state.read_text()) if state.exists() else {}
            time.sleep(3.0 + 0.37 * seed)
            pids = {r["rank"]: r["pid"] for r in json.loads(state.read_text())["ranks"]}
            offset = json.loads((state.parent / "endpoint.json").read_text())["clock_offset_s"]
            victim = seed % ranks
            os.kill(pids[victim], signal.SIGSTOP)
            stopped = time.monotonic() + offset
            while time.monotonic() < deadline + 60:
                out = subprocess.run(
                    [*perdure, "diagnose", "bench", "--json"], env=env, capture_output=True
                ).stdout
                hangs = [v for v in json.loads(out)["verdicts"] if "Hang" in v["kind"]]
                if hangs:
                    confirmed = float(hangs[0]["confirmed_s"]) - stopped
                    right = hangs[0]["culprit"].get("rank") == victim
                    return {"confirmed_s": confirmed, "right": right}
                time.sleep(0.2)
            return {"confirmed_s": float("inf"), "right": False}
        finally:
            process.terminate()
            process.wait(30)


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pace-s", type=float, default=0.05)
    args = parser.parse_args()
    rows = []
    for seed in range(args.repeat):
        rows.append(measure(args.ranks, args.pace_s, seed))
        print(rows[-1], file=sys.stderr, flush=True)
    beyond = sorted(float(row["confirmed_s"]) - args.pace_s for row in rows)
    result = {
        "ranks": args.ranks,
        "step_s": args.pace_s,
        "beyond_step_median_s": round(statistics.median(beyond), 3),
        "beyond_step_max_s": round(beyond[-1], 3),
        "culprit_right": sum(bool(row["right"]) for row in rows),
        "of": len(rows),
        "torchrun_s": "1800 (gloo's collective time-out; not measured)",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sweep_after_me()
    main()
