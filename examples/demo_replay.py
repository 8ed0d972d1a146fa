"""`make demo`, another act: machines come and go as a trace says, and the model is cut anew.

A pipeline trains on three nodes, a stage on each. A node is an agent, a keeper and a rank of this
machine; who leaves is killed with SIGKILL, and who comes starts from nothing. With each change the
model is cut into as many stages as there are nodes, and a lost stage comes from its snapshot in a
neighbour's memory. Samples a second for each number of nodes are measured first (virtual
devices: real tensors and collectives, a declared time of computing). At the end: what was
committed, as a fraction of what a clairvoyant could have had.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".demo-replay"
TRACE = HOME / "demo-trace.csv"
PERDURE = [sys.executable, "-m", "perdure"]
REFUSED = 4
"""Exit code where throughput does not rise with the number of nodes."""
EVENTS = "0,add,a\n0,add,b\n0,add,c\n9000,remove,b\n16000,remove,c\n22000,add,d\n"
"""Milliseconds, what, which node."""
LENGTH_S = 36


def main() -> int:
    """Make the trace and play it; return the exit code of the replay."""
    HOME.mkdir(exist_ok=True)
    os.environ["PERDURE_HOME"] = str(HOME)
    os.chdir(ROOT)
    TRACE.write_text(EVENTS)
    print(
        f"\ndemo: machines come and go for {LENGTH_S} s; throughput is measured first", flush=True
    )
    page = HOME / "replay.html"
    words = ["--duration", str(LENGTH_S), "--stages", "3", "--pace-ms", "80", "--html", str(page)]
    code = subprocess.run([*PERDURE, "trace", "replay", str(TRACE), *words], timeout=600).returncode
    if code == REFUSED:
        print("demo: this machine is too busy for a replay, which is therefore left out")
        return 0
    if code == 0:
        print(f"demo: the replay as a page: {page.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
