"""`make demo`: a small GPT trains on two ranks while the ground is pulled away three times.

The fault plan is carried out through perdure's public commands, as an outsider would: one rank
is killed with SIGKILL, one is stopped with SIGSTOP, and the controller is killed. Training
reaches its planned step; then comes what happened, in numbers, and an HTML report.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo"
JOB = HOME / "jobs" / "demo"
PERDURE = [sys.executable, "-m", "perdure"]


def step_now() -> int:
    """Return the job's committed step as its snapshot on disk has it; -1 before there is one."""
    try:
        return int(json.loads((JOB / "state.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return -1


def wait_for_step(step: int, process: subprocess.Popen[bytes]) -> bool:
    """Return True once `step` is committed, False if the run ended before."""
    while process.poll() is None:
        if step_now() >= step:
            return True
        time.sleep(0.1)
    return False


def carry_out_faults(process: subprocess.Popen[bytes]) -> None:
    """Kill rank 1 at step 200, stop rank 0 at step 400, kill the controller at step 600."""
    for at_step, fault, rank in ((200, "crash", 1), (400, "stop", 0)):
        if not wait_for_step(at_step - 100, process):
            return
        inject = ["inject", "demo", fault, "--rank", str(rank), "--at-step", str(at_step)]
        subprocess.run([*PERDURE, *inject], check=False, timeout=60, stdout=subprocess.DEVNULL)
        if not wait_for_step(at_step + 20, process):
            return
    if wait_for_step(600, process):
        os.kill(json.loads((JOB / "parts.json").read_text())["controller"], signal.SIGKILL)


def main() -> int:
    """Run the job, its faults beside it; return the job's exit code."""
    shutil.rmtree(HOME, ignore_errors=True)
    os.environ["PERDURE_HOME"] = str(HOME)
    os.chdir(ROOT)
    print("demo: faults to come: SIGKILL of rank 1, SIGSTOP of rank 0, SIGKILL of the controller")
    run = [*PERDURE, "run", "-c", "examples/demo.toml"]
    process = subprocess.Popen(run)
    faults = threading.Thread(target=carry_out_faults, args=(process,), daemon=True)
    faults.start()
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait()
    page = HOME / "report.html"
    html = [*PERDURE, "report", "demo", "--html", str(page)]
    subprocess.run(html, check=False, timeout=120, stdout=subprocess.DEVNULL)
    print(f"demo: the report as a page: {page.relative_to(ROOT)}")
    print("demo: the same again, as JSON: PERDURE_HOME=.demo .venv/bin/perdure report demo --json")
    return code


if __name__ == "__main__":
    sys.exit(main())
