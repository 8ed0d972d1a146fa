"""G19: `perdure run` of a script that resumes exactly, killed before, within and after checkpoints.

Passes where every loss has the bits that it has in a run that nothing happens to, as often as a
step was made, and every rank used the same samples.
"""

import time

from tests.e2e.exact import (
    check_equal,
    find_ranks,
    find_step,
    kill_all,
    kill_rank_0_inside_a_write,
    launch,
)
from tests.gpu.jobs import open_jobs
from tests.gpu.kit import Trial

RANKS = 2


def run(trial: Trial) -> None:
    steps, every = trial.choose((120, 10), (40, 8))
    words = ("--steps", str(steps), "--device", trial.device)
    with open_jobs(trial, 90.0) as jobs:
        reference = launch(jobs.start, jobs.home, "reference", RANKS, *words, every=every)
        slow = ("--pace-s", "0.1", "--slow-disk-s", "0.05")
        job = launch(jobs.start, jobs.home, "killed", RANKS, *words, *slow, every=every)
        job.wait_until(lambda: find_step(job) >= 2, "a step")
        jobs.check_held()
        began_s = time.monotonic()
        kill_all(rank for number, rank in find_ranks(job).items() if number == 1)
        job.wait_until(lambda: job.state().get("restarts", 0) == 1, "another generation")
        job.wait_state("running")
        trial.took(time.monotonic() - began_s)
        kill_rank_0_inside_a_write(job, every - 1)
        job.wait_until(lambda: job.state().get("restarts", 0) >= 2, "another generation")
        job.wait_state("running")
        job.wait_until(lambda: find_step(job) >= 2 * every + 2, "steps after a checkpoint")
        kill_all(find_ranks(job).values())
        job.wait_until(lambda: job.state().get("restarts", 0) >= 3, "another generation")
        (jobs.home / "killed" / "hurry").touch()
        jobs.check_end(reference)
        jobs.check_end(job)
        check_equal(jobs.home, steps, RANKS)
        trial.check(True, "")
        found = job.report()["recoveries"]
        trial.note(steps=steps, recoveries=[[r["rung"], r["lost_steps"]] for r in found])
        trial.check(len(found) >= 3, f"only {len(found)} recoveries are told of")
