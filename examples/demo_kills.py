"""Act `kills`: a small GPT trains on two ranks while the ground is pulled away three times.

The faults are carried out through perdure's public commands, as an outsider would: one rank is
killed with SIGKILL, one is stopped with SIGSTOP, and the controller is killed. Training reaches
its planned step.
"""

import json
import os
import signal
import sys

from demo_job import HOME, DemoJob, say, set_up

FAULTS = (("crash", 1, 100, "diagnose demo"), ("stop", 0, 200, "events demo --decisions"))
"""What `perdure inject` does, to which rank, at which step; and the command that shows more."""
CONTROLLER_AT = 300


def carry_out_faults(job: DemoJob) -> None:
    """Kill rank 1, stop rank 0, kill the controller; tell of each."""
    for fault, rank, step, look in FAULTS:
        if not job.wait_for_step(step - 60):
            return
        job.inject(fault, "--rank", str(rank), "--at-step", str(step))
        if not job.wait_for_step(step + 5):
            return
        job.tell_next(look=look)
    if job.wait_for_step(CONTROLLER_AT):
        os.kill(json.loads((job.folder / "parts.json").read_text())["controller"], signal.SIGKILL)
        job.tell_next(look="report demo")


def main() -> int:
    """Run the job, its faults beside it; return the job's exit code."""
    say("\nkills: SIGKILL of rank 1, SIGSTOP of rank 0, SIGKILL of perdure's controller")
    job = DemoJob("demo", "-c", "examples/demo.toml")
    try:
        carry_out_faults(job)
        code = job.end()
        page = HOME / "report.html"
        if job.ask("report", "demo", "--html", str(page)):
            say(f"    as a page: {page}")
        return code
    finally:
        job.kill()


if __name__ == "__main__":
    set_up()
    sys.exit(main())
