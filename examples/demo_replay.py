"""Act `replay`: machines come and go as a trace says, and the model is cut anew.

A pipeline trains on three nodes, a stage on each. A node is an agent, a keeper and a rank of this
machine; who leaves is killed with SIGKILL, and who comes starts from nothing. With each change the
model is cut into as many stages as there are nodes, and a lost stage comes from its snapshot in a
neighbour's memory. Samples a second for each number of nodes are measured first (virtual
devices: real tensors and collectives, a declared time of computing). At the end: what was
committed, as a fraction of what a clairvoyant could have had.
"""

import subprocess
import sys

from demo_job import HOME, PERDURE, say, set_up

TRACE = HOME / "demo-trace.csv"
REFUSED = 4
"""Exit code where throughput does not rise with the number of nodes."""
EVENTS = "0,add,a\n0,add,b\n0,add,c\n9000,remove,b\n16000,remove,c\n22000,add,d\n"
"""Milliseconds, what, which node."""
LENGTH_S = 36


def main() -> int:
    """Make the trace and play it; return the exit code of the replay."""
    TRACE.write_text(EVENTS)
    say(f"\nreplay: machines come and go for {LENGTH_S} s; throughput is measured first")
    page = HOME / "replay.html"
    words = ["--duration", str(LENGTH_S), "--stages", "3", "--pace-ms", "80", "--html", str(page)]
    code = subprocess.run([*PERDURE, "trace", "replay", str(TRACE), *words], timeout=600).returncode
    if code == REFUSED:
        say("  this machine is too busy for a replay, which is therefore left out")
        return 0
    if code == 0:
        say(f"  the replay as a page: {page}")
    return code


if __name__ == "__main__":
    set_up()
    sys.exit(main())
