"""`make bench`: every benchmark once; writes bench/RESULTS.json, printed as bench/RESULTS.md."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from sweep import sweep_after_me

HERE = Path(__file__).resolve().parent
BENCHES = {
    "restart": ["bench_restart.py"],
    "detect": ["bench_detect.py"],
    "overhead": ["bench_overhead.py"],
    "checkpoint": ["bench_checkpoint.py"],
    "sim": ["bench_sim.py"],
    "journal": ["bench_journal.py"],
}


def main() -> int:
    """Run them in turn, never side by side; a failed one is reported as such."""
    names = sys.argv[1:] or list(BENCHES)
    path = HERE / "RESULTS.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        command = [sys.executable, str(HERE / BENCHES[name][0])]
        print(f"bench: {name}", file=sys.stderr, flush=True)
        begun = time.time()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800)
        results[name] = {
            "command": "python " + " ".join(["bench/" + BENCHES[name][0]]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "seconds": round(time.time() - begun),
            "result": json.loads(done.stdout) if done.returncode == 0 else f"rc {done.returncode}",
        }
        path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(json.dumps(results[name]["result"]), flush=True)
    return 0


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
