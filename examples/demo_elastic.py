"""Act `elastic`: a rank dies, and the others do not leave their training loop.

Four ranks train the GPT of `examples/elastic_gpt.py`; two of them are killed with SIGKILL, the
first rank among them. The others redo what the dead one had in flight, and its node starts a new
process in its place, which takes the state from living peers.
"""

import os
import signal
import sys

from demo_job import DemoJob, say, set_up

SCRIPT = ("examples/elastic_gpt.py", "--steps", "160", "--layers", "2", "--width", "64")
KILLS = ((40, 2), (90, 0))
"""(step, rank): the rank is killed at some instant soon after the step."""


def kill_ranks(job: DemoJob) -> None:
    """Kill what `KILLS` says, each once its step is committed."""
    for step, rank in KILLS:
        if not job.wait_for_step(step):
            return
        rows = job.ask("status", "elastic").get("ranks", [])
        pid = next((int(row["pid"]) for row in rows if row["rank"] == rank), 0)
        if pid:
            os.kill(pid, signal.SIGKILL)
            job.tell_next(look="diagnose elastic")


def main() -> int:
    """Run the job and its kills; return the job's exit code."""
    say("\nelastic: four ranks train on while two of them are killed and replaced")
    job = DemoJob("elastic", "-n", "4", "--name", "elastic", *SCRIPT)
    try:
        kill_ranks(job)
        return job.end()
    finally:
        job.kill()


if __name__ == "__main__":
    set_up()
    sys.exit(main())
