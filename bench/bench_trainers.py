"""SIGKILL of a rank to the script's first own line and first step, for what people run.

usage: bench_trainers.py [--kills 4] [--after 15] [--only plain,huggingface,lightning]

One rank, supervised, a script that knows nothing of perdure. It is killed `--after` seconds after
the first step of each life. Medians, and the first restart by itself: its image has to know what
the first life has imported.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from stamp import ROOT, stamp
from sweep import sweep_after_me

SCRIPT = ROOT / "bench/scripts/trainer_restart.py"
KINDS = ("plain", "huggingface", "lightning")
LIMIT_S = 180.0


def read_stamps(log: Path, what: str) -> list[float]:
    """Return when each life told of `what`, in seconds of the wall clock."""
    return [float(at) for at in re.findall(rf"{what} (\d+\.\d+)", log.read_text())]


def wait_stamp(log: Path, what: str, life: int) -> float:
    """Return when that life told of `what`.

    Raises:
        SystemExit: it did not within `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        stamps = read_stamps(log, what)
        if len(stamps) > life:
            return stamps[life]
        time.sleep(0.02)
    raise SystemExit(f"no {what} of life {life}: {log.read_text()[-2000:]}")


def find_rank(run: int, name: str) -> int:
    """Return the pid of the job's only rank."""
    for process in psutil.Process(run).children(recursive=True):
        if process.cmdline()[:1] and process.cmdline()[0].startswith(f"perdure rank {name} "):
            return process.pid
    raise SystemExit("no rank")


def measure(kind: str, kills: int, after_s: float) -> dict[str, object]:
    """Run one kind and kill its rank; return the seconds from each kill."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "out.txt")
        env = os.environ | {"PERDURE_HOME": f"{folder}/home", "PYTHONPATH": str(ROOT / "src")}
        words = [sys.executable, "-m", "perdure", "run", "--name", kind, "-n", "1"]
        with log.open("w") as out:
            run = subprocess.Popen(
                [*words, "--max-restarts", str(kills + 1), str(SCRIPT), kind],
                cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        lines, steps = [], []
        try:
            for life in range(kills):
                wait_stamp(log, "STEP", life)
                time.sleep(after_s)
                killed_s = time.time()
                os.kill(find_rank(run.pid, kind), signal.SIGKILL)
                lines.append(wait_stamp(log, "LINE", life + 1) - killed_s)
                steps.append(wait_stamp(log, "STEP", life + 1) - killed_s)
        finally:
            for _ in range(2):
                run.send_signal(signal.SIGINT)
                time.sleep(0.5)
            run.wait(60)
    return {
        "kind": kind,
        "line_s": round(statistics.median(lines), 3),
        "step_s": round(statistics.median(steps), 3),
        "first_restart": [round(lines[0], 3), round(steps[0], 3)],
        "all": [[round(a, 3), round(b, 3)] for a, b in zip(lines, steps, strict=True)],
    }


def main() -> None:
    """Measure the kinds one after another, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--after", type=float, default=15.0)
    parser.add_argument("--only", default=",".join(KINDS))
    options = parser.parse_args()
    print(json.dumps(stamp() | {"after_s": options.after}))
    for kind in options.only.split(","):
        print(json.dumps(measure(kind, options.kills, options.after)), flush=True)


if __name__ == "__main__":
    sweep_after_me()
    main()
