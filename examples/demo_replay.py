"""`make demo`, another act: machines come and go as a trace says, and the training goes on.

A trace of half a minute is made up from a seed; then it is played. Each node is an agent, a keeper
and a rank of this machine; who leaves is killed with SIGKILL, and who comes starts from nothing.
Samples a second for each number of nodes are measured first (virtual devices: real tensors and
collectives, a declared time of computing). At the end: what was committed, as a fraction of what
a clairvoyant could have had.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo-replay"
TRACE = HOME / "demo-trace.json"
PERDURE = [sys.executable, "-m", "perdure"]
REFUSED = 4
"""Exit code where throughput does not rise with the number of nodes."""
FLEET = ["--nodes", "4", "--mtbf", "60", "--absence", "8", "--hours", "0.01", "--seed", "10"]


def main() -> int:
    """Make the trace and play it; return the exit code of the replay."""
    HOME.mkdir(exist_ok=True)
    os.environ["PERDURE_HOME"] = str(HOME)
    os.chdir(ROOT)
    made = subprocess.run([*PERDURE, "trace", "generate", *FLEET, "--out", str(TRACE)], timeout=60)
    if made.returncode:
        return made.returncode
    print("\ndemo: machines come and go for 36 s; throughput is measured first", flush=True)
    page = HOME / "replay.html"
    code = subprocess.run(
        [*PERDURE, "trace", "replay", str(TRACE), "--nodes-max", "4", "--html", str(page)],
        timeout=600,
    ).returncode
    if code == REFUSED:
        print("demo: this machine is too busy for a replay, which is therefore left out")
        return 0
    if code == 0:
        print(f"demo: the replay as a page: {page.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
