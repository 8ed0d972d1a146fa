"""`make demo`: acts in which training meets faults, each told in a few lines.

    make demo                        kills, elastic, links
    make demo ACTS="kills replay"    these

Each act is a program of its own (`demo_kills.py` and so on), whose docstring says what it does.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import demo_elastic
import demo_kills
import demo_links
import demo_replay
from demo_job import say, set_up

ACTS = {
    "kills": (demo_kills.main, 40),
    "elastic": (demo_elastic.main, 30),
    "links": (demo_links.main, 50),
    "replay": (demo_replay.main, 150),
}
"""Name -> what runs it, and about how many seconds it takes on two quiet cores."""
USUAL = ("kills", "elastic", "links")


def main(names: list[str]) -> int:
    """Run the acts `names`, or the usual ones; return the first exit code that is not 0."""
    names = names or list(USUAL)
    if unknown := [name for name in names if name not in ACTS]:
        print(f"demo: no act {unknown[0]!r}\nhint: there is {', '.join(ACTS)}", file=sys.stderr)
        return 2
    set_up()
    seconds = sum(ACTS[name][1] for name in names)
    say(f"demo: {', '.join(names)}: about {seconds} s on two quiet cores")
    began, codes = time.monotonic(), []
    for name in names:
        codes.append(ACTS[name][0]())
    say(f"\ndemo: {time.monotonic() - began:.0f} s. What to look at next:")
    say('  export PERDURE_HOME="$PWD/.demo" PATH="$PWD/.venv/bin:$PATH"')
    say("  perdure dash             # all of these jobs in a browser, at any second of their past")
    say("  perdure watch            # the same on a terminal")
    say("  perdure status; perdure report; perdure diagnose; perdure events --decisions")
    say("  docs/tutorial.md: a job of your own, killed, paused, changed and moved while it trains")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
