"""`make demo`, second act: a rank dies, and the others do not leave their training loop.

Four ranks train the GPT of `examples/elastic_gpt.py`; two of them are killed with SIGKILL, the
first rank among them. The others redo what the dead one had in flight, and its node starts a new
process in its place, which takes the state from living peers. Then comes what it cost.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo-elastic"
JOB = HOME / "jobs" / "elastic"
PERDURE = [sys.executable, "-m", "perdure"]
SCRIPT = ["examples/elastic_gpt.py", "--steps", "240", "--layers", "2", "--width", "64"]
KILLS = ((60, 2), (140, 0))
"""(step, rank): the rank is killed at some instant soon after the step."""


def read_status() -> dict[str, object]:
    """Return the job's status; an empty object before there is one."""
    asked = [*PERDURE, "status", "elastic", "--json"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def step_now() -> int:
    """Return the committed step as the snapshot on disk has it; -1 before there is one."""
    try:
        return int(json.loads((JOB / "state.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return -1


def kill_ranks(process: subprocess.Popen[bytes]) -> None:
    """Kill what `KILLS` says, each once its step is committed."""
    for step, slot in KILLS:
        while step_now() < step:
            if process.poll() is not None:
                return
            time.sleep(0.05)
        rows = read_status().get("ranks", [])
        assert isinstance(rows, list)
        pid = next(int(row["pid"]) for row in rows if row["rank"] == slot)
        print(f"demo: SIGKILL to rank {slot}, process {pid}", flush=True)
        os.kill(pid, signal.SIGKILL)


def main() -> int:
    """Run the job and its kills; return the job's exit code."""
    shutil.rmtree(HOME, ignore_errors=True)
    os.environ["PERDURE_HOME"] = str(HOME)
    os.chdir(ROOT)
    print("\ndemo: four ranks train on while two of them are killed and replaced", flush=True)
    process = subprocess.Popen([*PERDURE, "run", "-n", "4", "--name", "elastic", *SCRIPT])
    try:
        kill_ranks(process)
        return process.wait(300)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
